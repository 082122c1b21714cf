// SPDX-License-Identifier: MIT
// Initialises and updates the centroids of routing: spherical k-means and a moving average. Both
// work on normalised rows.
#pragma once

#include <cstdint>
#include <vector>

#include "core/items.h"
#include "coterie/cluster.h"
#include "cpu/cluster/normalise.h"
#include "cpu/engine/segment.h"

namespace coterie::cpu {

template <class T>
struct CentroidWorkspace {
  std::vector<Tiles<T>> tiles;
  NormalisedRows<T> rows;
  double* sums;           // (centroid heads, C, D), of a batch
  std::int64_t* members;  // (centroid heads, C)
  std::int32_t* labels;   // (B, H, N), k-means only

  // x (B, H, N, D); centroids (centroid heads, C, D).
  CentroidWorkspace(Arena& arena, const TensorView& x, const TensorView& centroids);
};

// centroids (H, C, D); every head has at least one row.
template <class T>
void spherical_kmeans(const SphericalKMeansParams& params, const TensorView& x,
                      const std::vector<Span>& spans, const TensorView& centroids,
                      CentroidWorkspace<T>& workspace);

template <class T>
void ema_update(double decay, const TensorView& x, const std::vector<Span>& spans,
                const TensorView& labels, const CentroidState& state,
                CentroidWorkspace<T>& workspace);

}  // namespace coterie::cpu
