// SPDX-License-Identifier: MIT
#include "tests/support/row_bounds.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <sstream>
#include <variant>

#include "cases/buffers.h"
#include "core/dropout.h"
#include "core/half.h"
#include "core/items.h"
#include "core/parallel.h"
#include "coterie/random.h"
#include "coterie/spec.h"

namespace coterie::test {
namespace {

using Index = std::int64_t;
using Sizes = std::vector<double>;

// Roundings on the way to a result: weights, a partial result, the result, and one spare.
constexpr double kRoundings = 4.0;
// Error of products and sums in the accumulator, relative to their terms.
constexpr double kAccumulator = 8.0 * 0x1p-24;
// Weights are not checked if a logit's error may change them by more than this.
constexpr double kResolved = 0.25;

double number_of(Index value) { return static_cast<double>(value); }

// Unit roundoff of the inputs' type; an f32 product is computed as three tf32 products.
double roundoff(DType dtype) {
  switch (dtype) {
    case DType::bf16:
      return 0x1p-8;
    case DType::f16:
      return 0x1p-11;
    case DType::f32:
      return 0x1p-21;
    default:
      return 0x1p-50;
  }
}

// Values below this round to 0: the limit of f16's exponents.
double underflow(DType dtype) { return dtype == DType::f16 ? 0x1p-24 : 1e-37; }

Index rows_of(const TensorView& tensor) {
  Index rows = 1;
  for (int dim = 0; dim + 1 < tensor.rank; ++dim) rows *= tensor.size(dim);
  return rows;
}

// Where row `row` (of all leading dimensions) starts.
const char* row_data(const TensorView& tensor, Index row) {
  Index offset = 0;
  for (int dim = tensor.rank - 2; dim >= 0; --dim) {
    offset += row % tensor.size(dim) * tensor.stride(dim);
    row /= tensor.size(dim);
  }
  return static_cast<const char*>(tensor.data) + offset * dtype_bytes(tensor.dtype);
}

template <class From>
void widen(const char* from, Index count, double* to) {
  for (Index d = 0; d < count; ++d) to[d] = to_float(reinterpret_cast<const From*>(from)[d]);
}

void load_row(const TensorView& tensor, Index row, double* to) {
  const char* from = row_data(tensor, row);
  const Index count = tensor.size(tensor.rank - 1);
  if (tensor.dtype == DType::bf16) return widen<Bf16>(from, count, to);
  if (tensor.dtype == DType::f16) return widen<F16>(from, count, to);
  if (tensor.dtype == DType::f32) return widen<float>(from, count, to);
  std::copy_n(reinterpret_cast<const double*>(from), count, to);
}

void store_row(const TensorView& tensor, Index row, const double* from) {
  auto* to = const_cast<char*>(row_data(tensor, row));
  const Index count = tensor.size(tensor.rank - 1);
  if (tensor.dtype == DType::f64) {
    std::copy_n(from, count, reinterpret_cast<double*>(to));
  } else {
    for (Index d = 0; d < count; ++d) reinterpret_cast<float*>(to)[d] = static_cast<float>(from[d]);
  }
}

// Calls task(row) for all rows, in parallel.
template <class Task>
void for_rows(Index rows, const Task& task) {
  constexpr Index kChunk = 256;
  parallel_for((rows + kChunk - 1) / kChunk, [&](Index chunk, int) {
    for (Index row = chunk * kChunk; row < std::min(rows, (chunk + 1) * kChunk); ++row) task(row);
  });
}

Index width_of(const TensorView& tensor) { return tensor.size(tensor.rank - 1); }

// A contiguous copy in a wider type, with 0 in place of non-finite values.
HostTensor finite_copy(const TensorView& from, DType dtype) {
  HostTensor copy(dtype, {from.sizes, from.sizes + from.rank});
  for_rows(rows_of(from), [&](Index row) {
    std::vector<double> values(static_cast<std::size_t>(width_of(from)));
    load_row(from, row, values.data());
    for (double& value : values) value = std::isfinite(value) ? value : 0.0;
    store_row(copy, row, values.data());
  });
  return copy;
}

template <class Measure>
Sizes measured(const TensorView& tensor, const Measure& measure) {
  Sizes sizes(static_cast<std::size_t>(rows_of(tensor)));
  for_rows(rows_of(tensor), [&](Index row) {
    std::vector<double> values(static_cast<std::size_t>(width_of(tensor)));
    load_row(tensor, row, values.data());
    sizes[static_cast<std::size_t>(row)] = measure(values);
  });
  return sizes;
}

double norm_of(const std::vector<double>& values) {
  double sum = 0.0;
  for (double value : values) sum += value * value;
  return std::sqrt(sum);
}

double mean_of(const std::vector<double>& values) {
  double mean = 0.0;
  for (double value : values) mean += value / static_cast<double>(values.size());
  return mean;
}

double deviation_of(const std::vector<double>& values) {
  const double mean = mean_of(values);
  double sum = 0.0;
  for (double value : values) sum += (value - mean) * (value - mean);
  return std::sqrt(sum / static_cast<double>(values.size()) + 1e-6);
}

bool finite(const std::vector<double>& values) {
  return std::all_of(values.begin(), values.end(), [](double v) { return std::isfinite(v); });
}

// The largest row size of each head.
Sizes largest_by_head(const Sizes& sizes, Index rows) {
  Sizes most(sizes.size() / static_cast<std::size_t>(std::max<Index>(rows, 1)), 0.0);
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    double& head = most[i / static_cast<std::size_t>(rows)];
    head = std::max(head, sizes[i]);
  }
  return most;
}

// The root mean square of each head's row sizes.
Sizes usual_by_head(const Sizes& sizes, Index rows) {
  Sizes usual(sizes.size() / static_cast<std::size_t>(std::max<Index>(rows, 1)), 0.0);
  for (std::size_t i = 0; i < sizes.size(); ++i)
    usual[i / static_cast<std::size_t>(rows)] += sizes[i] * sizes[i] / number_of(rows);
  for (double& size : usual) size = std::sqrt(size);
  return usual;
}

// The problem in a wider type.
struct Wide {
  AttentionInputs inputs;
  HostTensor q, k, v, g, centroids, gate, logit_scale;
  bool shared;

