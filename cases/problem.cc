// SPDX-License-Identifier: MIT
#include "cases/problem.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <variant>

#include "cases/data.h"
#include "coterie/random.h"
#include "coterie/spec.h"

namespace coterie::cases {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

TensorView new_ints(std::vector<HostTensor>& storage, const std::vector<std::int64_t>& values) {
  const TensorView view =
      new_tensor(storage, DType::i32, {static_cast<std::int64_t>(values.size())});
  fill(view, [&](std::int64_t i) { return static_cast<double>(values[i]); });
  return view;
}

// Random lengths of `items` sequences of at most `rows` rows; about one in five is empty.
std::vector<std::int64_t> drawn_lengths(std::int64_t items, std::int64_t rows, std::uint64_t seed) {
  const RandomStream s = stream(seed, kLengths);
  std::vector<std::int64_t> lengths;
  for (std::int64_t t = 0; t < items; ++t) {
    const auto at = static_cast<std::uint64_t>(2 * t + 1);
    const bool empty = random_below(s, at, 5) == 0;
    lengths.push_back(empty ? 0 : random_below(s, at + 1, static_cast<std::uint32_t>(rows + 1)));
  }
  return lengths;
}

// The same for packed sequences: sorted random offsets, about one in five of them 0.
std::vector<std::int64_t> drawn_offsets(std::int64_t items, std::int64_t rows, std::uint64_t seed) {
  std::vector<std::int64_t> cuts = drawn_lengths(items, rows, seed);
  std::sort(cuts.begin(), cuts.end());
  cuts.insert(cuts.begin(), 0);
  return cuts;
}

// Sequences of `rows` rows; packed ones leave the last two rows unused. `keys` of cross-attention
// get other lengths than the queries, so that some items have queries but no keys and the reverse.
Sequences make_sequences(const Case& c, std::int64_t rows, bool keys, std::uint64_t seed,
                         std::vector<HostTensor>& storage) {
  Sequences sequences;
  if (c.lengths == Lengths::drawn) {
    // The same for queries and keys unless their numbers differ.
    const std::uint64_t own = c.N != c.S && keys ? seed + 1 : seed;
    const std::int64_t items = 1 + random_below(stream(seed, kLengths), 0, 12);
    if (c.B > 1)
      sequences.lengths = new_ints(storage, drawn_lengths(c.B, rows, own));
    else
      sequences.cu_seqlens = new_ints(storage, drawn_offsets(items, rows, own));
    return sequences;
  }
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

// Writes NaN into the rows (dimension `dim`) that belong to no sequence.
void spoil_padding(const TensorView& tensor, const Sequences& sequences, int dim) {
  for (std::int64_t b = 0; b < tensor.size(0); ++b) {
    const std::int64_t used = used_rows(sequences, b, tensor.size(dim));
    fill(tensor.narrowed(0, b, 1).narrowed(dim, used, tensor.size(dim) - used),
         [](std::int64_t) { return kNaN; });
  }
}

// Writes NaN or an infinity into one or all elements of up to three rows each of q, k and v.
void spoil_rows(const AttentionInputs& inputs, std::uint64_t seed) {
  const RandomStream s = stream(seed, kSpoilt);
  std::uint64_t index = 0;
  const auto below = [&](std::int64_t bound) {
    return static_cast<std::int64_t>(random_below(s, index++, static_cast<std::uint32_t>(bound)));
  };
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  for (const TensorView& tensor : {inputs.q, inputs.k, inputs.v}) {
    if (!tensor.present() || tensor.count() == 0) continue;
    for (std::int64_t left = below(4); left > 0; --left) {
      TensorView row = tensor;
      for (int dim = 0; dim < 3; ++dim) row = row.narrowed(dim, below(row.size(dim)), 1);
      if (below(2) == 0) row = row.narrowed(3, below(row.size(3)), 1);
      const double kinds[] = {kNaN, kInfinity, -kInfinity};
      const double value = kinds[below(3)];
      fill(row, [&](std::int64_t) { return value; });
    }
  }
}

// (B, H, N, S) with stride 0 over heads; one row in eight admits nothing.
TensorView make_mask(const Case& c, std::uint64_t seed, std::vector<HostTensor>& storage) {
  TensorView mask = new_tensor(storage, DType::u8, {c.B, 1, c.N, c.S});
  fill_rows(mask, [&](std::int64_t index) {
    const RandomStream s = stream(seed, kMask);
    const std::uint32_t row_word = s.at(static_cast<std::uint64_t>(index / c.S)).word[3];
    const std::uint32_t word = s.at(static_cast<std::uint64_t>(index)).word[0];
    return random_unit(row_word) > 0.125 && random_unit(word) < 0.7 ? 1.0 : 0.0;
  });
  mask.sizes[1] = c.H;
  mask.strides[1] = 0;
  return mask;
}

// The tensors that only routing and CAST use.
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

// A poisoned tensor like an input, or none if the input is absent.
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
  inputs.q_sequences = make_sequences(c, c.N, false, seed, storage);
  inputs.k_sequences = make_sequences(c, c.S, true, seed, storage);
  inputs.scale = c.scale;
  inputs.causal = c.causal;
  inputs.seed = seed;
  inputs.dropout = c.dropout;
  inputs.dropout_seed = seed + 1;
  if (c.part) inputs.part = {3, 1, 2};

  inputs.q = new_tensor(storage, c.dtype, {c.B, c.H, c.N, c.Dk}, c.layout);
  const TokenData data(c, problem.mechanism, seed);
  fill_rows(inputs.q, data.values(kQ));
  spoil_padding(inputs.q, inputs.q_sequences, 2);
  if (!keys_are_queries(problem.mechanism)) {
    inputs.k = new_tensor(storage, c.dtype, {c.B, c.Hkv, c.S, c.Dk}, c.layout);
    fill_rows(inputs.k, data.values(kK));
    spoil_padding(inputs.k, inputs.k_sequences, 2);
  }
  inputs.v = new_tensor(storage, c.dtype, {c.B, c.Hkv, c.S, c.Dv}, c.layout);
  fill_rows(inputs.v, data.values(kV));
  spoil_padding(inputs.v, inputs.k_sequences, 2);
  problem.grad_out = new_tensor(storage, c.dtype, {c.B, c.H, c.N, c.Dv}, c.layout);
  fill_rows(problem.grad_out, data.values(kGradOut));
  spoil_padding(problem.grad_out, inputs.q_sequences, 2);
  if (c.data == Data::nonfinite) spoil_rows(inputs, seed);
  if (c.mask) inputs.mask = make_mask(c, seed, storage);
  add_parameters(c, seed, problem);
  return problem;
}

Pass prepare(const Problem& problem) {
  const AttentionInputs& inputs = problem.inputs;
  Pass run;
  run.selection_count = attention_saved(problem.mechanism, inputs).selection_count;
  run.buffers = Buffers(problem.mechanism, inputs);
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
