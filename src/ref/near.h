// SPDX-License-Identifier: MIT
// Clustered attention with near keys: one softmax over all keys, of the query's own logits for the
// keys of its block of positions and the two beside it and for the cluster's top keys, of the
// mean's logits for the others.
#pragma once

#include <functional>

#include "ref/clusters.h"

namespace coterie::ref {

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

// `top`: the clusters have top keys, in saved[3].
template <class T>
Formula<T> near_formula(Index near, Index count, bool top,
                        const std::function<void(const Problem<T>&)>& select) {
  const auto top_keys = [top](const Problem<T>& p) {
    return top ? read_lists(p.place.item_head(p.saved[3])) : Lists{};
  };
  return {.weights = [=](const Problem<T>& p) { return near_weights(near, count, top_keys(p), p); },
          .backward =
              [=](const Problem<T>& p, const Matrix<T>& dweights, ProblemGradients<T>& g) {
                near_backward(near, count, top_keys(p), p, dweights, g);
              },
          .select = select,
          .shares =
              [=](const Problem<T>& p) {
                const Clusters<T> clusters = saved_clusters(count, p);
                const NearRows<T> mixed = near_rows(near, top_keys(p), clusters, p);
                Matrix<Index> shared(p.q.rows, p.k.rows);
                for (Index i = 0; i < shared.rows; ++i)
                  for (Index j = 0; j < shared.cols; ++j)
                    shared(i, j) = mixed.exact(i, j) != 0 ? -1 : clusters.labels[i];
                return shared;
              }};
}

}  // namespace coterie::ref
