// SPDX-License-Identifier: MIT
// The selections of the mechanisms, for one item and head. All use a total order: better score
// first, then lower index; NaN ranks as -inf.
#pragma once

#include <cstdint>
#include <vector>

#include "coterie/mechanism.h"
#include "ref/problem.h"
#include "ref/views.h"

namespace coterie::ref {

// The `count` best of `candidates` by scores(row, candidate), ascending.
template <class T>
std::vector<Index> top_of_row(const Matrix<T>& scores, Index row, std::vector<Index> candidates,
                              Index count);

// The `count` best columns of every row, ascending.
template <class T>
Lists top_of_rows(const Matrix<T>& scores, Index count);

// The column with the largest score of each row.
template <class T>
std::vector<Index> best_of_rows(const Matrix<T>& scores);

// Assigns tokens (rows) to clusters (columns), at most `capacity` each: pairs are visited by
// descending score, ties by lower token, then lower cluster; a pair is accepted if its token and a
// slot are free. -1: no slot left.
template <class T>
std::vector<Index> balanced_walk(const Matrix<T>& scores, Index capacity);

// Members of each cluster, ascending; tokens labelled -1 are in none.
Lists members_of(const std::vector<Index>& labels, Index clusters);

// The concatenation of lists, and the start of each.
struct Runs {
  std::vector<Index> order, offsets;
};
Runs runs_of(const Lists& lists);

template <class T>
Matrix<T> transposed(const Matrix<T>& matrix) {
  Matrix<T> result(matrix.cols, matrix.rows);
  for (Index i = 0; i < matrix.rows; ++i)
    for (Index j = 0; j < matrix.cols; ++j) result(j, i) = matrix(i, j);
  return result;
}

// Means of the rows of x by label; empty clusters get their row of `otherwise`.
template <class T>
Matrix<T> means_of(const Matrix<T>& x, const std::vector<Index>& labels, Matrix<T> otherwise);

// Codes of the rows of x: bit r is [plane_r . x > threshold_r].
template <class T>
struct Planes {
  Matrix<T> planes;  // (bits, D)
  std::vector<T> thresholds;
};
template <class T>
Planes<T> isotropic_planes(std::uint64_t seed, Index bits, Index dim, bool bias);
template <class T>
Matrix<T> key_difference_planes(std::uint64_t seed, std::uint32_t problem, const Matrix<T>& keys,
                                Index bits);
template <class T>
std::vector<T> thresholds_at_mean(const Matrix<T>& planes, const Matrix<T>& queries);
template <class T>
std::vector<std::uint64_t> codes_of(const Matrix<T>& x, const Planes<T>& planes);

// Result of Lloyd iterations in Hamming distance; the labels belong to the returned centroids.
struct HammingClusters {
  std::vector<Index> labels;
  std::vector<std::uint64_t> centroids;
};
struct HammingProblem {
  Index clusters = 0, iterations = 0, bits = 0;
  std::uint64_t seed = 0;
  std::uint32_t problem = 0;
};
HammingClusters hamming_clusters(const HammingProblem& params,
                                 const std::vector<std::uint64_t>& codes);

// Labels of the queries by any of the three clusterings.
template <class T>
std::vector<Index> cluster_labels(const ClusteringParams& params, const Problem<T>& problem);

}  // namespace coterie::ref