  explicit Wide(const cases::Problem& problem)
      : inputs(problem.inputs), shared(keys_are_queries(problem.mechanism)) {
    const DType dtype =
        problem.inputs.q.dtype == DType::bf16 || problem.inputs.q.dtype == DType::f16 ? DType::f32
                                                                                      : DType::f64;
    const auto take = [&](TensorView& view, HostTensor& copy) {
      if (!view.present()) return;
      copy = finite_copy(view, dtype);
      view = copy;
    };
    take(inputs.q, q);
    take(inputs.k, k);
    take(inputs.v, v);
    take(inputs.centroids, centroids);
    take(inputs.gate, gate);
    take(inputs.logit_scale, logit_scale);
    g = finite_copy(problem.grad_out, dtype);
  }
  DType dtype() const { return q.view().dtype; }
  const TensorView& keys() const { return shared ? q.view() : k.view(); }
};

void copy_selection(const std::vector<TensorView>& selection,
                    const std::vector<TensorView>& saved) {
  for (std::size_t s = 0; s < selection.size(); ++s)
    if (selection[s].count() > 0)
      std::memcpy(saved[s].data, selection[s].data,
                  static_cast<std::size_t>(selection[s].count() * dtype_bytes(selection[s].dtype)));
}

// W values and W^T rows, computed by the library: a mechanism applies a weight matrix W to any
// values. Without dropout, which multiplies weights by at most 1 / (1 - p).
struct Applied {
  HostTensor forward, backward;  // (B, H, N, M), (B, Hv, S, M)
};
Applied apply_weights(const Mechanism& mechanism, AttentionInputs inputs,
                      const std::vector<TensorView>& selection, const TensorView& values,
                      const TensorView& rows) {
  inputs.v = values;
  inputs.dropout = 0;
  HostTensor centroids;
  if (std::holds_alternative<RoutingParams>(mechanism)) {  // one set per head of values
    centroids = HostTensor(inputs.centroids.dtype,
                           {values.size(1), inputs.centroids.size(1), inputs.centroids.size(2)});
    inputs.centroids = centroids;
  }
  const cases::Buffers buffers(mechanism, inputs);
  AttentionResult result = buffers.result();
  copy_selection(selection, result.saved);
  Applied applied{HostTensor(rows.dtype, {rows.sizes, rows.sizes + 4}),
                  HostTensor(values.dtype, {values.sizes, values.sizes + 4})};
  result.out = applied.forward;
  attention_attend(mechanism, inputs, result, buffers.workspace());
  AttentionGradients gradients;
  gradients.dv = applied.backward;
  attention_backward(mechanism, inputs, result, rows, gradients, buffers.workspace());
  return applied;
}

// Columns for apply_weights: some with random signs, for which the mean square of the result is the
// sum of squares of the terms, and some unchanged.
class Columns {
 public:
  Columns(DType dtype, const TensorView& like, Index heads, Index signs,
          const std::vector<const Sizes*>& squared, const std::vector<const Sizes*>& plain)
      : signs_(signs),
        squared_(static_cast<Index>(squared.size())),
        tensor_(dtype, {like.size(0), heads, like.size(2),
                        signs * squared_ + static_cast<Index>(plain.size())}) {
    const RandomStream stream{77, RandomUse::data, 7};
    for_rows(rows_of(tensor_), [&](Index row) {
      const auto r = static_cast<std::size_t>(row);
      std::vector<double> values;
      const RandomBits bits = stream.at(static_cast<std::uint64_t>(row));
      for (std::size_t s = 0; s < squared.size(); ++s)
        for (Index m = 0; m < signs; ++m) {
          const bool minus = (bits.word[s % 4] >> (m % 32)) & 1u;
          values.push_back(minus ? -(*squared[s])[r] : (*squared[s])[r]);
        }
      for (const Sizes* column : plain) values.push_back((*column)[r]);
      store_row(tensor_, row, values.data());
    });
  }
  const TensorView& view() const { return tensor_.view(); }

  // The root of the sum of squares for squared column `which`.
  Sizes root(const TensorView& applied, Index which) const {
    return measured(applied, [&, this](const std::vector<double>& row) {
      double sum = 0.0;
      for (Index m = 0; m < signs_; ++m) sum += std::pow(row[which * signs_ + m], 2);
      return std::sqrt(sum / static_cast<double>(signs_));
    });
  }
  Sizes plain(const TensorView& applied, Index which) const {
    return measured(applied, [&, this](const std::vector<double>& row) {
      return std::abs(row[squared_ * signs_ + which]);
    });
  }

