// SPDX-License-Identifier: MIT
// Routing attention: rows are normalised, y = (x - mean) / sigma; tokens near a centroid form a
// cluster and attend to each other. s_ij = scale logit_scale qn_i . kn_j.
//   top       each centroid selects its best `window` queries and keys; the rows of a query in
//             several clusters are summed and divided by their number + count_eps
//   balanced  tokens are partitioned into clusters of equal size
//   nearest   a query sees the `window` latest keys of its nearest clusters (strictly causal)
// Roy, Saffar, Vaswani, Grangier, "Efficient Content-Based Sparse Attention with Routing
// Transformers", 2021; balanced and nearest are ours.
#include <algorithm>

#include "ref/normalise.h"
#include "ref/problem.h"
#include "ref/rows.h"
#include "ref/selection.h"

namespace coterie::ref {

namespace {

// Positions of the tensors in `saved`; with share_qk, labels and members of keys are the queries'.
struct Layout {
  int q_members = 0, k_members = 0;  // top, balanced
  int q_labels = 0, k_labels = 0, q_order = 0, q_offsets = 0, k_order = 0,
      k_offsets = 0;  // nearest
};

Layout layout_of(const RoutingParams& params) {
  const int keys = params.shared() ? 0 : 1;
  if (params.membership != Membership::nearest) return {.q_members = 0, .k_members = keys};
  return {.q_labels = 0,
          .k_labels = keys,
          .q_order = 1 + keys,
          .q_offsets = 2 + keys,
          .k_order = 3 + keys,
          .k_offsets = 4 + keys};
}

// With `demote`, drops the query's own key if it has another.
void demote_self(const RoutingParams& params, Index self, std::vector<Index>& keys) {
  if (params.self == SelfAttention::demote && keys.size() > 1) std::erase(keys, self);
}

template <class T>
std::vector<Row> member_rows(const RoutingParams& params, const Problem<T>& problem) {
  const Layout at = layout_of(params);
  const Lists q_members = read_lists(problem.place.item_head(problem.saved[at.q_members]));
  const Lists k_members = read_lists(problem.place.item_head(problem.saved[at.k_members]));
  std::vector<Index> count(static_cast<std::size_t>(problem.q.rows), 0);
  std::vector<Row> rows;
  for (std::size_t c = 0; c < q_members.size(); ++c)
    for (Index i : q_members[c]) {
      Row row{.query = i, .keys = k_members[c]};
      if (problem.causal) std::erase_if(row.keys, [&](Index j) { return j > problem.position(i); });
      demote_self(params, problem.position(i), row.keys);
      rows.push_back(row);
      ++count[i];
    }
  if (params.membership == Membership::top)
    for (Row& row : rows) row.factor = 1.0 / (count[row.query] + params.count_eps);
  return rows;
}

// The item's part of q_order, which has min(queries_in, C) entries per query.
template <class T>
TensorView pairs_of(const RoutingParams& params, const Problem<T>& problem) {
  const Index m = std::min(params.queries_in, params.clusters);
  const Span& span = problem.place.q;
  return problem.saved[layout_of(params).q_order]
      .narrowed(0, span.batch, 1)
      .narrowed(1, problem.place.head, 1)
      .narrowed(2, span.begin * m, span.length * m);
}

// The clusters of each query, from the saved (query, cluster) pairs.
template <class T>
Lists clusters_of_queries(const RoutingParams& params, const Problem<T>& problem) {
  const Layout at = layout_of(params);
  const std::vector<Index> queries = read_indices(pairs_of(params, problem));
  const std::vector<Index> offsets =
      read_indices(problem.place.item_head(problem.saved[at.q_offsets]));
  Lists clusters(static_cast<std::size_t>(problem.q.rows));
  for (std::size_t c = 0; c + 1 < offsets.size(); ++c)
    for (Index slot = offsets[c]; slot < offsets[c + 1]; ++slot)
      clusters[queries[slot]].push_back(static_cast<Index>(c));
  return clusters;
}

// Directly from the definition: the union over the query's clusters of their `window` latest keys.
template <class T>
std::vector<Row> strict_rows(const RoutingParams& params, const Problem<T>& problem) {
  const Layout at = layout_of(params);
  const std::vector<Index> k_labels = read_indices(problem.place.keys(problem.saved[at.k_labels]));
  const Lists clusters = clusters_of_queries(params, problem);
  std::vector<Row> rows;
  for (Index i = 0; i < problem.q.rows; ++i) {
    const Index self = problem.position(i);
    Row row{.query = i, .keys = {}};
    for (Index c : clusters[i]) {
      Index found = 0;
      for (Index j = self; j >= 0 && found < params.window; --j)
        if (k_labels[j] == c) row.keys.push_back(j), ++found;
    }
    if (params.include_self && std::ranges::count(row.keys, self) == 0) row.keys.push_back(self);
    demote_self(params, self, row.keys);
    rows.push_back(row);
  }
  return rows;
}

template <class T>
std::vector<Row> attended_rows(const RoutingParams& params, const Problem<T>& problem) {
  return params.membership == Membership::nearest ? strict_rows(params, problem)
                                                  : member_rows(params, problem);
}

template <class T>
Matrix<T> routing_logits(const Problem<T>& problem) {
  return scaled(inner_products(normalised_rows(problem.q), normalised_rows(problem.k)),
                problem.scale * problem.logit_scale);
}

template <class T>
void routing_backward(const RoutingParams& params, const Problem<T>& problem,
                      const Matrix<T>& dweights, ProblemGradients<T>& gradients) {
  const Matrix<T> q = normalised_rows(problem.q), k = normalised_rows(problem.k);
  Matrix<T> dlogits(q.rows, k.rows);
  softmax_rows_backward(routing_logits(problem), attended_rows(params, problem), dweights, dlogits);
  const Matrix<T> products = inner_products(q, k);
  for (std::size_t e = 0; e < products.values.size(); ++e)
    gradients.dlogit_scale += dlogits.values[e] * problem.scale * products.values[e];
  dlogits = scaled(dlogits, problem.scale * problem.logit_scale);
  add(gradients.dq, normalised_rows_backward(problem.q, multiply(dlogits, k)));
  add(params.shared() ? gradients.dq : gradients.dk,
      normalised_rows_backward(problem.k, transposed_multiply(dlogits, q)));
}

// scores: (tokens, C).
template <class T>
Lists select_members(const RoutingParams& params, const Matrix<T>& scores) {
  if (params.membership == Membership::top) return top_of_rows(transposed(scores), params.window);
  const Index capacity = (scores.rows + params.clusters - 1) / params.clusters;
  return members_of(balanced_walk(scores, capacity), params.clusters);
}

// Writes the nearest clusters, and pairs (query, cluster) and keys sorted by cluster.
template <class T>
void select_runs(const RoutingParams& params, const Problem<T>& problem, const Matrix<T>& q_scores,
                 const Matrix<T>& k_scores) {
  const Layout at = layout_of(params);
  const std::vector<Index> k_labels = best_of_rows(k_scores);
  write_indices(problem.place.queries(problem.saved[at.q_labels]), best_of_rows(q_scores));
  write_indices(problem.place.keys(problem.saved[at.k_labels]), k_labels);
  const Lists clusters = top_of_rows(q_scores, params.queries_in);
  Lists queries(static_cast<std::size_t>(params.clusters));
  for (std::size_t i = 0; i < clusters.size(); ++i)
    for (Index c : clusters[i]) queries[c].push_back(static_cast<Index>(i));
  const Runs q_runs = runs_of(queries), k_runs = runs_of(members_of(k_labels, params.clusters));
  write_indices(pairs_of(params, problem), q_runs.order);
  write_indices(problem.place.item_head(problem.saved[at.q_offsets]), q_runs.offsets);
  write_indices(problem.place.keys(problem.saved[at.k_order]), k_runs.order);
  write_indices(problem.place.item_head(problem.saved[at.k_offsets]), k_runs.offsets);
}

template <class T>
void select_clusters(const RoutingParams& params, const Problem<T>& problem) {
  const Layout at = layout_of(params);
  const Matrix<T> q_scores = inner_products(normalised_rows(problem.q), problem.centroids);
  const Matrix<T> k_scores = inner_products(normalised_rows(problem.k), problem.centroids);
  if (params.membership == Membership::nearest)
    return select_runs(params, problem, q_scores, k_scores);
  write_lists(problem.place.item_head(problem.saved[at.q_members]),
              select_members(params, q_scores));
  write_lists(problem.place.item_head(problem.saved[at.k_members]),
              select_members(params, k_scores));
}

}  // namespace

template <class T>
Formula<T> formula(const RoutingParams& params) {
  return {.weights =
              [=](const Problem<T>& p) {
                return softmax_rows(routing_logits(p), attended_rows(params, p));
              },
          .backward = [=](const Problem<T>& p, const Matrix<T>& dweights,
                          ProblemGradients<T>& g) { routing_backward(params, p, dweights, g); },
          .select = [=](const Problem<T>& p) { select_clusters(params, p); }};
}

template Formula<float> formula(const RoutingParams&);
template Formula<double> formula(const RoutingParams&);

}  // namespace coterie::ref
