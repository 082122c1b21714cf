// SPDX-License-Identifier: MIT
// The centroids of routing outside attention calls: nearest clusters, k-means, the moving average
// and the commitment loss, on the CPU or a GPU (k-means on the CPU only). All of them work on rows
// of x (B, H, N, D) that are normalised to zero mean and unit variance; padding is excluded. Labels
// are int32 (B, H, N), -1 in padding; a GPU does not check their values. Centroids belong to Hc key
// heads, and head h of x uses those of head h / (H / Hc).
#pragma once

#include <cstdint>

#include "coterie/inputs.h"
#include "coterie/params.h"
#include "coterie/view.h"

namespace coterie {

// out = (x - mean) / sqrt(variance + 1e-6) row by row, dense and of x's accumulator type.
void normalise_rows(const TensorView& x, const TensorView& out, const Workspace& workspace = {});

// The nearest of the centroids (Hc, C, D), by inner product with the normalised row: exactly the
// cluster that strict routing selects for the row.
std::int64_t routing_labels_workspace_bytes(const TensorView& x, const Sequences& sequences,
                                            const TensorView& centroids);
void routing_labels(const TensorView& x, const Sequences& sequences, const TensorView& centroids,
                    const TensorView& labels, const Workspace& workspace);

struct SphericalKMeansParams {
  std::int64_t iterations = 10;
  std::int64_t candidates = 32;  // random rows per cluster, from which the initial centroids come
  std::uint64_t seed = 0;
  std::int64_t first_head = 0;  // number of the first head in random streams
};

// Centroids (H, C, D) from the rows of x: starts from rows of a random sample of the batch, each as
// far as possible from those already chosen. Each iteration assigns rows by inner product and takes
// normalised means. An empty cluster keeps its centroid.
void spherical_kmeans(const SphericalKMeansParams& params, const TensorView& x,
                      const Sequences& sequences, const TensorView& centroids,
                      const Workspace& workspace = {});

// What the rows of a training step contribute to the moving average, f64.
struct CentroidStatistics {
  TensorView members;  // (Hc, C): rows of each cluster
  TensorView sums;     // (Hc, C, D): of their normalised rows
};
// Adds the rows of x, whose nearest clusters are `labels`. Only a GPU needs a workspace.
std::int64_t centroid_statistics_workspace_bytes(const TensorView& x,
                                                 const CentroidStatistics& statistics);
void add_centroid_statistics(const TensorView& x, const Sequences& sequences,
                             const TensorView& labels, const CentroidStatistics& statistics,
                             const Workspace& workspace = {});

// State: counts (Hc, C), sums (Hc, C, D), centroids (Hc, C, D), all f32 or all f64. One step moves
// counts and sums towards the statistics, old * decay + new * (1 - decay); a centroid becomes
// sum / smoothed count, with count + 1e-5 scaled so that the counts of a head keep their total. A
// cluster without members keeps its centroid. Start from counts = 1, sums = centroids.
struct CentroidState {
  TensorView centroids, counts, sums;
};
void move_centroids(double decay, const CentroidStatistics& statistics, const CentroidState& state,
                    const Workspace& workspace = {});

// Mean over valid elements of (normalised x - centroid of its label)^2, the commitment loss of q or
// k; `loss` is one element of x's accumulator type. The backward adds weight * scale * d loss / d x
// to dx (B, H, N, D); `scale` is one element like the loss, 1 if absent. Only the loss on a GPU
// needs a workspace.
std::int64_t commitment_workspace_bytes(const TensorView& x);
void commitment_loss(const TensorView& x, const Sequences& sequences, const TensorView& centroids,
                     const TensorView& labels, const TensorView& loss,
                     const Workspace& workspace = {});
void commitment_loss_backward(const TensorView& x, const Sequences& sequences,
                              const TensorView& centroids, const TensorView& labels, double weight,
                              const TensorView& dx, const Workspace& workspace = {},
                              const TensorView& scale = {});

// Strict routing of sequences in pieces, such as one token at a time. Ring c has the `window`
// latest keys of cluster c, number i of them in slot i mod window: normalised keys k (B, key heads,
// C * window, Dk) and values v (B, key heads, C * window, Dv) of the accumulator type, and the
// number of keys so far, counts (B, key heads, C) i64. Key heads are the H query heads with
// share_qk, else those of k. All begin at 0.
struct RoutingRings {
  TensorView k, v, counts;
};

// Attention (B, H, N, Dv) of the N tokens of `inputs` (S = N, causal, no lengths) that follow those
// in the rings, which they join. Their clusters are bit by bit those of the parallel pass over the
// whole sequences, the output is the same up to rounding.
std::int64_t routing_step_workspace_bytes(const RoutingParams& params,
                                          const AttentionInputs& inputs);
void routing_step(const RoutingParams& params, const AttentionInputs& inputs,
                  const RoutingRings& rings, const TensorView& out, const Workspace& workspace);

}  // namespace coterie
