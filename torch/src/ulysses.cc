// SPDX-License-Identifier: MIT
#include "coterie/torch/ulysses.h"

#include <ATen/ops/cat.h>
#include <torch/csrc/autograd/custom_function.h>

#include <string>

#include "coterie/error.h"
#include "coterie/layer.h"

namespace coterie::torch_api {
namespace {

using ::torch::autograd::AutogradContext;
using ::torch::autograd::variable_list;
using Shape = std::vector<std::int64_t>;

struct Exchange {
  const SequenceRanks& ranks;

  // Sends out[i] to rank i. Part p from rank i has the type of out[i][p] and shape shapes[i][p].
  std::vector<variable_list> run(const std::vector<variable_list>& out,
                                 const std::vector<std::vector<Shape>>& shapes) const {
    const auto size = static_cast<std::size_t>(ranks.size);
    variable_list bytes;
    SequenceRanks::Sizes to(size), from(size);
    for (std::size_t i = 0; i < size; ++i) {
      for (std::size_t p = 0; p < out[i].size(); ++p) {
        bytes.push_back(out[i][p].contiguous().view(-1).view(at::kByte));
        to[i] += bytes.back().numel();
        from[i] += c10::multiply_integers(shapes[i][p]) * out[i][p].element_size();
      }
    }
    const at::Tensor got = ranks.exchange(at::cat(bytes), to, from);
    std::vector<variable_list> parts(size);
    std::int64_t at = 0;
    for (std::size_t i = 0; i < size; ++i) {
      for (std::size_t p = 0; p < out[i].size(); ++p) {
        const std::int64_t length = c10::multiply_integers(shapes[i][p]);
        const std::int64_t count = length * out[i][p].element_size();
        // A copy where the place of a wider type is not a multiple of its size.
        at::Tensor piece = got.narrow(0, at, count);
        if (at % out[i][p].element_size() != 0) piece = piece.clone();
        parts[i].push_back(piece.view(out[i][p].scalar_type()).view(shapes[i][p]));
        at += count;
      }
    }
    return parts;
  }
};

// Part p of all ranks side by side in dimension `dim`.
variable_list joined(const std::vector<variable_list>& from, std::int64_t dim) {
  variable_list parts;
  for (std::size_t p = 0; p < from[0].size(); ++p) {
    variable_list pieces;
    for (const variable_list& rank : from) pieces.push_back(rank[p]);
    parts.push_back(at::cat(pieces, dim));
  }
  return parts;
}

variable_list heads_of(const variable_list& parts, const SequenceRanks& ranks,
                       std::int64_t length) {
  std::vector<variable_list> out;
  std::vector<std::vector<Shape>> shapes;
  for (std::int64_t i = 0; i < ranks.size; ++i) {
    const std::int64_t positions = sequence_slice(length, i, ranks.size).count;
    out.emplace_back();
    shapes.emplace_back();
    for (const at::Tensor& part : parts) {
      const std::int64_t h = part.size(2) / ranks.size;
      out.back().push_back(part.narrow(2, i * h, h));
      shapes.back().push_back({part.size(0), positions, h, part.size(3)});
    }
  }
  return joined(Exchange{ranks}.run(out, shapes), 1);
}

variable_list positions_of(const variable_list& parts, const SequenceRanks& ranks) {
  const std::int64_t length = parts[0].size(1);
  const std::int64_t own = sequence_slice(length, ranks.rank, ranks.size).count;
  std::vector<variable_list> out;
  std::vector<std::vector<Shape>> shapes;
  for (std::int64_t i = 0; i < ranks.size; ++i) {
    const SequenceSlice slice = sequence_slice(length, i, ranks.size);
    out.emplace_back();
    shapes.emplace_back();
    for (const at::Tensor& part : parts) {
      out.back().push_back(part.narrow(1, slice.first, slice.count));
      shapes.back().push_back({part.size(0), own, part.size(2), part.size(3)});
    }
  }
  return joined(Exchange{ranks}.run(out, shapes), 2);
}

// A CustomClassHolder: autograd stores it.
struct HeldRanks : ::torch::CustomClassHolder {
  SequenceRanks ranks;
};
using HeldRanksPointer = c10::intrusive_ptr<HeldRanks>;

// The gradient of one direction goes in the other.
struct UlyssesFunction : ::torch::autograd::Function<UlyssesFunction> {
  static variable_list forward(AutogradContext* ctx, at::TensorList parts,
                               const HeldRanksPointer& held, std::int64_t length, bool heads) {
    ctx->saved_data["held"] = c10::IValue::make_capsule(held);
    ctx->saved_data["length"] = length;
    ctx->saved_data["heads"] = heads;
    return heads ? heads_of(parts.vec(), held->ranks, length)
                 : positions_of(parts.vec(), held->ranks);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const auto held =
        c10::static_intrusive_pointer_cast<HeldRanks>(ctx->saved_data["held"].toCapsule());
    variable_list found = ctx->saved_data["heads"].toBool()
                              ? positions_of(gradients, held->ranks)
                              : heads_of(gradients, held->ranks, ctx->saved_data["length"].toInt());
    found.resize(found.size() + 3);
    return found;
  }
};

variable_list run_ulysses(const variable_list& parts, const SequenceRanks& ranks,
                          std::int64_t length, bool heads) {
  if (!at::GradMode::is_enabled()) {
    return heads ? heads_of(parts, ranks, length) : positions_of(parts, ranks);
  }
  auto held = c10::make_intrusive<HeldRanks>();
  held->ranks = ranks;
  return UlyssesFunction::apply(at::TensorList(parts), held, length, heads);
}

}  // namespace

SequenceSlice sequence_slice(std::int64_t length, std::int64_t rank, std::int64_t size) {
  const std::int64_t first = length * rank / size;
  return {first, length * (rank + 1) / size - first};
}

std::vector<at::Tensor> to_heads(const std::vector<at::Tensor>& parts, const SequenceRanks& ranks,
                                 std::int64_t length) {
  return run_ulysses(parts, ranks, length, /*heads=*/true);
}

std::vector<at::Tensor> to_positions(const std::vector<at::Tensor>& parts,
                                     const SequenceRanks& ranks) {
  return run_ulysses(parts, ranks, parts[0].size(1), /*heads=*/false);
}

// As heads: each rank gets one that is a copy of the part.
std::vector<at::Tensor> to_all(const std::vector<at::Tensor>& parts, const SequenceRanks& ranks,
                               std::int64_t length) {
  std::vector<at::Tensor> copies;
  for (const at::Tensor& part : parts) {
    const std::int64_t B = part.size(0), n = part.size(1);
    copies.push_back(part.reshape({B, n, 1, -1}).expand({B, n, ranks.size, -1}));
  }
  std::vector<at::Tensor> all = to_heads(copies, ranks, length);
  for (std::size_t i = 0; i < parts.size(); ++i) {
    std::vector<std::int64_t> sizes = parts[i].sizes().vec();
    sizes[1] = length;
    all[i] = all[i].view(sizes);
  }
  return all;
}

void check_sequence_ranks(const AttentionSpec& spec, std::int64_t heads, std::int64_t kv_heads,
                          std::int64_t ranks) {
  const std::vector<HeadSlice> slices = head_slices(spec, heads, kv_heads);
  for (std::size_t g = 0; g < slices.size(); ++g) {
    const HeadSlice& own = slices[g];
    if (own.count % ranks == 0 && own.kv_count % ranks == 0) continue;
    throw Error("[context] expected heads that " + std::to_string(ranks) +
                " ranks can share equally in every group; group " + std::to_string(g) + " of \"" +
                spec.to_string() + "\" has " + std::to_string(own.count) + " query and " +
                std::to_string(own.kv_count) +
                " key/value heads: change --train.context or the numbers of heads");
  }
}

}  // namespace coterie::torch_api
