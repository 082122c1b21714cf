// SPDX-License-Identifier: MIT
// Clustering of tokens, per item and head, padding excluded. Labels are int32, -1 in padding; ties
// go to the lower cluster. Tensors are on the CPU.
#pragma once

#include <cstdint>

#include "coterie/inputs.h"
#include "coterie/mechanism.h"
#include "coterie/view.h"

namespace coterie {

struct HammingKMeansParams {
  std::int64_t iterations = 10;    // centroid updates; one more assignment follows
  std::int64_t bits = kAutomatic;  // code length, for re-seeding empty clusters; 63 by default
  std::uint64_t seed = 0;
};

// k-means of codes (B, H, N) u64 in Hamming distance. Starts from distinct random tokens; a
// centroid bit is the majority of its members, 0 on a tie; an empty cluster gets a random code.
// With at most C tokens every token is its own cluster. Writes labels (B, H, N) and centroids
// (items, H, C) u64.
void hamming_kmeans(const HammingKMeansParams& params, const TensorView& codes,
                    const Sequences& sequences, const TensorView& labels,
                    const TensorView& centroids, const Workspace& workspace = {});

// labels[i] = argmax_c x_i . centroid_c + bias_c for x (B, H, N, D). centroids (items|1, Hc, C, D),
// bias (items|1, Hc, C) or absent, of x's accumulator type; head h uses row h / (H / Hc). A row of
// NaN scores goes to cluster 0. Sums run over D in ascending order, whatever the shapes: the label
// of a row depends on nothing but the row and the centroids.
void nearest_centroid(const TensorView& x, const Sequences& sequences, const TensorView& centroids,
                      const TensorView& bias, const TensorView& labels,
                      const Workspace& workspace = {});

// Labels (B, H, N) of the queries by any of the three clusterings.
std::int64_t cluster_queries_workspace_bytes(const ClusteringParams& params,
                                             const AttentionInputs& inputs);
void cluster_queries(const ClusteringParams& params, const AttentionInputs& inputs,
                     const TensorView& labels, const Workspace& workspace);

// Every valid token goes to one cluster and no cluster takes more than `capacity` tokens: pairs
// (token, cluster) are accepted by descending score x . centroid, ties by lower token, then lower
// cluster. centroids as in nearest_centroid; capacity 0 = ceil(tokens / C) per item.
void balanced_assign(const TensorView& x, const Sequences& sequences, const TensorView& centroids,
                     std::int64_t capacity, const TensorView& labels,
                     const Workspace& workspace = {});

}  // namespace coterie
