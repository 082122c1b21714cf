// SPDX-License-Identifier: MIT
// Clustered attention: the queries of a cluster share the row A_c of their mean mu_c.
//   clustered    W_i = A_c
//   i-clustered  W_ij = mass_c p_ij on the cluster's top keys, A_cj elsewhere, with p_i the exact
//                softmax over the top keys and mass_c = sum of A_cj over them
//   leaking      W_i = p_i over the top keys that are not after the query
//   near         W_i = one softmax over all keys: of the query's own logits for the near keys (of
//                its block of positions and the two beside it) and the cluster's top keys, of the
//                mean's logits for the others
// Vyas, Katharopoulos, Fleuret, "Fast Transformers with Clustered Attention", 2020.
#include "ref/clusters.h"
#include "ref/near.h"
#include "ref/selection.h"

namespace coterie::ref {

namespace {

// Propagates the gradient of A_c.
template <class T>
void centroid_backward(const Clusters<T>& clusters, const Problem<T>& problem,
                       const Matrix<T>& drows, ProblemGradients<T>& gradients) {
  Matrix<T> dlogits(clusters.logits.rows, clusters.logits.cols);
  softmax_rows_backward(clusters.logits, clusters.rows, drows, dlogits);
  mean_logits_backward(clusters, problem, dlogits, gradients);
}

template <class T>
Matrix<T> clustered_weights(const ClusteredParams& params, const Problem<T>& problem) {
  const Clusters<T> clusters = saved_clusters(params.clustering.clusters, problem);
  const Matrix<T> shared = softmax_rows(clusters.logits, clusters.rows);
  Matrix<T> weights(problem.q.rows, problem.k.rows);
  for (Index i = 0; i < weights.rows; ++i)
    for (Index j = 0; j < weights.cols; ++j) weights(i, j) = shared(clusters.labels[i], j);
  return weights;
}

template <class T>
void clustered_backward(const ClusteredParams& params, const Problem<T>& problem,
                        const Matrix<T>& dweights, ProblemGradients<T>& gradients) {
  const Clusters<T> clusters = saved_clusters(params.clustering.clusters, problem);
  Matrix<T> drows(clusters.logits.rows, clusters.logits.cols);
  for (Index i = 0; i < dweights.rows; ++i)
    for (Index j = 0; j < dweights.cols; ++j) drows(clusters.labels[i], j) += dweights(i, j);
  centroid_backward(clusters, problem, drows, gradients);
}

// The exact part of i-clustered: every query over its cluster's top keys.
template <class T>
struct Top {
  Lists keys;             // of each cluster
  Matrix<T> logits;       // (N, S)
  std::vector<Row> rows;  // of the queries
};

template <class T>
Top<T> saved_top(const Problem<T>& problem) {
  const std::vector<Index> labels = read_indices(problem.place.queries(problem.saved[0]));
  Top<T> top{.keys = read_lists(problem.place.item_head(problem.saved[3])),
             .logits = scaled(inner_products(problem.q, problem.k), problem.scale),
             .rows = {}};
  for (Index i = 0; i < problem.q.rows; ++i) {
    Row row{.query = i, .keys = {}};
    for (Index j : top.keys[labels[i]])
      if (!problem.causal || j <= problem.position(i)) row.keys.push_back(j);
    top.rows.push_back(row);
  }
  return top;
}

template <class T>
void top_backward(const Top<T>& top, const Problem<T>& problem, const Matrix<T>& dexact,
                  ProblemGradients<T>& gradients) {
  Matrix<T> dlogits(top.logits.rows, top.logits.cols);
  softmax_rows_backward(top.logits, top.rows, dexact, dlogits);
  query_logits_backward(problem, dlogits, gradients);
}

// Summed over the top keys instead of 1 minus the rest: accurate when the mass is small.
template <class T>
std::vector<T> masses(const Matrix<T>& shared, const Lists& top_keys) {
  std::vector<T> mass(top_keys.size(), 0);
  for (std::size_t c = 0; c < mass.size(); ++c)
    for (Index j : top_keys[c]) mass[c] += shared(static_cast<Index>(c), j);
  return mass;
}

template <class T>
Matrix<T> improved_weights(const ImprovedClusteredParams& params, const Problem<T>& problem) {
  const Top<T> top = saved_top(problem);
  const Matrix<T> exact = softmax_rows(top.logits, top.rows);
  if (problem.causal) return exact;
  const Clusters<T> clusters = saved_clusters(params.clustering.clusters, problem);
  const Matrix<T> shared = softmax_rows(clusters.logits, clusters.rows);
  const std::vector<T> mass = masses(shared, top.keys);
  Matrix<T> weights(problem.q.rows, problem.k.rows);
  for (Index i = 0; i < weights.rows; ++i) {
    const Index c = clusters.labels[i];
    for (Index j = 0; j < weights.cols; ++j) weights(i, j) = shared(c, j);
    for (Index j : top.keys[c]) weights(i, j) = mass[c] * exact(i, j);
  }
  return weights;
}

template <class T>
void improved_backward(const ImprovedClusteredParams& params, const Problem<T>& problem,
                       const Matrix<T>& dweights, ProblemGradients<T>& gradients) {
  const Top<T> top = saved_top(problem);
  if (problem.causal) return top_backward(top, problem, dweights, gradients);
  const Clusters<T> clusters = saved_clusters(params.clustering.clusters, problem);
  const Matrix<T> exact = softmax_rows(top.logits, top.rows);
  const std::vector<T> mass = masses(softmax_rows(clusters.logits, clusters.rows), top.keys);
  Matrix<T> dexact(exact.rows, exact.cols);
  Matrix<T> drows(clusters.logits.rows, clusters.logits.cols);
  for (std::size_t c = 0; c < mass.size(); ++c) {
    const Index cluster = static_cast<Index>(c);
    T dmass = 0;
    for (Index i : clusters.members[c]) {
      for (Index j = 0; j < exact.cols; ++j) drows(cluster, j) += dweights(i, j);
      for (Index j : top.keys[c]) {
        dexact(i, j) = mass[c] * dweights(i, j);
        dmass += exact(i, j) * dweights(i, j);
      }
    }
    for (Index j : top.keys[c]) drows(cluster, j) = params.mass_grad ? dmass : T{0};
  }
  top_backward(top, problem, dexact, gradients);
  centroid_backward(clusters, problem, drows, gradients);
}

// The cluster of every weight, of which the top keys' are the queries' own; see Formula::shares.
template <class T>
Matrix<Index> shared_weights(const Problem<T>& problem) {
  const std::vector<Index> labels = read_indices(problem.place.queries(problem.saved[0]));
  Matrix<Index> clusters(problem.q.rows, problem.k.rows);
  for (Index i = 0; i < clusters.rows; ++i)
    for (Index j = 0; j < clusters.cols; ++j) clusters(i, j) = labels[i];
  return clusters;
}

template <class T>
Matrix<Index> weights_outside_top(const Problem<T>& problem) {
  const std::vector<Index> labels = read_indices(problem.place.queries(problem.saved[0]));
  const Lists top_keys = read_lists(problem.place.item_head(problem.saved[3]));
  Matrix<Index> clusters = shared_weights(problem);
  for (Index i = 0; i < clusters.rows; ++i)
    for (Index j : top_keys[labels[i]]) clusters(i, j) = -1;
  return clusters;
}

// Writes labels, order and offsets; returns the clusters.
template <class T>
Clusters<T> select_clusters(const ClusteringParams& params, const Problem<T>& problem) {
  const Clusters<T> clusters =
      clusters_of(cluster_labels(params, problem), params.clusters, problem);
  const Runs runs = runs_of(clusters.members);
  write_indices(problem.place.queries(problem.saved[0]), clusters.labels);
  write_indices(problem.place.queries(problem.saved[1]), runs.order);
  write_indices(problem.place.item_head(problem.saved[2]), runs.offsets);
  return clusters;
}

template <class T>
void select_improved(const ImprovedClusteredParams& params, const Problem<T>& problem) {
  const Clusters<T> clusters = select_clusters(params.clustering, problem);
  Lists top_keys = top_of_rows(clusters.logits, params.topk);
  for (std::size_t c = 0; c < top_keys.size(); ++c)
    if (clusters.members[c].empty()) top_keys[c].clear();
  write_lists(problem.place.item_head(problem.saved[3]), top_keys);
}

}  // namespace

template <class T>
Formula<T> formula(const ClusteredParams& params) {
  const auto select = [=](const Problem<T>& p) { select_clusters(params.clustering, p); };
  if (params.near > 0)
    return near_formula<T>(params.near, params.clustering.clusters, false, select);
  return {.weights = [=](const Problem<T>& p) { return clustered_weights(params, p); },
          .backward = [=](const Problem<T>& p, const Matrix<T>& dweights,
                          ProblemGradients<T>& g) { clustered_backward(params, p, dweights, g); },
          .select = select,
          .shares = shared_weights<T>};
}

template <class T>
Formula<T> formula(const ImprovedClusteredParams& params) {
  const auto select = [=](const Problem<T>& p) { select_improved(params, p); };
  if (params.near > 0)
    return near_formula<T>(params.near, params.clustering.clusters, true, select);
  return {.weights = [=](const Problem<T>& p) { return improved_weights(params, p); },
          .backward = [=](const Problem<T>& p, const Matrix<T>& dweights,
                          ProblemGradients<T>& g) { improved_backward(params, p, dweights, g); },
          .select = select,
          .shares = weights_outside_top<T>};
}

template Formula<float> formula(const ClusteredParams&);
template Formula<double> formula(const ClusteredParams&);
template Formula<float> formula(const ImprovedClusteredParams&);
template Formula<double> formula(const ImprovedClusteredParams&);

}  // namespace coterie::ref
