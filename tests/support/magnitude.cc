// SPDX-License-Identifier: MIT
#include "tests/support/magnitude.h"

#include <algorithm>
#include <cmath>
#include <variant>

#include "core/dropout.h"
#include "ref/ref.h"

namespace coterie::test {
namespace {

using Index = std::int64_t;
using Values = std::vector<double>;

// A (B, H, N, D) tensor, NaN as 0.
struct Dense {
  Index heads = 1, rows = 0, cols = 0;
  Values values;

  explicit Dense(const TensorView& view)
      : heads(view.size(1)), rows(view.size(2)), cols(view.size(3)), values(read_values(view)) {
    for (double& value : values) value = std::isnan(value) ? 0.0 : value;
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

// |a| . |b|
double absolute_dot(const double* a, const double* b, Index count) {
  double sum = 0.0;
  for (Index d = 0; d < count; ++d) sum += std::abs(a[d] * b[d]);
  return sum;
}

void add_squares(double* sum, double factor, const double* row, Index count) {
  for (Index d = 0; d < count; ++d) sum[d] += std::pow(factor * row[d], 2);
}

double largest(const Values& values) {
  return values.empty() ? 0.0 : *std::max_element(values.begin(), values.end());
}

double largest_root(const Values& squares) { return std::sqrt(largest(squares)); }

// Normalises rows as the mechanism does; returns the largest factor from their gradients to the
// input's.
double normalise(Dense& x, bool to_unit_variance) {
  const auto dim = static_cast<double>(x.cols);
  double factor = 0.0;
  for (std::size_t first = 0; first < x.values.size(); first += x.cols) {
    double* row = &x.values[first];
    double mean = 0.0, square = 0.0;
    for (Index d = 0; d < x.cols && to_unit_variance; ++d) mean += row[d] / dim;
    for (Index d = 0; d < x.cols; ++d) square += std::pow(row[d] - mean, 2);
    const double norm = to_unit_variance ? std::sqrt(square / dim + 1e-6) : std::sqrt(square);
    for (Index d = 0; d < x.cols; ++d) row[d] = norm > 0.0 ? (row[d] - mean) / norm : 0.0;
    if (norm > 0.0) factor = std::max(factor, 1.0 / norm);
  }
  return factor;
}

// Sums of squares of the terms of every result, accumulated query by query.
struct Sums {
  Dense q, k, v, g;
  bool shared;
  Index B, H, Hkv, N, S, Dk, Dv;
  double scale = 1.0;
  bool laplace = false;
  Values q_affinity, k_affinity;  // (B, H, N): largest logit with a surrogate; only for CAST
  double out = 0.0;
  Values dq, dk, dv, logits, row_terms, column_terms;

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

  // A weight times its possible error in units in the last place of 1, because it is computed as
  // exp(logit - lse). Laplace weights are products of two numbers with an absolute rounding error.
  double weight_size(Index b, Index h, Index i, Index j, double weight) const {
    const double logit = scale * dot(q.row(b, h, i), k.row(b, key_head(h), j), Dk);
    if (laplace) weight = std::sqrt(std::abs(weight));
    double places = std::max({1.0, std::abs(logit), std::abs(logit - std::log(weight))});
    if (!q_affinity.empty()) {
      places = std::max({places, q_affinity[(b * H + h) * N + i], k_affinity[(b * H + h) * S + j]});
    }
    return weight * places;
  }

  void add_terms(double term, Index b, Index h, Index i, Index j) {
    const Index row = (b * H + h) * N + i, kh = key_head(h);
    row_terms[row] += term * term;
    column_terms[(b * H + h) * S + j] += term * term;
    logits[h] += std::pow(term * absolute_dot(q.row(b, h, i), k.row(b, kh, j), Dk), 2);
    add_squares(&dq[row * Dk], term, k.row(b, kh, j), Dk);
    add_squares(&dk[((b * k.heads + kh) * S + j) * Dk], term, q.row(b, h, i), Dk);
  }

  void add_query(Index b, Index h, Index i, const double* weights) {
    const Index kv = value_head(h);
    const double* gradient = g.row(b, h, i);
    Values absolute(Dv), squares(Dv);
    for (Index j = 0; j < S; ++j) {
      if (weights[j] == 0.0) continue;
      for (Index d = 0; d < Dv; ++d) absolute[d] += std::abs(weights[j] * v.row(b, kv, j)[d]);
      add_squares(squares.data(), weight_size(b, h, i, j, weights[j]), v.row(b, kv, j), Dv);
    }
    out = std::max(out, largest_root(squares));
    const double delta = absolute_dot(gradient, absolute.data(), Dv);
    for (Index j = 0; j < S; ++j) {
      if (weights[j] == 0.0) continue;
      const double weight = weight_size(b, h, i, j, weights[j]);
      add_squares(&dv[((b * Hkv + kv) * S + j) * Dv], weight, gradient, Dv);
      add_terms(weight * (absolute_dot(gradient, v.row(b, kv, j), Dv) + delta), b, h, i, j);
    }
  }
};

// CAST's affinities are used twice more, scaled by 1 + softplus(+-gate): with the query's terms in
// the mix of clusters, and with the key's terms in the summaries.
struct Affinities {
  double gate = 1.0, surrogate = 0.0;
  TensorView centroids;

  explicit Affinities(const AttentionInputs& inputs) : centroids(inputs.centroids) {
    for (double value : read_values(inputs.gate)) {
      if (!std::isnan(value)) gate = std::max(gate, 1.0 + std::log1p(std::exp(std::abs(value))));
    }
    for (double value : read_values(centroids)) surrogate = std::max(surrogate, std::abs(value));
  }

  // The largest |logit| of each token with a surrogate, (B, H, N).
  Values logits(const Sums& sums, bool keys) const {
    const Dense& x = keys ? sums.k : sums.q;
    const Values s = read_values(centroids);
    const Index clusters = centroids.size(1);
    Values result;
    for (Index b = 0; b < sums.B; ++b)
      for (Index h = 0; h < sums.H; ++h)
        for (Index i = 0; i < x.rows; ++i) {
          double most = 0.0;
          for (Index c = 0; c < clusters; ++c) {
            most = std::max(most, std::abs(dot(x.row(b, keys ? sums.key_head(h) : h, i),
                                               &s[(h * clusters + c) * sums.Dk], sums.Dk)));
          }
          result.push_back(sums.scale * gate * most);
        }
    return result;
  }

  void add_to(const Sums& sums, Magnitudes& m) const {
    Values dcentroids(sums.H * sums.Dk), dgate(sums.B * sums.N);
    for (bool keys : {false, true}) {
      const Dense& x = keys ? sums.k : sums.q;
      const Values& terms = keys ? sums.column_terms : sums.row_terms;
      for (Index b = 0; b < sums.B; ++b)
        for (Index h = 0; h < sums.H; ++h)
          for (Index i = 0; i < x.rows; ++i) {
            const double* row = x.row(b, keys ? sums.key_head(h) : h, i);
            const double term = sums.scale * gate * std::sqrt(terms[(b * sums.H + h) * x.rows + i]);
            add_squares(&dcentroids[h * sums.Dk], term, row, sums.Dk);
            dgate[b * sums.N + i] += std::pow(term * surrogate, 2) * dot(row, row, sums.Dk);
          }
      const double sharing = keys ? static_cast<double>(sums.H / sums.Hkv) : 1.0;
      (keys ? m.dk : m.dq) += sums.scale * gate * sharing * largest_root(terms) * surrogate;
    }
    m.dcentroids = largest_root(dcentroids);
    m.dgate = largest_root(dgate);
  }
};

}  // namespace

Magnitudes magnitudes(const Mechanism& mechanism, const AttentionInputs& inputs,
                      const std::vector<TensorView>& saved, const TensorView& grad_out) {
  const bool routing = std::holds_alternative<RoutingParams>(mechanism);
  const bool lsh = std::holds_alternative<LshParams>(mechanism);
  const auto* cast = std::get_if<CastParams>(&mechanism);
  Sums sums(inputs, grad_out);
  const double q_factor = routing ? normalise(sums.q, true) : 1.0;
  const double k_factor = routing || lsh ? normalise(sums.k, routing) : 1.0;
  sums.scale = std::abs(inputs.scale);
  if (sums.scale == 0.0) {
    sums.scale = routing ? 1.0 : 1.0 / std::sqrt(static_cast<double>(sums.Dk));
  }
  if (cast != nullptr) {
    const Affinities affinities(inputs);
    sums.laplace = cast->activation == CastActivation::laplace;
    sums.q_affinity = affinities.logits(sums, false);
    sums.k_affinity = affinities.logits(sums, true);
  }
  // Dropout multiplies weights by at most this.
  const double kept = make_dropout(inputs.dropout_seed, inputs.dropout).keep_scale;
  AttentionInputs undropped = inputs;
  undropped.dropout = 0;
  const Values weights = ref::weights<double>(mechanism, undropped, saved);
  for (Index row = 0; row < sums.B * sums.H * sums.N; ++row) {
    const Index head = row / sums.N;
    sums.add_query(head / sums.H, head % sums.H, row % sums.N, &weights[row * sums.S]);
  }
  Magnitudes m;
  m.out = sums.out;
  m.dq = largest_root(sums.dq) * sums.scale * q_factor;
  m.dk = largest_root(sums.dk) * sums.scale * k_factor;
  m.dv = largest_root(sums.dv);
  m.dlogit_scale = largest_root(sums.logits) * sums.scale;
  if (cast != nullptr) Affinities(inputs).add_to(sums, m);
  if (sums.shared) m.dq += m.dk;
  for (double* size : {&m.out, &m.dq, &m.dk, &m.dv, &m.dcentroids, &m.dgate, &m.dlogit_scale})
    *size *= kept;
  return m;
}

}  // namespace coterie::test
