// SPDX-License-Identifier: MIT
// The centroids of routing heads on torch tensors: nearest clusters, commitment loss, moving
// average. Rows of x (B, H, N, D) are normalised here (zero mean, unit variance); `lengths` (B)
// excludes padding and may be undefined.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace coterie::torch_api {

// The centroid buffers of Hc heads, in f32 (f64 for f64 models).
struct CentroidState {
  at::Tensor centroids;  // (Hc, C, D)
  at::Tensor counts;     // (Hc, C)
  at::Tensor sums;       // (Hc, C, D)
};

// The rows of x (..., D) with zero mean and unit variance, in the type the core accumulates in;
// detached.
at::Tensor normalised_rows(const at::Tensor& x);

// Normalised Gaussian centroids, counts of 1 and sums equal to the centroids.
CentroidState make_centroids(std::int64_t heads, std::int64_t clusters, std::int64_t dim,
                             std::uint64_t seed);

// Replaces the centroids by spherical k-means of the rows of x, and resets counts and sums. The
// heads have numbers first_head, first_head + 1, ... in random streams.
void initialise_centroids(const CentroidState& state, const at::Tensor& x,
                          const at::Tensor& lengths, std::uint64_t seed,
                          std::int64_t first_head = 0);

// int32 (B, H, N): the nearest centroid of each normalised row, -1 in padding.
at::Tensor nearest_centroids(const at::Tensor& x, const at::Tensor& centroids,
                             const at::Tensor& lengths);

// Mean over valid elements of (normalised x - its centroid)^2, differentiable in x.
at::Tensor commitment_loss(const at::Tensor& x, const at::Tensor& centroids,
                           const at::Tensor& labels, const at::Tensor& lengths);

// Input of one moving-average step of Hc heads, in f64. Statistics of several passes with the same
// centroids add up to those of one pass over all their rows.
struct CentroidStatistics {
  at::Tensor members;  // (Hc, C): rows of each cluster
  at::Tensor sums;     // (Hc, C, D): of the normalised rows
};
// Adds the statistics of the rows of x; undefined tensors become zeros in the state's shapes first.
void add_statistics(const at::Tensor& x, const at::Tensor& labels, const at::Tensor& lengths,
                    const CentroidState& state, CentroidStatistics& statistics);

// One step of the moving average, in place, from the statistics of all rows of the step.
void move_centroids(double decay, const CentroidStatistics& statistics, const CentroidState& state);

}  // namespace coterie::torch_api
