// SPDX-License-Identifier: MIT
#include "cpu/cluster/nearest.h"

#include <algorithm>
#include <limits>

namespace coterie::cpu {

template <class T>
void nearest_tile(const Rows& x, std::int64_t first, std::int64_t count, const Rows& centroids,
                  std::int64_t num_centroids, const T* bias, Tiles<T>& tiles,
                  std::int32_t* labels) {
  const Kernels<T>& kernel = kernels<T>();
  kernel.load(x, first, count, T(1), tiles.q, tiles.key_row);
  std::fill_n(tiles.max, count, -std::numeric_limits<T>::infinity());
  std::fill_n(labels, count, 0);
  for (std::int64_t begin = 0; begin < num_centroids; begin += kKeyTile) {
    const std::int64_t columns = std::min(kKeyTile, num_centroids - begin);
    const std::int64_t width = padded(columns);
    kernel.load_transposed(centroids, begin, columns, T(1), tiles.k_columns, width);
    kernel.multiply({count, width, x.width, tiles.q, tiles.key_row, 1, tiles.k_columns, width,
                     tiles.s, kKeyTile, false});
    for (std::int64_t r = 0; r < count; ++r) {
      T* scores = tiles.s + r * kKeyTile;
      if (bias)
        for (std::int64_t t = 0; t < columns; ++t) scores[t] += bias[begin + t];
      const std::int64_t best = kernel.row_argmax(scores, columns);
      if (!(scores[best] > tiles.max[r])) continue;
      tiles.max[r] = scores[best];
      labels[r] = static_cast<std::int32_t>(begin + best);
    }
  }
}

template void nearest_tile(const Rows&, std::int64_t, std::int64_t, const Rows&, std::int64_t,
                           const float*, Tiles<float>&, std::int32_t*);
template void nearest_tile(const Rows&, std::int64_t, std::int64_t, const Rows&, std::int64_t,
                           const double*, Tiles<double>&, std::int32_t*);

}  // namespace coterie::cpu