 private:
  Index signs_, squared_;
  HostTensor tensor_;
};

// Sizes of the inputs of logits and gradients.
struct Terms {
  Index B, H, Hv, Hk, N, S;
  double scale = 1.0;
  Sizes q, k, v, g;                                  // norms of rows as used in the logits
  Sizes q_raw, k_raw;                                // the same before subtracting means
  Sizes q_slope, k_slope;                            // factor from their gradients to the inputs'
  Sizes v_most, k_most, q_most, g_most, k_raw_most;  // largest of a head
  Sizes logit_scale;

  Terms(const Mechanism& mechanism, const Wide& wide)
      : B(wide.q.view().size(0)),
        H(wide.q.view().size(1)),
        Hv(wide.v.view().size(1)),
        Hk(wide.keys().size(1)),
        N(wide.q.view().size(2)),
        S(wide.v.view().size(2)) {
    const bool routing = std::holds_alternative<RoutingParams>(mechanism);
    const bool lsh = std::holds_alternative<LshParams>(mechanism);
    scale = std::abs(wide.inputs.scale);
    if (scale == 0.0)
      scale = routing ? 1.0 : 1.0 / std::sqrt(static_cast<double>(wide.q.view().size(3)));
    q = measured(wide.q, norm_of);
    k = measured(wide.keys(), norm_of);
    v = measured(wide.v, norm_of);
    g = measured(wide.g, norm_of);
    q_raw = q;
    k_raw = k;
    q_slope.assign(q.size(), 1.0);
    k_slope.assign(k.size(), 1.0);
    if (routing) {
      normalise(wide.q, q, q_raw, q_slope);
      normalise(wide.keys(), k, k_raw, k_slope);
    }
    for (std::size_t j = 0; lsh && j < k.size(); ++j) {
      k_slope[j] = k[j] > 0.0 ? 1.0 / k[j] : 0.0;
      k[j] = k_raw[j] = k[j] > 0.0 ? 1.0 : 0.0;
    }
    v_most = largest_by_head(v, S);
    k_most = largest_by_head(k, S);
    k_raw_most = largest_by_head(k_raw, S);
    q_most = largest_by_head(q, N);
    g_most = largest_by_head(g, N);
    logit_scale.assign(static_cast<std::size_t>(H), 1.0);
    if (wide.inputs.logit_scale.present()) {
      const std::vector<double> factors = read_values(wide.inputs.logit_scale);
      for (std::size_t h = 0; h < factors.size(); ++h) logit_scale[h] = std::abs(factors[h]);
    }
  }

  static void normalise(const TensorView& rows, Sizes& sizes, Sizes& raw, Sizes& slope) {
    const Sizes sigma = measured(rows, deviation_of);
    const auto dim = static_cast<double>(width_of(rows));
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      slope[i] = 1.0 / sigma[i];
      raw[i] = sizes[i] / sigma[i];
      sizes[i] = std::sqrt(dim * std::max(0.0, 1.0 - 1e-6 / (sigma[i] * sigma[i])));
    }
  }

  // The heads, over all batch entries, that belong to a query row.
  std::size_t query_head(Index row) const { return static_cast<std::size_t>(row / N); }
  std::size_t value_head(Index row) const {
    const Index head = row / N;
    return static_cast<std::size_t>(head / H * Hv + head % H / (H / Hv));
  }
  std::size_t key_head(Index row) const {
    const Index head = row / N;
    return static_cast<std::size_t>(head / H * Hk + head % H / (H / Hk));
  }
  double tau(Index row) const { return scale * logit_scale[static_cast<std::size_t>(row / N % H)]; }
};

bool clusters_queries(const Mechanism& mechanism) {
  return std::holds_alternative<ClusteredParams>(mechanism) ||
         std::holds_alternative<ImprovedClusteredParams>(mechanism);
}

// 1 for rows with a non-finite input, otherwise 0; rows outside of all sequences are 0.
Sizes spoilt_rows(const TensorView& tensor, const Sequences& sequences) {
  Sizes spoilt = measured(tensor, [](const auto& row) { return finite(row) ? 0.0 : 1.0; });
  const Index rows = tensor.size(2), heads = tensor.size(1);
  for (Index b = 0; b < tensor.size(0); ++b) {
    const Index used = cases::used_rows(sequences, b, rows);
    for (Index h = 0; h < heads; ++h)
      for (Index i = used; i < rows; ++i)
        spoilt[static_cast<std::size_t>((b * heads + h) * rows + i)] = 0.0;
  }
  return spoilt;
}

// Rows that a non-finite input may affect. Kernels multiply tiles, where a weight of 0 does not
// stop a NaN. Such an input may therefore affect all rows of its item in its key head and in the
// query heads that read it. In the output, a non-finite query affects only its own row, unless it
// is also a key or part of a mean.
struct Met {
  Sizes out, queries, keys, values;  // 1: affected. Rows of out, and of dq, dk and dv
  bool any = false;

