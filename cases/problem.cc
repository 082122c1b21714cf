// SPDX-License-Identifier: MIT
#include "cases/problem.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <variant>

#include "coterie/random.h"
#include "coterie/spec.h"

namespace coterie::cases {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// Numbers the streams of a problem.
enum Tensor : std::uint32_t { kQ, kK, kV, kGradOut, kCentroids, kGate, kMask, kCentres };

using Values = std::function<double(std::int64_t)>;

RandomStream stream(std::uint64_t seed, Tensor tensor) {
  return {.seed = seed, .use = RandomUse::data, .problem = tensor};
}

Values normal_values(std::uint64_t seed, Tensor tensor) {
  return [s = stream(seed, tensor)](std::int64_t index) {
    return random_normal(s, static_cast<std::uint64_t>(index));
  };
}

Values integer_values(std::uint64_t seed, Tensor tensor) {
  return [s = stream(seed, tensor)](std::int64_t index) {
    return static_cast<double>(random_below(s, static_cast<std::uint64_t>(index), 5)) - 2.0;
  };
}

// The first row of each head everywhere; rows (per head) and dim are the last two sizes. In
// sixteenths, so that sums of many equal rows are exact.
Values equal_values(std::uint64_t seed, Tensor tensor, std::int64_t rows, std::int64_t dim) {
  return [normal = normal_values(seed, tensor), rows, dim](std::int64_t index) {
    return std::round(16.0 * normal(index / (rows * dim) * dim + index % dim)) / 16.0;
  };
}

// Rows around one of eight centres, common to all heads; centre r is chosen with weight 1/(r+1).
Values mixture_values(std::uint64_t seed, Tensor tensor, std::int64_t dim) {
  return [=](std::int64_t index) {
    constexpr int kNumCentres = 8;
    const auto row = static_cast<std::uint64_t>(index / dim);
    double total = 0.0;
    for (int r = 0; r < kNumCentres; ++r) total += 1.0 / (r + 1);
    double left = total * random_unit(stream(seed, tensor).at(row).word[3]);
    int centre = 0;
    while (centre < kNumCentres - 1 && (left -= 1.0 / (centre + 1)) > 0.0) ++centre;
    const auto at = static_cast<std::uint64_t>(centre * dim + index % dim);
    return random_normal(stream(seed, kCentres), at) +
           0.4 * random_normal(stream(seed, tensor), static_cast<std::uint64_t>(index));
  };
}

// Values of q or k of sizes (B, H, N, D).
Values token_values(const Case& c, std::uint64_t seed, Tensor tensor) {
  switch (c.data) {
    case Data::mixture:
      return mixture_values(seed, tensor, c.Dk);
    case Data::equal:
      return equal_values(seed, tensor, tensor == kQ ? c.N : c.S, c.Dk);
    case Data::integers:
      return integer_values(seed, tensor);
    case Data::normal:
      break;
  }
  return normal_values(seed, tensor);
}

TensorView new_ints(std::vector<HostTensor>& storage, const std::vector<std::int64_t>& values) {
  const TensorView view =
      new_tensor(storage, DType::i32, {static_cast<std::int64_t>(values.size())});
  fill(view, [&](std::int64_t i) { return static_cast<double>(values[i]); });
  return view;
}

// Sequences of `rows` rows; packed ones leave the last two rows to nobody. `keys` of
// cross-attention get other lengths than the queries, so that there are items with queries and no
// keys and the reverse.
Sequences make_sequences(const Case& c, std::int64_t rows, bool keys,
                         std::vector<HostTensor>& storage) {
  Sequences sequences;
  const bool cross = c.N != c.S;
  if (c.lengths == Lengths::padded) {
    const std::vector<std::int64_t> pattern =
        cross && keys ? std::vector<std::int64_t>{rows, rows / 2 + 1, rows, 0}
                      : std::vector<std::int64_t>{rows, 0, rows / 2 + 1, rows - 1};
    std::vector<std::int64_t> lengths;
    for (std::int64_t b = 0; b < c.B; ++b) lengths.push_back(pattern[b % 4]);
    sequences.lengths = new_ints(storage, lengths);
  } else if (c.lengths == Lengths::packed) {
    const std::int64_t third = rows / 3, eighth = rows / 8;
    sequences.cu_seqlens = new_ints(
        storage,
        cross && keys
            ? std::vector<std::int64_t>{0, eighth, third, third, third + eighth, rows - 2}
            : std::vector<std::int64_t>{0, third, third, third + 1, third + eighth, rows - 2});
  }
  return sequences;
}

// NaN in the rows (dimension `dim`) of no sequence.
void spoil_padding(const TensorView& tensor, const Sequences& sequences, int dim) {
  for (std::int64_t b = 0; b < tensor.size(0); ++b) {
    const std::int64_t used = used_rows(sequences, b, tensor.size(dim));
    fill(tensor.narrowed(0, b, 1).narrowed(dim, used, tensor.size(dim) - used),
         [](std::int64_t) { return kNaN; });
  }
}

// (B, H, N, S) by stride 0 over heads; one row in eight admits nothing.
TensorView make_mask(const Case& c, std::uint64_t seed, std::vector<HostTensor>& storage) {
  TensorView mask = new_tensor(storage, DType::u8, {c.B, 1, c.N, c.S});
  fill(mask, [&](std::int64_t index) {
    const RandomStream s = stream(seed, kMask);
    const std::uint32_t row_word = s.at(static_cast<std::uint64_t>(index / c.S)).word[3];
    const std::uint32_t word = s.at(static_cast<std::uint64_t>(index)).word[0];
    return random_unit(row_word) > 0.125 && random_unit(word) < 0.7 ? 1.0 : 0.0;
  });
  mask.sizes[1] = c.H;
  mask.strides[1] = 0;
  return mask;
}

// The tensors that only routing and CAST take.
void add_parameters(const Case& c, std::uint64_t seed, Problem& problem) {
  const DType dtype = accumulator_dtype(c.dtype);
  const Values centroids =
      c.data == Data::integers ? integer_values(seed, kCentroids) : normal_values(seed, kCentroids);
  AttentionInputs& inputs = problem.inputs;
  if (const auto* routing = std::get_if<RoutingParams>(&problem.mechanism)) {
    inputs.centroids = new_tensor(problem.storage, dtype, {c.Hkv, routing->clusters, c.Dk});
    fill(inputs.centroids, centroids);
    if (c.logit_scale) {
      inputs.logit_scale = new_tensor(problem.storage, dtype, {c.H});
      fill(inputs.logit_scale, [](std::int64_t h) { return 0.5 + 0.25 * static_cast<double>(h); });
    }
  }
  if (const auto* cast = std::get_if<CastParams>(&problem.mechanism)) {
    inputs.centroids = new_tensor(problem.storage, dtype, {c.H, cast->clusters, c.Dk});
    const double deviation = c.data == Data::integers ? 1.0 : 1.0 / std::sqrt(c.Dk);
    fill(inputs.centroids, [&](std::int64_t index) { return deviation * centroids(index); });
    inputs.gate = new_tensor(problem.storage, dtype, {c.B, c.N});
    fill(inputs.gate, normal_values(seed, kGate));
    spoil_padding(inputs.gate, inputs.q_sequences, 1);
  }
}

// A poisoned tensor like an input, or none where the input is absent.
TensorView like(const TensorView& input, Layout layout, std::vector<HostTensor>& storage) {
  if (!input.present()) return {};
  return new_tensor(storage, input.dtype,
                    std::vector<std::int64_t>(input.sizes, input.sizes + input.rank), layout);
}

}  // namespace

