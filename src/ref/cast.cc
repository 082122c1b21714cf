// SPDX-License-Identifier: MIT
// CAST: surrogate tokens S_c attract clusters I_c. A token attends inside its own clusters and to
// one summary of each other cluster; with q-affinity Aq = Q S^T, k-affinity Ak = K S^T, gate phi:
//   alpha_i = f over clusters of scale Aq_ic psi(phi_i)         token i's weights of the clusters
//   beta_c  = f over members j of scale Ak_jc psi(-phi_j)       the summary of a cluster
//   W_i     = sum_c alpha_ic (f over members of scale q_i . k_j if i is in I_c, else beta_c)
// f is softmax or laplace, psi(x) = 1 + log(1 + e^x). Clusters without members are excluded.
// Dropout multiplies the weights inside clusters, by (i, j), and those of summaries, by (c, j); not
// alpha. A reconstruction of van Engelenhoven et al., "CAST", 2024.
#include <algorithm>
#include <cmath>

#include "ref/problem.h"
#include "ref/rows.h"
#include "ref/selection.h"

namespace coterie::ref {

namespace {

// laplace(x) = (1 + erf((x - mu) / (sigma sqrt 2))) / 2,  mu = sqrt(1/2), sigma = sqrt(1/(4 pi)).
constexpr double kPi = 3.14159265358979323846;
const double kLaplaceMu = std::sqrt(0.5), kLaplaceSigma = std::sqrt(0.25 / kPi);

template <class T>
T laplace(T x) {
  const T z = (x - static_cast<T>(kLaplaceMu)) / static_cast<T>(kLaplaceSigma * std::sqrt(2.0));
  return (1 + std::erf(z)) / 2;
}

template <class T>
T laplace_slope(T x) {
  const T z = (x - static_cast<T>(kLaplaceMu)) / static_cast<T>(kLaplaceSigma);
  return std::exp(-z * z / 2) / static_cast<T>(kLaplaceSigma * std::sqrt(2 * kPi));
}

// f of each row over its list, 0 elsewhere.
template <class T>
Matrix<T> activate(CastActivation f, const Matrix<T>& logits, const std::vector<Row>& rows) {
  if (f == CastActivation::softmax) return softmax_rows(logits, rows);
  Matrix<T> weights(logits.rows, logits.cols);
  for (const Row& row : rows)
    for (Index j : row.keys) weights(row.query, j) = laplace(logits(row.query, j));
  return weights;
}

// Adds to dlogits.
template <class T>
void activate_backward(CastActivation f, const Matrix<T>& logits, const std::vector<Row>& rows,
                       const Matrix<T>& dweights, Matrix<T>& dlogits) {
  if (f == CastActivation::softmax) return softmax_rows_backward(logits, rows, dweights, dlogits);
  for (const Row& row : rows)
    for (Index j : row.keys)
      dlogits(row.query, j) += dweights(row.query, j) * laplace_slope(logits(row.query, j));
}

template <class T>
T sigmoid(T x) {
  return 1 / (1 + std::exp(-x));
}

// psi(sign phi_i) for every token, 1 without gate_scale. This form of the softplus does not
// overflow.
template <class T>
std::vector<T> gate_factors(const CastParams& params, const std::vector<T>& gate, T sign) {
  std::vector<T> factors;
  for (T phi : gate) {
    const T x = sign * phi;
    factors.push_back(params.gate_scale ? 1 + std::max(x, T{0}) + std::log1p(std::exp(-std::abs(x)))
                                        : T{1});
  }
  return factors;
}

// Everything but the attention inside clusters.
template <class T>
struct Parts {
  Lists members;
  Matrix<std::uint8_t> inside;        // (N, C): token i is in cluster c
  std::vector<T> q_factor, k_factor;  // psi(phi), psi(-phi)
  Matrix<T> q_affinity, k_affinity;   // (N, C)
  Matrix<T> mix_logits, mix;          // alpha (N, C)
  std::vector<Row> mix_rows;          // over non-empty clusters
  Matrix<T> summary_logits, summary;  // beta (C, N)
  std::vector<Row> summary_rows;      // over members
  Matrix<T> inner_logits;             // (N, N)
};

template <class T>
Parts<T> parts_of(const CastParams& params, const Problem<T>& problem) {
  const Index tokens = problem.q.rows, clusters = params.clusters;
  Parts<T> parts;
  parts.members = read_lists(problem.place.item_head(problem.saved[0]));
  parts.inside = Matrix<std::uint8_t>(tokens, clusters);
  std::vector<Index> non_empty;
  for (Index c = 0; c < clusters; ++c) {
    for (Index i : parts.members[c]) parts.inside(i, c) = 1;
    if (!parts.members[c].empty()) non_empty.push_back(c);
    parts.summary_rows.push_back({.query = c, .keys = parts.members[c]});
  }
  parts.q_factor = gate_factors<T>(params, problem.gate, 1);
  parts.k_factor = gate_factors<T>(params, problem.gate, -1);
  parts.q_affinity = inner_products(problem.q, problem.centroids);
  parts.k_affinity = inner_products(problem.k, problem.centroids);
  parts.mix_logits = Matrix<T>(tokens, clusters);
  parts.summary_logits = Matrix<T>(clusters, tokens);
  for (Index i = 0; i < tokens; ++i) {
    parts.mix_rows.push_back({.query = i, .keys = non_empty});
    for (Index c = 0; c < clusters; ++c) {
      parts.mix_logits(i, c) = problem.scale * parts.q_affinity(i, c) * parts.q_factor[i];
      parts.summary_logits(c, i) = problem.scale * parts.k_affinity(i, c) * parts.k_factor[i];
    }
  }
  parts.mix = activate(params.activation, parts.mix_logits, parts.mix_rows);
  parts.summary = activate(params.activation, parts.summary_logits, parts.summary_rows);
  parts.inner_logits = scaled(inner_products(problem.q, problem.k), problem.scale);
  return parts;
}

std::vector<Row> inner_rows(const std::vector<Index>& members) {
  std::vector<Row> rows;
  for (Index i : members) rows.push_back({.query = i, .keys = members});
  return rows;
}

// Dropout of the weight of token i and key j within cluster c.
template <class T>
T kept(const Problem<T>& problem, const Parts<T>& parts, Index i, Index j, Index c) {
  if (!problem.dropout.on()) return 1;
  return parts.inside(i, c) ? problem.kept(i, j) : problem.cluster_kept(c, j);
}

// Each token's weights within cluster c: its own attention if it is a member, else the summary.
template <class T>
Matrix<T> cluster_weights(const CastParams& params, const Problem<T>& problem,
                          const Parts<T>& parts, Index c) {
  Matrix<T> weights = activate(params.activation, parts.inner_logits, inner_rows(parts.members[c]));
  for (Index i = 0; i < weights.rows; ++i)
    for (Index j = 0; j < weights.cols; ++j) {
      if (!parts.inside(i, c)) weights(i, j) = parts.summary(c, j);
      weights(i, j) *= kept(problem, parts, i, j, c);
    }
  return weights;
}

template <class T>
Matrix<T> cast_weights(const CastParams& params, const Problem<T>& problem) {
  const Parts<T> parts = parts_of(params, problem);
  Matrix<T> weights(problem.q.rows, problem.k.rows);
  for (Index c = 0; c < params.clusters; ++c) {
    const Matrix<T> taken = cluster_weights(params, problem, parts, c);
    for (Index i = 0; i < weights.rows; ++i)
      for (Index j = 0; j < weights.cols; ++j) weights(i, j) += parts.mix(i, c) * taken(i, j);
  }
  return weights;
}

// Gradients of the three kinds of logits.
template <class T>
struct LogitGradients {
  Matrix<T> mix, summary, inner;
};

template <class T>
LogitGradients<T> logits_backward(const CastParams& params, const Problem<T>& problem,
                                  const Parts<T>& parts, const Matrix<T>& dweights) {
  const Index tokens = dweights.rows, clusters = params.clusters;
  Matrix<T> dmix(tokens, clusters), dsummary(clusters, tokens);
  LogitGradients<T> result{.mix = Matrix<T>(tokens, clusters),
                           .summary = Matrix<T>(clusters, tokens),
                           .inner = Matrix<T>(tokens, tokens)};
  for (Index c = 0; c < clusters; ++c) {
    const Matrix<T> taken = cluster_weights(params, problem, parts, c);
    Matrix<T> dinner(tokens, tokens);
    for (Index i = 0; i < tokens; ++i)
      for (Index j = 0; j < tokens; ++j) {
        dmix(i, c) += dweights(i, j) * taken(i, j);
        (parts.inside(i, c) ? dinner(i, j) : dsummary(c, j)) +=
            parts.mix(i, c) * dweights(i, j) * kept(problem, parts, i, j, c);
      }
    activate_backward(params.activation, parts.inner_logits, inner_rows(parts.members[c]), dinner,
                      result.inner);
  }
  activate_backward(params.activation, parts.mix_logits, parts.mix_rows, dmix, result.mix);
  activate_backward(params.activation, parts.summary_logits, parts.summary_rows, dsummary,
                    result.summary);
  return result;
}

template <class T>
void cast_backward(const CastParams& params, const Problem<T>& problem, const Matrix<T>& dweights,
                   ProblemGradients<T>& gradients) {
  const Parts<T> parts = parts_of(params, problem);
  LogitGradients<T> dlogits = logits_backward(params, problem, parts, dweights);
  Matrix<T> dq_affinity(problem.q.rows, params.clusters);
  Matrix<T> dk_affinity(problem.q.rows, params.clusters);
  for (Index i = 0; i < problem.q.rows; ++i)
    for (Index c = 0; c < params.clusters; ++c) {
      const T dmix = problem.scale * dlogits.mix(i, c);
      const T dsummary = problem.scale * dlogits.summary(c, i);
      dq_affinity(i, c) = dmix * parts.q_factor[i];
      dk_affinity(i, c) = dsummary * parts.k_factor[i];
      if (params.gate_scale)
        gradients.dgate[i] += dmix * parts.q_affinity(i, c) * sigmoid(problem.gate[i]) -
                              dsummary * parts.k_affinity(i, c) * sigmoid(-problem.gate[i]);
    }
  dlogits.inner = scaled(dlogits.inner, problem.scale);
  add(gradients.dq, multiply(dlogits.inner, problem.k));
  add(gradients.dk, transposed_multiply(dlogits.inner, problem.q));
  add(gradients.dq, multiply(dq_affinity, problem.centroids));
  add(gradients.dk, multiply(dk_affinity, problem.centroids));
  add(gradients.dcentroids, transposed_multiply(dq_affinity, problem.q));
  add(gradients.dcentroids, transposed_multiply(dk_affinity, problem.k));
}

// The gated mix of f(Aq) and f(Ak) over clusters, affinities summed over the heads.
template <class T>
Matrix<T> clustering_scores(const CastParams& params, const std::vector<Problem<T>>& heads) {
  const Index tokens = heads[0].q.rows;
  Matrix<T> q_affinity(tokens, params.clusters), k_affinity(tokens, params.clusters);
  for (const Problem<T>& head : heads) {
    add(q_affinity, inner_products(head.q, head.centroids));
    add(k_affinity, inner_products(head.k, head.centroids));
  }
  std::vector<Index> all;
  for (Index c = 0; c < params.clusters; ++c) all.push_back(c);
  std::vector<Row> rows;
  for (Index i = 0; i < tokens; ++i) rows.push_back({.query = i, .keys = all});
  const Matrix<T> from_q = activate(params.activation, q_affinity, rows);
  const Matrix<T> from_k = activate(params.activation, k_affinity, rows);
  Matrix<T> scores(tokens, params.clusters);
  for (Index i = 0; i < tokens; ++i) {
    const T open = sigmoid(heads[0].gate[i]);
    for (Index c = 0; c < params.clusters; ++c)
      scores(i, c) = open * from_q(i, c) + (1 - open) * from_k(i, c);
  }
  return scores;
}

template <class T>
void select_members(const CastParams& params, const std::vector<Problem<T>>& heads) {
  const Matrix<T> scores = clustering_scores(params, heads);
  // With `single` every token must get a slot, even if `size` is too small.
  const Index fair = (scores.rows + params.clusters - 1) / params.clusters;
  const Lists members =
      params.mode == CastMode::topk
          ? top_of_rows(transposed(scores), params.size)
          : members_of(balanced_walk(scores, std::max(params.size, fair)), params.clusters);
  write_lists(heads[0].place.item_head(heads[0].saved[0]), members);
}

template <class T>
void select_item(const CastParams& params, const std::vector<Problem<T>>& heads) {
  if (params.share_heads) return select_members(params, heads);
  for (const Problem<T>& head : heads) select_members<T>(params, {head});
}

}  // namespace

template <class T>
Formula<T> formula(const CastParams& params) {
  return {.weights = [=](const Problem<T>& p) { return cast_weights(params, p); },
          .backward = [=](const Problem<T>& p, const Matrix<T>& dweights,
                          ProblemGradients<T>& g) { cast_backward(params, p, dweights, g); },
          .select_item = [=](const std::vector<Problem<T>>& h) { select_item<T>(params, h); },
          .drops_itself = true};
}

template Formula<float> formula(const CastParams&);
template Formula<double> formula(const CastParams&);

}  // namespace coterie::ref