  Met(const cases::Problem& problem, const Wide& wide) {
    const AttentionInputs& in = problem.inputs;
    const Sizes q = spoilt_rows(in.q, in.q_sequences), v = spoilt_rows(in.v, in.k_sequences);
    const Sizes k = wide.shared ? q : spoilt_rows(in.k, in.k_sequences);
    out.assign(q.size(), 0.0);
    queries = out;
    keys.assign(k.size(), 0.0);
    values.assign(v.size(), 0.0);
    for (const Sizes* sizes : {&q, &k, &v})
      for (double spoilt : *sizes) any = any || spoilt > 0.0;
    if (!any) return;
    // Queries that are averaged, and queries that contribute to other rows (CAST).
    const bool means = clusters_queries(problem.mechanism) ||
                       std::holds_alternative<CastParams>(problem.mechanism);
    const Index H = in.q.size(1), Hk = wide.keys().size(1), Hv = in.v.size(1);
    for (const Item& item : make_items("stress", in))
      for (Index h = 0; h < Hv; ++h) {
        const Block query{item.q, H, in.q.size(2), h * (H / Hv), H / Hv};
        const Block key{item.k, Hk, in.v.size(2), h * (Hk / Hv), Hk / Hv};
        const Block value{item.k, Hv, in.v.size(2), h, 1};
        const bool bad_keys = any_of(key, k) || any_of(value, v), bad = any_of(query, q);
        if (bad_keys || (bad && (means || wide.shared)))
          set(query, out);
        else if (bad)
          query.each([&](std::size_t row) { out[row] = q[row]; });
        if (!bad_keys && !bad) continue;
        set(query, queries);
        set(key, keys);
        set(value, values);
      }
  }

 private:
  // Rows of an item in some heads of a tensor.
  struct Block {
    Span span;
    Index heads, rows, first, count;
    template <class Visit>
    void each(const Visit& visit) const {
      for (Index h = first; h < first + count; ++h)
        for (Index i = span.begin; i < span.begin + span.length; ++i)
          visit(static_cast<std::size_t>((span.batch * heads + h) * rows + i));
    }
  };
  static bool any_of(const Block& block, const Sizes& sizes) {
    bool found = false;
    block.each([&](std::size_t row) { found = found || sizes[row] > 0.0; });
    return found;
  }
  static void set(const Block& block, Sizes& sizes) {
    block.each([&](std::size_t row) { sizes[row] = 1.0; });
  }
};

// Replaces q and g of every query by the norm of its cluster's mean and of the gradient that it
// receives from there: the root of the members' sum of squares, divided by their number.
void take_means(const Wide& wide, const TensorView& labels, Sizes& q, Sizes& g) {
  const Index H = wide.q.view().size(1), N = wide.q.view().size(2), dim = wide.q.view().size(3);
  const std::vector<Item> items = make_items("stress", wide.inputs);
  parallel_for(static_cast<Index>(items.size()) * H, [&](Index task, int) {
    const Span& span = items[static_cast<std::size_t>(task / H)].q;
    const Index first = (span.batch * H + task % H) * N + span.begin;
    const auto* own = static_cast<const std::int32_t*>(labels.data) + first;
    const Index clusters = span.length == 0 ? 0 : 1 + *std::max_element(own, own + span.length);
    std::vector<double> sums(static_cast<std::size_t>(clusters * dim)), row(dim);
    Sizes counts(static_cast<std::size_t>(clusters)), squares(counts);
    for (Index i = 0; i < span.length; ++i) {
      load_row(wide.q, first + i, row.data());
      const auto c = static_cast<std::size_t>(own[i]);
      for (Index d = 0; d < dim; ++d)
        sums[c * static_cast<std::size_t>(dim) + static_cast<std::size_t>(d)] +=
            row[static_cast<std::size_t>(d)];
      counts[c] += 1.0;
      squares[c] += std::pow(g[static_cast<std::size_t>(first + i)], 2);
    }
    for (Index i = 0; i < span.length; ++i) {
      const auto c = static_cast<std::size_t>(own[i]);
      double norm = 0.0;
      for (Index d = 0; d < dim; ++d)
        norm += std::pow(sums[c * static_cast<std::size_t>(dim) + static_cast<std::size_t>(d)], 2);
      q[static_cast<std::size_t>(first + i)] = std::sqrt(norm) / counts[c];
      g[static_cast<std::size_t>(first + i)] = std::sqrt(squares[c]) / counts[c];
    }
  });
}

HostTensor like(const TensorView& view) {
  return HostTensor(view.dtype, {view.sizes, view.sizes + view.rank});
}

}  // namespace

