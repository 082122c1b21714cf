// SPDX-License-Identifier: MIT
// Initialises and updates the centroids of routing: spherical k-means and a moving average. Both
// work on normalised rows.
#pragma once

#include <cstdint>
#include <vector>

#include "core/items.h"
#include "coterie/routing.h"
#include "cpu/cluster/normalise.h"
#include "cpu/engine/segment.h"

namespace coterie::cpu {

template <class T>
struct CentroidWorkspace {
  std::vector<Tiles<T>> tiles;
  NormalisedRows<T> rows;

  CentroidWorkspace(Arena& arena, const TensorView& x);
};

template <class T>
struct KMeansWorkspace : CentroidWorkspace<T> {
  double *sums, *members;  // (H, C, D), (H, C)
  std::int32_t* labels;    // (B, H, N)

  KMeansWorkspace(Arena& arena, const TensorView& x, const TensorView& centroids);
};

// centroids (H, C, D); every head has at least one row.
template <class T>
void spherical_kmeans(const SphericalKMeansParams& params, const TensorView& x,
                      const std::vector<Span>& spans, const TensorView& centroids,
                      KMeansWorkspace<T>& workspace);

template <class T>
void add_centroid_statistics(const TensorView& x, const std::vector<Span>& spans,
                             const TensorView& labels, const CentroidStatistics& statistics,
                             CentroidWorkspace<T>& workspace);

template <class T>
void move_centroids(double decay, const CentroidStatistics& statistics, const CentroidState& state);

}  // namespace coterie::cpu