std::int64_t used_rows(const Sequences& sequences, std::int64_t b, std::int64_t rows) {
  if (sequences.lengths.present()) {
    return static_cast<std::int64_t>(read_values(sequences.lengths).at(b));
  }
  if (sequences.cu_seqlens.present()) {
    return static_cast<std::int64_t>(read_values(sequences.cu_seqlens).back());
  }
  return rows;
}

void poison(const TensorView& tensor) {
  if (tensor.count() == 0) return;
  std::memset(tensor.data, is_floating(tensor.dtype) ? 0xFF : 0x7F,
              static_cast<std::size_t>(tensor.count() * dtype_bytes(tensor.dtype)));
}

TensorView new_tensor(std::vector<HostTensor>& storage, DType dtype,
                      const std::vector<std::int64_t>& sizes, Layout layout) {
  std::vector<std::int64_t> stored = sizes;
  if (sizes.size() != 4) layout = Layout::bhnd;
  if (layout == Layout::bnhd) std::swap(stored[1], stored[2]);
  if (layout == Layout::gaps) stored = {sizes[0], sizes[1] + 1, sizes[2] + 2, sizes[3] + 3};
  poison(storage.emplace_back(dtype, stored));
  const TensorView view = storage.back().view();
  if (layout == Layout::bnhd) return view.transposed(1, 2);
  if (layout == Layout::gaps) {
    return view.narrowed(1, 1, sizes[1]).narrowed(2, 1, sizes[2]).narrowed(3, 1, sizes[3]);
  }
  return view;
}

