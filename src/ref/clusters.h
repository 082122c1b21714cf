// SPDX-License-Identifier: MIT
// Clusters of queries, their means, and the backward passes of logits: shared by the forms of
// clustered attention.
#pragma once

#include <utility>
#include <vector>

#include "ref/problem.h"
#include "ref/rows.h"
#include "ref/selection.h"

namespace coterie::ref {

// Data that all forms derive from the labels.
template <class T>
struct Clusters {
  std::vector<Index> labels;
  Lists members;
  Matrix<T> centroids;
  Matrix<T> logits;       // (C, S)
  std::vector<Row> rows;  // of the non-empty clusters, over all keys
};

inline std::vector<Index> numbers_below(Index count) {
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

}  // namespace coterie::ref
