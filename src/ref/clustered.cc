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
#include "ref/problem.h"
#include "ref/rows.h"
#include "ref/selection.h"

namespace coterie::ref {

namespace {

// Data that all three forms derive from the labels.
template <class T>
struct Clusters {
  std::vector<Index> labels;
  Lists members;
  Matrix<T> centroids;
  Matrix<T> logits;       // (C, S)
  std::vector<Row> rows;  // of the non-empty clusters, over all keys
};

std::vector<Index> numbers_below(Index count) {
  std::vector<Index> numbers;
  for (Index j = 0; j < count; ++j) numbers.push_back(j);
  return numbers;
}

template <class T>
Clusters<T> clusters_of(std::vector<Index> labels, Index count, const Problem<T>& problem) {
  Clusters<T> result;
  result.members = members_of(labels, count);
  result.centroids = means_of(problem.q, labels, Matrix<T>(count, problem.q.cols));
  result.logits = scaled(inner_products(result.centroids, problem.k), problem.scale);
  for (Index c = 0; c < count; ++c)
    if (!result.members[c].empty())
      result.rows.push_back({.query = c, .keys = numbers_below(problem.k.rows)});
  result.labels = std::move(labels);
  return result;
}

template <class T>
Clusters<T> saved_clusters(Index count, const Problem<T>& problem) {
  return clusters_of(read_indices(problem.place.queries(problem.saved[0])), count, problem);
}

// Propagates gradients of the queries' logits to queries and keys.
template <class T>
void query_logits_backward(const Problem<T>& problem, Matrix<T> dlogits,
                           ProblemGradients<T>& gradients) {
  dlogits = scaled(dlogits, problem.scale);
  add(gradients.dq, multiply(dlogits, problem.k));
  add(gradients.dk, transposed_multiply(dlogits, problem.q));
}

// Propagates gradients of the means' logits to the keys and, through the means, to the queries.
template <class T>
void mean_logits_backward(const Clusters<T>& clusters, const Problem<T>& problem, Matrix<T> dlogits,
                          ProblemGradients<T>& gradients) {
  dlogits = scaled(dlogits, problem.scale);
  add(gradients.dk, transposed_multiply(dlogits, clusters.centroids));
  const Matrix<T> dcentroids = multiply(dlogits, problem.k);
  for (Index i = 0; i < problem.q.rows; ++i) {
    const Index c = clusters.labels[i];
    for (Index d = 0; d < problem.q.cols; ++d)
      gradients.dq(i, d) += dcentroids(c, d) / static_cast<T>(clusters.members[c].size());
  }
}

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

// The logits of near keys mixed with those of the means, and the entries that are the query's own.
template <class T>
struct NearRows {
  Matrix<T> logits;
  Matrix<std::uint8_t> exact;
  std::vector<Row> rows;
};

template <class T>
NearRows<T> near_rows(Index near, const Lists& top_keys, const Clusters<T>& clusters,
                      const Problem<T>& problem) {
  NearRows<T> mixed{.logits = scaled(inner_products(problem.q, problem.k), problem.scale),
                    .exact = Matrix<std::uint8_t>(problem.q.rows, problem.k.rows),
                    .rows = {}};
  for (Index i = 0; i < problem.q.rows; ++i) {
    const Index c = clusters.labels[i];
    for (Index j = 0; j < problem.k.rows; ++j)
      mixed.exact(i, j) = std::abs(i / near - j / near) <= 1 ? 1 : 0;
    if (!top_keys.empty())
      for (Index j : top_keys[c]) mixed.exact(i, j) = 1;
    for (Index j = 0; j < problem.k.rows; ++j)
      if (mixed.exact(i, j) == 0) mixed.logits(i, j) = clusters.logits(c, j);
    mixed.rows.push_back({.query = i, .keys = numbers_below(problem.k.rows)});
  }
  return mixed;
}

template <class T>
Matrix<T> near_weights(Index near, Index count, const Lists& top_keys, const Problem<T>& problem) {
  const NearRows<T> mixed = near_rows(near, top_keys, saved_clusters(count, problem), problem);
  return softmax_rows(mixed.logits, mixed.rows);
}

template <class T>
void near_backward(Index near, Index count, const Lists& top_keys, const Problem<T>& problem,
                   const Matrix<T>& dweights, ProblemGradients<T>& gradients) {
  const Clusters<T> clusters = saved_clusters(count, problem);
  const NearRows<T> mixed = near_rows(near, top_keys, clusters, problem);
  Matrix<T> dlogits(mixed.logits.rows, mixed.logits.cols);
  softmax_rows_backward(mixed.logits, mixed.rows, dweights, dlogits);
  Matrix<T> dshared(clusters.logits.rows, clusters.logits.cols);
  for (Index i = 0; i < dlogits.rows; ++i)
    for (Index j = 0; j < dlogits.cols; ++j) {
      if (mixed.exact(i, j) != 0) continue;
      dshared(clusters.labels[i], j) += dlogits(i, j);
      dlogits(i, j) = 0;
    }
  query_logits_backward(problem, dlogits, gradients);
  mean_logits_backward(clusters, problem, dshared, gradients);
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
  const Index near = params.near, count = params.clustering.clusters;
  if (near > 0)
    return {
        .weights = [=](const Problem<T>& p) { return near_weights(near, count, {}, p); },
        .backward = [=](const Problem<T>& p, const Matrix<T>& dweights,
                        ProblemGradients<T>& g) { near_backward(near, count, {}, p, dweights, g); },
        .select = [=](const Problem<T>& p) { select_clusters(params.clustering, p); }};
  return {.weights = [=](const Problem<T>& p) { return clustered_weights(params, p); },
          .backward = [=](const Problem<T>& p, const Matrix<T>& dweights,
                          ProblemGradients<T>& g) { clustered_backward(params, p, dweights, g); },
          .select = [=](const Problem<T>& p) { select_clusters(params.clustering, p); }};
}

template <class T>
Formula<T> formula(const ImprovedClusteredParams& params) {
  const Index near = params.near, count = params.clustering.clusters;
  const auto top_keys = [](const Problem<T>& p) {
    return read_lists(p.place.item_head(p.saved[3]));
  };
  if (near > 0)
    return {
        .weights = [=](const Problem<T>& p) { return near_weights(near, count, top_keys(p), p); },
        .backward =
            [=](const Problem<T>& p, const Matrix<T>& dweights, ProblemGradients<T>& g) {
              near_backward(near, count, top_keys(p), p, dweights, g);
            },
        .select = [=](const Problem<T>& p) { select_improved(params, p); }};
  return {.weights = [=](const Problem<T>& p) { return improved_weights(params, p); },
          .backward = [=](const Problem<T>& p, const Matrix<T>& dweights,
                          ProblemGradients<T>& g) { improved_backward(params, p, dweights, g); },
          .select = [=](const Problem<T>& p) { select_improved(params, p); }};
}

template Formula<float> formula(const ClusteredParams&);
template Formula<double> formula(const ClusteredParams&);
template Formula<float> formula(const ImprovedClusteredParams&);
template Formula<double> formula(const ImprovedClusteredParams&);

}  // namespace coterie::ref
