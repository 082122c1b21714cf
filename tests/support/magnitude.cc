// SPDX-License-Identifier: MIT
#include "tests/support/magnitude.h"

#include <algorithm>
#include <cmath>
#include <variant>

#include "ref/ref.h"

namespace coterie::test {
namespace {

using Index = std::int64_t;
using Values = std::vector<double>;

// Absolute values of a (B, H, N, D) tensor, NaN as 0.
struct Dense {
  Index heads = 1, rows = 0, cols = 0;
  Values values;

  explicit Dense(const TensorView& view)
      : heads(view.size(1)), rows(view.size(2)), cols(view.size(3)), values(read_values(view)) {
    for (double& value : values) value = std::isnan(value) ? 0.0 : std::abs(value);
  }
  const double* row(Index b, Index h, Index i) const {
    return &values[((b * heads + h) * rows + i) * cols];
  }
};

double dot(const double* a, const double* b, Index count) {
  double sum = 0.0;
  for (Index d = 0; d < count; ++d) sum += a[d] * b[d];
  return sum;
}

void add(double* sum, double factor, const double* row, Index count) {
  for (Index d = 0; d < count; ++d) sum[d] += factor * row[d];
}

double largest(const Values& values) {
  return values.empty() ? 0.0 : *std::max_element(values.begin(), values.end());
}

// Rows as the mechanism sees them, and the largest factor between their gradient and the input's.
double normalise(Dense& x, const TensorView& view, bool to_unit_variance) {
  const Values values = read_values(view);
  const auto dim = static_cast<double>(x.cols);
  double factor = 0.0;
  for (std::size_t first = 0; first < values.size(); first += x.cols) {
    double mean = 0.0, square = 0.0;
    for (Index d = 0; d < x.cols; ++d) mean += values[first + d] / dim;
    if (!to_unit_variance) mean = 0.0;
    for (Index d = 0; d < x.cols; ++d) square += std::pow(values[first + d] - mean, 2);
    const double norm = to_unit_variance ? std::sqrt(square / dim + 1e-6) : std::sqrt(square);
    for (Index d = 0; d < x.cols; ++d) {
      const double value = std::abs(values[first + d] - mean) / norm;
      x.values[first + d] = std::isfinite(value) ? value : 0.0;
    }
    if (norm > 0.0) factor = std::max(factor, 1.0 / norm);
  }
  return factor;
}

// Sums of the terms of every result, filled query by query.
struct Sums {
  Dense q, k, v, g;
  bool shared;
  Index B, H, Hkv, N, S, Dk, Dv;
  Values dq, dk, dv, logits, row_terms, column_terms;
  double out = 0.0;

  Sums(const AttentionInputs& inputs, const TensorView& grad_out)
      : q(inputs.q),
        k(inputs.k.present() ? inputs.k : inputs.q),
        v(inputs.v),
        g(grad_out),
        shared(!inputs.k.present() || inputs.k.data == inputs.q.data),
        B(inputs.q.size(0)),
        H(q.heads),
        Hkv(v.heads),
        N(q.rows),
        S(v.rows),
        Dk(q.cols),
        Dv(v.cols),
        dq(q.values.size()),
        dk(k.values.size()),
        dv(v.values.size()),
        logits(H),
        row_terms(B * H * N),
        column_terms(B * H * S) {}

  Index value_head(Index h) const { return h / (H / Hkv); }
  Index key_head(Index h) const { return shared ? h : value_head(h); }

