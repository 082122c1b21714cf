// SPDX-License-Identifier: MIT
// Clustering of tokens, per item and head, padding excluded. Labels are int32, -1 in padding; ties
// go to the lower cluster. Tensors are on the CPU; those of ema_update and of the commitment loss
// may be on a GPU, which does not check labels.
#pragma once

#include <cstdint>

#include "coterie/inputs.h"
#include "coterie/mechanism.h"
#include "coterie/view.h"

namespace coterie {

struct SphericalKMeansParams {
  std::int64_t iterations = 10;
  std::int64_t candidates = 32;  // random rows per cluster, among which the first ones are chosen
  std::uint64_t seed = 0;
};

// Centroids (H, C, D) from rows of x (B, H, N, D) after row normalisation (zero mean, unit
// variance): starts from rows of a random sample of the batch, each as far as possible from those
// chosen before it, assigns by inner product, and takes the normalised mean. An empty cluster keeps
// its centroid.
void spherical_kmeans(const SphericalKMeansParams& params, const TensorView& x,
                      const Sequences& sequences, const TensorView& centroids,
                      const Workspace& workspace = {});

// Moving average of routing centroids after a training step; labels (B, H, N) are the nearest
// clusters of the normalised rows of x. State: counts (Hc, C), sums (Hc, C, D), centroids
// (Hc, C, D), all f32 (f64 for f64). counts and sums decay towards the batch's counts and sums, a
// centroid becomes sum / smoothed count; a cluster without members keeps its centroid. Start from
// counts = 1, sums = centroids.
struct CentroidState {
  TensorView centroids, counts, sums;
};
void ema_update(double decay, const TensorView& x, const Sequences& sequences,
                const TensorView& labels, const CentroidState& state,
                const Workspace& workspace = {});

// Mean over valid elements of (normalised x - centroid of its label)^2, the commitment loss of one
// of q and k; `loss` is one element of x's accumulator type. The backward adds
// weight * d loss / d x to dx (B, H, N, D). The loss needs a workspace on a GPU only.
std::int64_t commitment_workspace_bytes(const TensorView& x);
void commitment_loss(const TensorView& x, const Sequences& sequences, const TensorView& centroids,
                     const TensorView& labels, const TensorView& loss,
                     const Workspace& workspace = {});
void commitment_loss_backward(const TensorView& x, const Sequences& sequences,
                              const TensorView& centroids, const TensorView& labels, double weight,
                              const TensorView& dx, const Workspace& workspace = {});

}  // namespace coterie
