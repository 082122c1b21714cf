// SPDX-License-Identifier: MIT
// Assigns tokens to centroids by inner product: to the nearest, or to the best with a free slot.
#pragma once

#include <cstdint>
#include <vector>

#include "core/items.h"
#include "cpu/cluster/balanced.h"
#include "cpu/engine/segment.h"

namespace coterie::cpu {

// Centroids (items|1, Hc, C, D) and bias (items|1, Hc, C) or absent, both contiguous and of type T;
// consecutive heads of the tokens share a row of them.
struct CentroidView {
  TensorView centroids, bias;

  std::int64_t clusters() const { return centroids.size(2); }
};

template <class T>
Rows centroid_rows(const CentroidView& view, std::int64_t item, std::int64_t head,
                   std::int64_t heads);

// labels (B, H, N) of x (B, H, N, D), -1 in padding.
template <class T>
void assign_nearest(const TensorView& x, const std::vector<Span>& spans, const CentroidView& view,
                    const TensorView& labels, std::vector<Tiles<T>>& tiles);

// The same with at most `capacity` tokens per cluster; 0 = ceil(tokens / C) of each item. The bias
// is not used. Returns the solved problem of every (item, head).
template <class T>
std::vector<BalancedProblem> assign_balanced(const TensorView& x, const std::vector<Span>& spans,
                                             const CentroidView& view, std::int64_t capacity,
                                             const TensorView& labels, std::vector<Tiles<T>>& tiles,
                                             BalancedWorkspace<T>& workspace);

}  // namespace coterie::cpu