  void add_query(Index b, Index h, Index i, const double* weights) {
    const Index row = (b * H + h) * N + i, kv = value_head(h), kh = key_head(h);
    const double* gradient = g.row(b, h, i);
    Values outputs(Dv);
    for (Index j = 0; j < S; ++j) {
      if (weights[j] != 0.0) add(outputs.data(), std::abs(weights[j]), v.row(b, kv, j), Dv);
    }
    out = std::max(out, largest(outputs));
    const double delta = dot(gradient, outputs.data(), Dv);
    for (Index j = 0; j < S; ++j) {
      const double weight = std::abs(weights[j]);
      if (weight == 0.0) continue;
      const double term = weight * (dot(gradient, v.row(b, kv, j), Dv) + delta);
      row_terms[row] += term;
      column_terms[(b * H + h) * S + j] += term;
      logits[h] += term * dot(q.row(b, h, i), k.row(b, kh, j), Dk);
      add(&dv[((b * Hkv + kv) * S + j) * Dv], weight, gradient, Dv);
      add(&dq[row * Dk], term, k.row(b, kh, j), Dk);
      add(&dk[((b * k.heads + kh) * S + j) * Dk], term, q.row(b, h, i), Dk);
    }
  }
};

// CAST's affinities enter twice more, scaled by 1 + softplus(+-gate): with the query's terms in the
// mix of clusters, with the key's in the summaries.
void add_affinities(const Sums& sums, const AttentionInputs& inputs, double scale, Magnitudes& m) {
  double gate = 1.0, surrogate = 0.0;
  for (double value : read_values(inputs.gate)) {
    if (!std::isnan(value)) gate = std::max(gate, 1.0 + std::log1p(std::exp(std::abs(value))));
  }
  for (double value : read_values(inputs.centroids)) {
    surrogate = std::max(surrogate, std::abs(value));
  }
  Values dcentroids(sums.H * sums.Dk), dgate(sums.B * sums.N);
  const Values ones(sums.Dk, 1.0);
  const auto add_side = [&](const Dense& x, const Values& terms, bool keys, double& magnitude) {
    for (Index b = 0; b < sums.B; ++b)
      for (Index h = 0; h < sums.H; ++h)
        for (Index i = 0; i < x.rows; ++i) {
          const double* row = x.row(b, keys ? sums.key_head(h) : h, i);
          const double term = scale * gate * terms[(b * sums.H + h) * x.rows + i];
          add(&dcentroids[h * sums.Dk], term, row, sums.Dk);
          dgate[b * sums.N + i] += term * surrogate * dot(row, ones.data(), sums.Dk);
        }
    const double group = keys ? static_cast<double>(sums.H / sums.Hkv) : 1.0;
    magnitude += scale * gate * group * largest(terms) * surrogate;
  };
  add_side(sums.q, sums.row_terms, false, m.dq);
  add_side(sums.k, sums.column_terms, true, m.dk);
  m.dcentroids = largest(dcentroids);
  m.dgate = largest(dgate);
}

}  // namespace

Magnitudes magnitudes(const Mechanism& mechanism, const AttentionInputs& inputs,
                      const std::vector<TensorView>& saved, const TensorView& grad_out) {
  const bool routing = std::holds_alternative<RoutingParams>(mechanism);
  const bool lsh = std::holds_alternative<LshParams>(mechanism);
  Sums sums(inputs, grad_out);
  const TensorView& keys = inputs.k.present() ? inputs.k : inputs.q;
  const double q_factor = routing ? normalise(sums.q, inputs.q, true) : 1.0;
  const double k_factor = routing || lsh ? normalise(sums.k, keys, routing) : 1.0;
  const Values weights = ref::weights<double>(mechanism, inputs, saved);
  for (Index row = 0; row < sums.B * sums.H * sums.N; ++row) {
    const Index head = row / sums.N;
    sums.add_query(head / sums.H, head % sums.H, row % sums.N, &weights[row * sums.S]);
  }
  double scale = std::abs(inputs.scale);
  if (scale == 0.0) scale = routing ? 1.0 : 1.0 / std::sqrt(static_cast<double>(sums.Dk));
  Magnitudes m;
  m.out = sums.out;
  m.dq = largest(sums.dq) * scale * q_factor;
  m.dk = largest(sums.dk) * scale * k_factor;
  m.dv = largest(sums.dv);
  m.dlogit_scale = largest(sums.logits) * scale;
  if (std::holds_alternative<CastParams>(mechanism)) add_affinities(sums, inputs, scale, m);
  if (sums.shared) m.dq += m.dk;
  return m;
}

}  // namespace coterie::test