RowRule::RowRule(const cases::Problem& problem, const std::vector<TensorView>& selection) {
  const Wide wide(problem);
  const Mechanism mechanism = resolve(problem.mechanism, problem.inputs.causal);
  const auto* cast = std::get_if<CastParams>(&mechanism);
  const bool clustered = clusters_queries(mechanism);
  const DType dtype = problem.inputs.q.dtype;
  const Terms terms(mechanism, wide);
  const Index N = terms.N, S = terms.S;

  // The exact values.
  const cases::Buffers buffers(mechanism, wide.inputs);
  AttentionResult result = buffers.result();
  copy_selection(selection, result.saved);
  out_.exact = like(wide.g);
  result.out = out_.exact;
  attention_attend(mechanism, wide.inputs, result, buffers.workspace());
  AttentionGradients gradients;
  const auto place = [](const TensorView& input, Rows& rows, TensorView& gradient) {
    if (!input.present()) return;
    rows.exact = like(input);
    gradient = rows.exact;
  };
  place(wide.inputs.q, dq_, gradients.dq);
  place(wide.inputs.k, dk_, gradients.dk);
  place(wide.inputs.v, dv_, gradients.dv);
  if (cast) place(wide.inputs.centroids, dcentroids_, gradients.dcentroids);
  if (cast) place(wide.inputs.gate, dgate_, gradients.dgate);
  place(wide.inputs.logit_scale, dlogit_scale_, gradients.dlogit_scale);
  attention_backward(mechanism, wide.inputs, result, wide.g, gradients, buffers.workspace());

  // Errors of the logits, and thereby of the weights.
  Sizes error(terms.q.size());
  bool resolved = true;
  double gate = 1.0, surrogate = 0.0;
  Sizes q_gate, k_gate;  // of tokens (B, N): 1 + softplus(+-gate)
  if (cast) {
    for (double phi : read_values(wide.gate)) {
      const double soft = std::log1p(std::exp(-std::abs(phi)));
      q_gate.push_back(cast->gate_scale ? 1.0 + soft + std::max(phi, 0.0) : 1.0);
      k_gate.push_back(cast->gate_scale ? 1.0 + soft + std::max(-phi, 0.0) : 1.0);
      gate = std::max({gate, q_gate.back(), k_gate.back()});
    }
    for (double size : measured(wide.centroids, norm_of)) surrogate = std::max(surrogate, size);
  }
  for (Index i = 0; i < static_cast<Index>(error.size()); ++i) {
    const auto at = static_cast<std::size_t>(i);
    const double q = clustered ? terms.q_most[terms.query_head(i)] : terms.q_raw[at];
    double logit = terms.tau(i) * q * terms.k_raw_most[terms.key_head(i)];
    if (cast)
      logit = std::max(logit, terms.scale * gate * surrogate *
                                  std::max(terms.q_raw[at], terms.k_raw_most[terms.key_head(i)]));
    error[at] = 3.0 * kAccumulator * (logit + std::log(static_cast<double>(S) + 2.0));
    resolved = resolved && error[at] <= kResolved;
  }
  // The weights are unknown, unless all keys are equal: then all weights are equal.
  bool equal_keys = !resolved && !cast;
  if (equal_keys) {
    std::vector<double> first(static_cast<std::size_t>(width_of(wide.keys()))), row(first);
    for (Index j = 0; equal_keys && j < rows_of(wide.keys()); ++j) {
      load_row(wide.keys(), j, row.data());
      if (norm_of(row) == 0.0) continue;  // outside of all sequences
      if (norm_of(first) == 0.0) first = row;
      equal_keys = row == first;
    }
  }

  // Sums of the squares and of the sizes of the terms.
  const Index signs = wide.v.view().size(3) <= 16 ? 32 : 16;
  // Sizes of values, repeated to as many heads as the keys have.
  Sizes v = terms.v;
  if (terms.Hk != terms.Hv) {
    v.resize(terms.k.size());
    for (std::size_t j = 0; j < v.size(); ++j) {
      const Index row = static_cast<Index>(j), head = row / S;
      v[j] = terms.v[static_cast<std::size_t>(
          (head / terms.Hk * terms.Hv + head % terms.Hk / (terms.Hk / terms.Hv)) * S + row % S)];
    }
  }
  const Columns values(wide.dtype(), wide.v, terms.Hk, signs, {&v, &terms.k}, {&v, &terms.k});
  Sizes rv(terms.q.size()), rk(rv), sv(rv), sk(rv);      // of queries; rk and sk include g
  Sizes rg(terms.k.size()), rgq(rg), sge(rg), sgqe(rg);  // of keys
  struct Part {
    Mechanism mechanism;
    bool means;  // the queries of a cluster are replaced by their mean
  };
  // Means and surrogate tokens have a wider type than the inputs, and kernels round them before
  // multiplying them with rows. This changes the logits by the roundoff of their terms, which are
  // independent, and thereby the weights. `blur` is this change relative to the weights' rounding,
  // plus 1.
  Sizes blur(terms.q.size(), 1.0);
  const double spread = std::min(1.0, 6.0 / std::sqrt(static_cast<double>(width_of(wide.q))));
  const auto blurred = [&](std::size_t i, double logit) {
    const double moved = roundoff(dtype) * spread * logit;
    blur[i] = 1.0 + moved / (kRoundings * roundoff(dtype));
    if (moved > kResolved) {
      error[i] = std::max(error[i], 2.0 * kResolved);
      resolved = false;
    }
  };
  const auto* plain = std::get_if<ClusteredParams>(&mechanism);
  const auto* improved = std::get_if<ImprovedClusteredParams>(&mechanism);
  const bool near = (plain && plain->near > 0) || (improved && improved->near > 0);
  std::vector<Part> parts = {{mechanism, plain && !near}};
  if (near)
    parts.push_back({mechanism, true});
  else if (improved && improved->causal == Causality::none)
    parts.push_back({ClusteredParams{improved->clustering}, true});
  for (const Part& part : parts) {
    Sizes q = terms.q, g = terms.g, gq(g.size()), ge(g.size()), gqe(g.size());
    if (part.means) take_means(wide, selection[0], q, g);
    for (Index i = 0; i < static_cast<Index>(blur.size()); ++i) {
      const auto at = static_cast<std::size_t>(i);
      const double k = terms.k_most[terms.key_head(i)];
      if (part.means) blurred(at, terms.tau(i) * q[at] * k);
      if (cast) blurred(at, terms.scale * gate * surrogate * std::max(terms.q[at], k));
    }
    for (std::size_t i = 0; i < gq.size(); ++i) {
      gq[i] = terms.g[i] * q[i] * terms.tau(static_cast<Index>(i)) * blur[i];
      ge[i] = terms.g[i] * (error[i] + kAccumulator);
      gqe[i] = gq[i] * (error[i] + kAccumulator);
    }
    Sizes weighed = terms.g;
    for (std::size_t i = 0; i < g.size(); ++i) {
      weighed[i] *= blur[i];
      g[i] *= blur[i];
    }
    const Columns rows(wide.dtype(), wide.q, terms.H, signs, {&weighed, &gq}, {&ge, &gqe});
    const std::size_t own = part.means && !near ? 3 : selection.size();
    const Applied applied =
        apply_weights(part.mechanism, wide.inputs,
                      {selection.begin(), selection.begin() + static_cast<std::ptrdiff_t>(own)},
                      values.view(), rows.view());
    const auto add = [](Sizes& to, const Sizes& from, const Sizes* factor = nullptr) {
      for (std::size_t i = 0; i < to.size(); ++i)
        to[i] += factor ? (*factor)[i] * from[i] : from[i];
    };
    add(rv, values.root(applied.forward, 0), &blur);
    add(rk, values.root(applied.forward, 1), &g);
    add(sv, values.plain(applied.forward, 0));
    add(sk, values.plain(applied.forward, 1), &g);
    add(rg, rows.root(applied.backward, 0));
    add(rgq, rows.root(applied.backward, 1));
    add(sge, rows.plain(applied.backward, 0));
    add(sgqe, rows.plain(applied.backward, 1));
  }

  // CAST's mix adds the summaries of all clusters with rounded weights and then subtracts those of
  // the token's own clusters; their rounding remains. Rounding the surrogates changes Laplace
  // weights even where they are 0.
  const bool laplace = cast && cast->activation == CastActivation::laplace;
  Sizes given(terms.q.size(), 0.0);
  if (cast) {
    const Sizes sizes = measured(result.saved[laplace ? 1 : 2], norm_of);  // summaries
    const auto clusters = static_cast<std::size_t>(cast->clusters);
    const std::vector<Item> items = make_items("stress", wide.inputs);
    for (std::size_t item = 0; item < items.size(); ++item)
      for (Index h = 0; h < terms.H; ++h) {
        const std::size_t head = item * static_cast<std::size_t>(terms.H * cast->clusters) +
                                 static_cast<std::size_t>(h) * clusters;
        double most = 0.0, squares = 0.0;
        for (std::size_t c = head; c < head + clusters; ++c) {
          most = std::max(most, sizes[c]);
          squares += sizes[c] * sizes[c];
        }
        const Span& span = items[item].q;
        for (Index i = span.begin; i < span.begin + span.length; ++i) {
          const Index row = (span.batch * terms.H + h) * N + i;
          const auto at = static_cast<std::size_t>(row);
          const double own = cast->mode == CastMode::single ? 1.0 : number_of(cast->clusters);
          const double inner = std::sqrt(own * number_of(std::min(cast->size, span.length))) *
                               terms.v_most[terms.value_head(row)];
          given[at] =
              laplace ? (1.0 + 1.42 * (blur[at] - 1.0)) * (std::sqrt(squares) + inner) : most;
        }
      }
  }

  const double most_blurred = blur.empty() ? 1.0 : *std::max_element(blur.begin(), blur.end());
  const Met met(problem, wide);
  // A token in several clusters has a partial result in each, and their underflow adds up: with
  // random signs, or with equal signs if all clusters have the same members.
  const auto* routing = std::get_if<RoutingParams>(&mechanism);
  const double parts_of_token =
      routing && routing->membership != Membership::nearest ? number_of(routing->clusters) : 1.0;
  const bool same_members = routing && routing->window >= N && routing->window >= S;
  const double u = kRoundings * roundoff(dtype),
               least =
                   underflow(dtype) * (same_members ? parts_of_token : std::sqrt(parts_of_token));
  const auto norms = [](const Rows& r) { return measured(r.exact, norm_of); };
  const auto root = [](Index count) { return std::sqrt(static_cast<double>(count)); };
  const double kNotJudged = -1.0;

  const Sizes out_norm = norms(out_);
  out_.tolerance.resize(out_norm.size());
  for (std::size_t i = 0; i < out_norm.size(); ++i) {
    const Index row = static_cast<Index>(i);
    const double logits = equal_keys ? 0.0 : error[i];
    out_.tolerance[i] =
        u * (blur[i] * out_norm[i] + rv[i] + given[i]) +
        (logits + kAccumulator) * 2.0 * (sv[i] + given[i]) +
        least * (root(S) * terms.v_most[terms.value_head(row)] + root(width_of(wide.v)));
    if (logits > kResolved || (met.any && met.out[i] > 0.0)) out_.tolerance[i] = kNotJudged;
  }

  // dq_i = tau sum_j ds_ij k_j, ds_ij = W_ij g_i.(v_j - o_i); Laplace has slopes instead of
  // weights. |g.(v - o)| <= 2 |g||v|, and less in many dimensions: problems draw g and v
  // independently, so g.v stays within six standard deviations.
  const double reach = std::min(2.0, 6.0 / root(width_of(wide.v)));
  const Sizes dq_norm = norms(dq_);
  const double slope = 1.42 * root(terms.S);
  Sizes dq_terms(dq_norm.size()), dq_logits(dq_norm.size()),
      dlogit(static_cast<std::size_t>(terms.H));
  for (std::size_t i = 0; i < dq_norm.size(); ++i) {
    const Index row = static_cast<Index>(i);
    const std::size_t kh = terms.key_head(row), vh = terms.value_head(row),
                      qh = terms.query_head(row);
    const double size = reach * terms.v_most[vh] * terms.tau(row), g = terms.g[i];
    const double k = laplace ? g * slope * terms.k_most[kh] : rk[i];
    dq_terms[i] =
        size * terms.q_slope[i] * (k + least / u * root(S) * terms.g_most[qh] * terms.k_most[kh]);
    dq_logits[i] = (error[i] + kAccumulator) * size * terms.q_slope[i] * (laplace ? k : sk[i]);
    if (cast) {
      // The mix of clusters: each cluster contributes a part of the output.
      const double mix = laplace ? 1.42 * root(cast->clusters * cast->size) * terms.v_most[vh]
                                 : out_norm[i] + rv[i] + given[i];
      const double own = q_gate[static_cast<std::size_t>(row / N / terms.H * N + row % N)];
      const double mixed = reach * mix * terms.scale * g * own * surrogate;
      dq_terms[i] += mixed;
      dq_logits[i] += (error[i] + kAccumulator) * mixed;
    }
    dlogit[static_cast<std::size_t>(row / N % terms.H)] += std::pow(size * terms.q[i] * rk[i], 2);
  }
  const Sizes dk_norm = dk_.exact.view().present() ? norms(dk_) : Sizes(terms.k.size(), 0.0);
  const Sizes dk_usual = usual_by_head(dk_norm, S);
  Sizes dk_terms(dk_norm.size()), dk_logits(dk_norm.size());
  for (std::size_t j = 0; j < dk_norm.size(); ++j) {
    const Index head = static_cast<Index>(j) / S;
    const Index vh = head / terms.Hk * terms.Hv + head % terms.Hk / (terms.Hk / terms.Hv);
    const double size = reach * terms.v_most[static_cast<std::size_t>(vh)] * terms.k_slope[j];
    const Index b = head / terms.Hk, group = terms.H / terms.Hk,
                qh = b * terms.H + head % terms.Hk * group;
    double q = 0.0, g = 0.0;
    for (Index h = qh; h < qh + group; ++h) {
      q = std::max(q, terms.q_most[static_cast<std::size_t>(h)]);
      g = std::max(g, terms.g_most[static_cast<std::size_t>(h)]);
    }
    const double many = root(N * group) * terms.scale * q * g;
    dk_terms[j] = size * ((laplace ? 1.42 * many : rgq[j]) + least / u * many);
    dk_logits[j] = size * (laplace ? (kAccumulator + 1e-6) * 1.42 * many * root(N) : sgqe[j]);
    if (cast) {
      dk_terms[j] += dk_usual[static_cast<std::size_t>(head)];  // like the summaries' gradients
      const double mixed =
          terms.scale * gate * surrogate * reach * terms.v_most[static_cast<std::size_t>(vh)];
      dk_terms[j] += mixed * (laplace ? 1.42 * root(N * group) * root(cast->clusters) * g : rg[j]);
      dk_logits[j] += mixed * (sge[j] + kAccumulator * root(cast->clusters) * g);
    }
  }
  dq_.tolerance.resize(dq_norm.size());
  for (std::size_t i = 0; i < dq_norm.size(); ++i) {
    double size = blur[i] * dq_norm[i] + dq_terms[i], logits = dq_logits[i];
    if (wide.shared) {
      size += dk_terms[i];
      logits += dk_logits[i];
    }
    // Two more roundings for attention over lists: derivatives, and the term subtracted from them.
    dq_.tolerance[i] = (cast ? 1.0 : 1.5) * u * size + logits + least * root(width_of(wide.q));
    const bool spoilt = met.any && met.queries[i] > 0.0;
    if (!resolved || spoilt) dq_.tolerance[i] = kNotJudged;
  }
  if (dk_.exact.view().present()) {
    dk_.tolerance.resize(dk_norm.size());
    for (std::size_t j = 0; j < dk_norm.size(); ++j) {
      dk_.tolerance[j] = u * (most_blurred * dk_norm[j] + dk_terms[j]) + dk_logits[j] +
                         least * root(width_of(wide.q));
      if (!resolved || (met.any && met.keys[j] > 0.0)) dk_.tolerance[j] = kNotJudged;
    }
  }
  const Sizes dv_norm = norms(dv_), dv_usual = usual_by_head(dv_norm, S);
  dv_.tolerance.resize(dv_norm.size());
  for (std::size_t j = 0; j < dv_norm.size(); ++j) {
    const Index head = static_cast<Index>(j) / S, group = terms.Hk / terms.Hv;
    double squares = 0.0, logits = 0.0, g = 0.0;
    for (Index h = 0; h < group; ++h) {  // shared keys have more heads than values
      const Index kh = head / terms.Hv * terms.Hk + head % terms.Hv * group + h;
      const auto at = static_cast<std::size_t>(kh * S + static_cast<Index>(j) % S);
      squares += rg[at] * rg[at];
      logits += sge[at];
    }
    for (double most : terms.g_most) g = std::max(g, most);
    if (cast) logits += kAccumulator * root(cast->clusters) * g;
    if (laplace)
      logits += (u + 1.42 * (most_blurred - 1.0) * u) / 2.0 * g *
                root(N * terms.H / terms.Hv * cast->clusters);
    const double usual = cast ? dv_usual[static_cast<std::size_t>(head)] : 0.0;
    dv_.tolerance[j] = u * (most_blurred * dv_norm[j] + std::sqrt(squares) + usual) + 2.0 * logits +
                       least * (root(N * terms.H / terms.Hv) * g + root(width_of(wide.v)));
    if (!resolved || (met.any && met.values[j] > 0.0)) dv_.tolerance[j] = kNotJudged;
  }

  const bool judged = resolved && !met.any;
  if (wide.inputs.logit_scale.present()) {
    const Sizes norm = norms(dlogit_scale_);  // one row of all heads
    double squares = 0.0, sum = 0.0;
    for (double d : dlogit) squares += d;
    for (std::size_t i = 0; i < error.size(); ++i) sum = std::max(sum, error[i] + kAccumulator);
    dlogit_scale_.tolerance = {judged ? u * (norm[0] + std::sqrt(squares)) +
                                            sum * std::sqrt(squares) * root(N * terms.B)
                                      : kNotJudged};
  }
  if (cast) {
    double q = 0.0, k = 0.0, g = 0.0, most = 0.0, logit = 0.0;
    for (double x : terms.q_most) q = std::max(q, x);
    for (double x : terms.k_most) k = std::max(k, x);
    for (double x : terms.g_most) g = std::max(g, x);
    for (double x : terms.v_most) most = std::max(most, x);
    for (double x : error) logit = std::max(logit, x + kAccumulator);
    const double many =
        laplace ? 1.42 * root(cast->clusters) * root(std::max<Index>(cast->size, N)) : 1.0;
    const double one = reach * terms.scale * gate * g * most * (q + k) * many;
    const Sizes centroid_norm = norms(dcentroids_), gate_norm = norms(dgate_);
    for (double norm : centroid_norm)
      dcentroids_.tolerance.push_back(
          judged
              ? (u + logit) * most_blurred * (norm + one * root(terms.B * N * terms.H / terms.Hk))
              : kNotJudged);
    // One row for each batch entry.
    for (double norm : gate_norm)
      dgate_.tolerance.push_back(judged ? (u + logit) *
                                              (norm + one * surrogate * root(N * terms.H) * root(N))
                                        : kNotJudged);
  }

  const double kept = make_dropout(wide.inputs.dropout_seed, wide.inputs.dropout).keep_scale;
  for (Rows* rows : {&out_, &dq_, &dk_, &dv_, &dcentroids_, &dgate_, &dlogit_scale_})
    for (double& tolerance : rows->tolerance) tolerance *= tolerance > 0 ? kept : 1.0;
}

