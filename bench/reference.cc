// SPDX-License-Identifier: MIT
#include "bench/reference.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "bench/threads.h"
#include "cases/buffers.h"
#include "coterie/random.h"

namespace coterie::bench {
namespace {

// Size of a sample: query-key pairs per head, and at least this many queries.
constexpr std::int64_t kPairs = std::int64_t{1} << 24, kFewestRows = 128;

// Splits the positions into equal ranges, one per row of the sample, and draws one from each.
std::vector<std::int64_t> sample_positions(std::int64_t N, std::uint64_t seed) {
  const std::int64_t rows =
      std::min(N, std::max(kPairs / std::max<std::int64_t>(N, 1), kFewestRows));
  const RandomStream stream{seed, RandomUse::data, std::numeric_limits<std::uint32_t>::max()};
  std::vector<std::int64_t> positions;
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::int64_t begin = row * N / rows, end = (row + 1) * N / rows;
    positions.push_back(begin + random_below(stream, static_cast<std::uint64_t>(row),
                                             static_cast<std::uint32_t>(end - begin)));
  }
  return positions;
}

// Rows `positions` of every head of x (B, H, N, D), in host memory.
HostTensor take_rows(const TensorView& x, const std::vector<std::int64_t>& positions) {
  HostTensor rows(x.dtype,
                  {x.size(0), x.size(1), static_cast<std::int64_t>(positions.size()), x.size(3)});
  const std::int64_t element = dtype_bytes(x.dtype), bytes = x.size(3) * element;
  char* to = rows.data<char>();
  for (std::int64_t b = 0; b < x.size(0); ++b) {
    for (std::int64_t h = 0; h < x.size(1); ++h) {
      for (const std::int64_t i : positions) {
        const std::int64_t at = b * x.stride(0) + h * x.stride(1) + i * x.stride(2);
        std::memcpy(to, static_cast<const char*>(x.data) + at * element,
                    static_cast<std::size_t>(bytes));
        to += bytes;
      }
    }
  }
  return rows;
}

HostTensor in_accumulator_type(const TensorView& x) {
  HostTensor copy(accumulator_dtype(x.dtype), sizes_of(x));
  run_on_all_cores(x.size(0) * x.size(1), [&](std::int64_t problem) {
    const auto head = [&](const TensorView& t) {
      return t.narrowed(0, problem / x.size(1), 1).narrowed(1, problem % x.size(1), 1);
    };
    write_values(head(copy), read_values(head(x)));
  });
  return copy;
}

// u8 (B, H, rows, S), the same for all heads: which keys a query of the sample may see.
TensorView causal_mask(HostTensor& memory, const TensorView& q, std::int64_t S,
                       const std::vector<std::int64_t>& positions) {
  const std::int64_t rows = static_cast<std::int64_t>(positions.size());
  memory = HostTensor(DType::u8, {1, 1, rows, S});
  for (std::int64_t row = 0; row < rows; ++row) {
    std::memset(memory.data<char>() + row * S, 1, static_cast<std::size_t>(positions[row] + 1));
  }
  TensorView mask = memory;
  for (const int dim : {0, 1}) {
    mask.sizes[dim] = q.size(dim);
    mask.strides[dim] = 0;
  }
  return mask;
}

}  // namespace

void SquaredNorms::add(const std::vector<double>& got, const std::vector<double>& wanted) {
  for (std::size_t i = 0; i < got.size(); ++i) {
    difference += (got[i] - wanted[i]) * (got[i] - wanted[i]);
    reference += wanted[i] * wanted[i];
  }
}

double SquaredNorms::relative_error(double least) const {
  if (difference == 0) return 0;  // also if both are zero
  const double scale = std::max(std::sqrt(reference), least);
  return scale > 0 ? std::sqrt(difference) / scale : std::numeric_limits<double>::infinity();
}

References::References(const AttentionData& data)
    : positions_(sample_positions(data.problem.N, data.problem.seed)) {
  copies_.reserve(3);
  const auto place = [this](const TensorView& x) -> TensorView {
    const bool as_it_is = x.device == Device::cpu && x.dtype == accumulator_dtype(x.dtype);
    if (as_it_is) return x;
    const HostTensor host = x.device == Device::cpu ? HostTensor() : host_copy(x);
    copies_.push_back(in_accumulator_type(x.device == Device::cpu ? x : host.view()));
    return copies_.back();
  };
  q_ = place(data.q);
  k_ = place(data.k);
  v_ = place(data.v);
}

// The output of one head; q, k and v are (B, 1, N, D).
HostTensor References::output(const TensorView& q, const TensorView& k, const TensorView& v,
                              bool causal) const {
  const HostTensor sample = take_rows(q, positions_);
  HostTensor mask;
  AttentionInputs inputs;
  inputs.q = sample;
  inputs.k = k;
  inputs.v = v;
  inputs.causal = causal && rows() == q.size(2);
  if (causal && !inputs.causal) inputs.mask = causal_mask(mask, sample, v.size(2), positions_);
  const cases::Buffers buffers(FullParams{}, inputs);
  attention_forward(FullParams{}, inputs, buffers.result(), buffers.workspace());
  return host_copy(buffers.result().out);
}

const References::Heads& References::outputs(bool causal, bool shared_qk) {
  const auto [found, fresh] = outputs_.try_emplace({causal, shared_qk});
  if (!fresh) return found->second;
  const std::int64_t ratio = q_.size(1) / v_.size(1);
  for (std::int64_t h = 0; h < q_.size(1); ++h) {
    const TensorView q = q_.narrowed(1, h, 1), v = v_.narrowed(1, h / ratio, 1);
    found->second.push_back(output(q, shared_qk ? q : k_.narrowed(1, h / ratio, 1), v, causal));
  }
  return found->second;
}

// The heads of `out` correspond to those of `wanted` from `first` on.
void References::add_norms(const TensorView& out, const Heads& wanted, std::int64_t first,
                           SquaredNorms& norms) const {
  const HostTensor host = out.device == Device::cpu ? HostTensor() : host_copy(out);
  const HostTensor rows = take_rows(out.device == Device::cpu ? out : host.view(), positions_);
  for (std::int64_t h = 0; h < out.size(1); ++h) {  // head by head to save memory
    norms.add(read_values(rows.view().narrowed(1, h, 1)),
              read_values(wanted[static_cast<std::size_t>(first + h)]));
  }
}

double References::error_of(const TensorView& out, bool causal) {
  SquaredNorms norms;
  add_norms(out, outputs(causal, false), 0, norms);
  return norms.relative_error();
}

double References::error_of(const AttentionRun& run, bool causal) {
  SquaredNorms norms;
  std::int64_t first = 0;
  for (const HeadRun& group : run.groups()) {
    add_norms(group.result.out, outputs(causal, group.shared_qk), first, norms);
    first += group.result.out.size(1);
  }
  return norms.relative_error();
}

}  // namespace coterie::bench
