// SPDX-License-Identifier: MIT
// k-means of rows in Euclidean distance, many problems at once, on the CPU or a GPU. Deterministic:
// equal inputs and seeds give equal bits. On a GPU nothing waits for the device or allocates, so a
// call can be captured in a graph.
#pragma once

#include <cstdint>

#include "coterie/view.h"

namespace coterie {

// Where centroids start: from those given, from distinct random rows, or from rows drawn with
// probabilities proportional to the squared distance to the nearest one drawn before (k-means++,
// Arthur and Vassilvitskii 2007).
enum class KMeansStart : std::uint8_t { given, random, plus_plus };

struct KMeansParams {
  std::int64_t iterations = 10;
  KMeansStart start = KMeansStart::random;
  // Whether an empty cluster takes the row that is farthest from its centroid, as long as some
  // cluster has two rows; otherwise it keeps its centroid.
  bool fill_empty = false;
  std::uint64_t seed = 0;
};

struct KMeansResult {
  TensorView centroids;  // (P, C, D) of x's accumulator type; read first if they are given
  TensorView labels;     // i32 (P, N): of the nearest centroid, ties by lower index
  TensorView counts;     // i32 (P, C): rows of each label
};

// `iterations` times: every row of x (P, N, D) gets the label of its nearest centroid, and
// centroids become the means of their rows. Labels are then those of the resulting centroids; with
// 0 iterations centroids are the start. Rows that are not finite have label -1 and no part in
// anything. With less rows than clusters, random starts repeat rows; without any they are 0. Given
// centroids must be finite. x has a contiguous last dimension, everything else is dense. On a GPU
// distances are exact up to some 2^-16 of a row's largest products, and x has at most 128 elements
// a row and 32767 clusters.
std::int64_t kmeans_workspace_bytes(const KMeansParams& params, const TensorView& x,
                                    std::int64_t clusters);  // 0 on the CPU
void kmeans(const KMeansParams& params, const TensorView& x, const KMeansResult& result,
            const Workspace& workspace = {});

}  // namespace coterie