namespace {

// Counts the rows above their tolerance and finds the worst.
RowFinding judge(const char* name, const TensorView& actual, const RowRule::Rows& rows) {
  RowFinding finding;
  finding.tensor = name;
  const Index count = rows_of(actual);
  Sizes quotient(static_cast<std::size_t>(count)), errors(quotient), norms(quotient);
  const double overflow = actual.dtype == DType::f16 ? 3e4 : 1e37;
  for_rows(count, [&](Index row) {
    const auto at = static_cast<std::size_t>(row);
    quotient[at] = -1.0;
    const double tolerance = rows.tolerance[at];
    if (tolerance < 0.0) return;
    std::vector<double> got(static_cast<std::size_t>(width_of(actual))), want(got);
    load_row(actual, row, got.data());
    load_row(rows.exact, row, want.data());
    norms[at] = norm_of(want);
    if (!(norms[at] + tolerance < overflow)) return;
    for (std::size_t d = 0; d < got.size(); ++d) got[d] -= want[d];
    errors[at] = norm_of(got);
    quotient[at] = errors[at] == 0.0 ? 0.0 : errors[at] / tolerance;
    if (std::isnan(quotient[at])) quotient[at] = std::numeric_limits<double>::infinity();
  });
  double most = -1.0;
  for (Index row = 0; row < count; ++row) {
    const auto at = static_cast<std::size_t>(row);
    finding.judged += quotient[at] >= 0.0;
    finding.wrong += quotient[at] > 1.0;
    if (quotient[at] > 1.0 && finding.first_wrong.size() < 12) finding.first_wrong.push_back(row);
    if (quotient[at] <= most) continue;
    most = quotient[at];
    finding.row = row;
    finding.error = errors[at];
    finding.tolerance = rows.tolerance[at];
    finding.norm = norms[at];
  }
  return finding;
}

}  // namespace

std::string describe(const RowFinding& f) {
  std::ostringstream text;
  text << f.tensor << " row " << f.row << ": error " << f.error << ", tolerance " << f.tolerance
       << ", norm " << f.norm << " (" << f.wrong << " of " << f.judged << " rows:";
  for (Index row : f.first_wrong) text << ' ' << row;
  text << ")";
  return text.str();
}

std::vector<RowFinding> RowRule::check(const TensorView& out,
                                       const AttentionGradients& gradients) const {
  std::vector<RowFinding> findings;
  const auto look = [&](const char* name, const TensorView& actual, const Rows& rows) {
    if (!actual.present() || actual.count() == 0) return;
    RowFinding finding = judge(name, actual, rows);
    if (finding.wrong > 0) findings.push_back(std::move(finding));
  };
  look("out", out, out_);
  look("dq", gradients.dq, dq_);
  look("dk", gradients.dk, dk_);
  look("dv", gradients.dv, dv_);
  look("dcentroids", gradients.dcentroids, dcentroids_);
  look("dgate", gradients.dgate, dgate_);
  look("dlogit_scale", gradients.dlogit_scale, dlogit_scale_);
  return findings;
}

}  // namespace coterie::test
