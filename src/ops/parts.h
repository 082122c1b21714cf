// SPDX-License-Identifier: MIT
// Parts of mechanisms as separate operations on the CPU, for tests and timing. Whole mechanisms are
// in coterie/attention.h.
//
// Clustering is per item and head, padding excluded. Labels are int32, -1 in padding; ties go to
// the lower cluster.
#pragma once

#include <cstdint>

#include "core/clustering.h"
#include "coterie/inputs.h"
#include "coterie/mechanism.h"
#include "coterie/view.h"

namespace coterie {

// Locality-sensitive codes: bit r of a row x is [plane_r . x > threshold_r].
//
// Published form: planes (1, 1, bits, D) f32 with normal entries rounded to bf16, thresholds
// (1, 1, bits) f32 normal, or 0 without `bias`. The same for all items and heads.
void isotropic_planes(std::uint64_t seed, bool bias, const TensorView& planes,
                      const TensorView& thresholds, const Workspace& workspace = {});

// Key-aware form: plane r of an item and key/value head is the sum of 16 differences of random
// pairs of its valid keys, planes (items, Hkv, bits, D) f32; threshold r of a query head is plane_r
// . mean valid query, thresholds (items, H, bits) f32. An item without keys or queries gets zeros.
void key_difference_planes(const AttentionInputs& inputs, const TensorView& planes,
                           const TensorView& thresholds, const Workspace& workspace = {});

// codes (B, H, N) u64 of x (B, H, N, D); 0 for padded rows. planes and thresholds as above, with
// size 1 meaning "the same for all". A NaN row gets code 0.
void hash_codes(const TensorView& x, const Sequences& sequences, const TensorView& planes,
                const TensorView& thresholds, const TensorView& codes,
                const Workspace& workspace = {});

// k-means of codes (B, H, N) u64 in Hamming distance. Starts from distinct random tokens; a
// centroid bit is the majority of its members, 0 on a tie; an empty cluster gets a random code.
// With at most C tokens every token is its own cluster. Writes labels (B, H, N) and centroids
// (items, H, C) u64.
void hamming_kmeans(const HammingKMeansParams& params, const TensorView& codes,
                    const Sequences& sequences, const TensorView& labels,
                    const TensorView& centroids, const Workspace& workspace = {});

// labels[i] = argmax_c x_i . centroid_c + bias_c for x (B, H, N, D). centroids (items|1, Hc, C, D),
// bias (items|1, Hc, C) or absent, of x's accumulator type; head h uses row h / (H / Hc). A row of
// NaN scores goes to cluster 0. Sums run over D in ascending order for all shapes, so the label of
// a row depends only on the row, the centroids and the bias.
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

// A stable counting sort. labels (B, H, N) int32 in [0, C), anything in padding. Throws on a label
// out of range.
void group_by_cluster(const TensorView& labels, const Sequences& sequences, const Groups& groups,
                      const Workspace& workspace = {});

// Exact selection of the best tokens by inner product, without storing the scores.
//
// For every row r of `rows` the indices of its `count` best valid tokens of x by rows_r . x_j: top
// keys of a centroid, top tokens of a cluster. Better score first, then lower index; NaN ranks as
// -inf. rows (items|1, H, R, D) of x's accumulator type, x (B, Hx, N, D) with H a multiple of Hx
// or the reverse. indices (items, max(H, Hx), R, count) int32, ascending, -1 where tokens ran out.
void select_top(const TensorView& rows, const TensorView& x, const Sequences& sequences,
                const TensorView& indices, const Workspace& workspace = {});

}  // namespace coterie