Problem make_problem(const Case& given, std::uint64_t seed) {
  const Case c = completed(given);
  Problem problem;
  problem.mechanism = AttentionSpec::parse(c.spec).groups.at(0).mechanism;
  problem.layout = c.layout;
  AttentionInputs& inputs = problem.inputs;
  std::vector<HostTensor>& storage = problem.storage;
  inputs.q_sequences = make_sequences(c, c.N, false, storage);
  inputs.k_sequences = make_sequences(c, c.S, true, storage);
  inputs.scale = c.scale;
  inputs.causal = c.causal;
  inputs.seed = seed;

  inputs.q = new_tensor(storage, c.dtype, {c.B, c.H, c.N, c.Dk}, c.layout);
  fill(inputs.q, token_values(c, seed, kQ));
  spoil_padding(inputs.q, inputs.q_sequences, 2);
  if (!keys_are_queries(problem.mechanism)) {
    inputs.k = new_tensor(storage, c.dtype, {c.B, c.Hkv, c.S, c.Dk}, c.layout);
    fill(inputs.k, token_values(c, seed, kK));
    spoil_padding(inputs.k, inputs.k_sequences, 2);
  }
  inputs.v = new_tensor(storage, c.dtype, {c.B, c.Hkv, c.S, c.Dv}, c.layout);
  fill(inputs.v, normal_values(seed, kV));
  spoil_padding(inputs.v, inputs.k_sequences, 2);
  problem.grad_out = new_tensor(storage, c.dtype, {c.B, c.H, c.N, c.Dv}, c.layout);
  fill(problem.grad_out, normal_values(seed, kGradOut));
  spoil_padding(problem.grad_out, inputs.q_sequences, 2);
  if (c.mask) inputs.mask = make_mask(c, seed, storage);
  add_parameters(c, seed, problem);
  return problem;
}

Pass prepare(const Problem& problem) {
  const AttentionInputs& inputs = problem.inputs;
  Pass run;
  run.selection_count = attention_saved(problem.mechanism, inputs).selection_count;
  run.buffers = AttentionBuffers(problem.mechanism, inputs);
  run.result = run.buffers.result();
  for (const TensorView& saved : run.result.saved) poison(saved);
  run.result.out = like(problem.grad_out, problem.layout, run.storage);
  run.workspace = run.buffers.workspace();
  const auto bytes = static_cast<std::size_t>(run.workspace.bytes);
  if (bytes > 0) std::memset(run.workspace.data, 0xFF, bytes);

  AttentionGradients& gradients = run.gradients;
  gradients.dq = like(inputs.q, problem.layout, run.storage);
  gradients.dk = like(inputs.k, problem.layout, run.storage);
  gradients.dv = like(inputs.v, problem.layout, run.storage);
  if (std::holds_alternative<CastParams>(problem.mechanism)) {
    gradients.dcentroids = like(inputs.centroids, problem.layout, run.storage);
    gradients.dgate = like(inputs.gate, problem.layout, run.storage);
  }
  gradients.dlogit_scale = like(inputs.logit_scale, problem.layout, run.storage);
  return run;
}

Pass run_forward(const Problem& problem) {
  Pass run = prepare(problem);
  attention_forward(problem.mechanism, problem.inputs, run.result, run.workspace);
  return run;
}

void run_backward(const Problem& problem, Pass& run) {
  attention_backward(problem.mechanism, problem.inputs, run.result, problem.grad_out, run.gradients,
                     run.workspace);
}

}  // namespace coterie::cases
