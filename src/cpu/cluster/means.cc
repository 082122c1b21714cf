// SPDX-License-Identifier: MIT
#include "cpu/cluster/means.h"

#include <algorithm>

namespace coterie::cpu {

template <class T>
void sum_rows(const Rows& x, const std::int32_t* index, std::int64_t begin, std::int64_t end,
              T* tile, std::int64_t tile_row, T* sum) {
  const Kernels<T>& kernel = kernels<T>();
  Rows listed = x;
  listed.index = index;
  std::fill_n(sum, tile_row, T(0));
  for (std::int64_t first = begin; first < end; first += kQueryTile) {
    const std::int64_t count = std::min(kQueryTile, end - first);
    kernel.load(listed, first, count, T(1), tile, tile_row);
    // Summing each tile first reduces the rounding error of long groups.
    for (std::int64_t r = 1; r < count; ++r) kernel.row_add(tile, tile + r * tile_row, tile_row, 1);
    kernel.row_add(sum, tile, tile_row, T(1));
  }
}

template <class T>
void mean_rows(const Rows& x, const std::int32_t* index, std::int64_t begin, std::int64_t end,
               Tiles<T>& tiles, T* mean) {
  if (begin == end) return;
  sum_rows(x, index, begin, end, tiles.q, tiles.key_row, tiles.dq);
  for (std::int64_t d = 0; d < x.width; ++d) mean[d] = tiles.dq[d] / static_cast<T>(end - begin);
}

#define COTERIE_INSTANTIATE(T)                                                                     \
  template void sum_rows(const Rows&, const std::int32_t*, std::int64_t, std::int64_t, T*,         \
                         std::int64_t, T*);                                                        \
  template void mean_rows(const Rows&, const std::int32_t*, std::int64_t, std::int64_t, Tiles<T>&, \
                          T*);
COTERIE_INSTANTIATE(float)
COTERIE_INSTANTIATE(double)
#undef COTERIE_INSTANTIATE

}  // namespace coterie::cpu
