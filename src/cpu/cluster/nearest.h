// SPDX-License-Identifier: MIT
// Nearest centroid by inner product plus bias: a product tile with a running arg-max per row.
#pragma once

#include <cstdint>

#include "cpu/engine/segment.h"

namespace coterie::cpu {

// labels[r] = argmax_c x_r . centroid_c + bias[c] (bias may be null) for rows [first, first +
// count) of x, count <= kQueryTile; lower index on ties, 0 when every score is NaN. The score of a
// row and a centroid does not depend on the other rows and centroids.
template <class T>
void nearest_tile(const Rows& x, std::int64_t first, std::int64_t count, const Rows& centroids,
                  std::int64_t num_centroids, const T* bias, Tiles<T>& tiles, std::int32_t* labels);

}  // namespace coterie::cpu
