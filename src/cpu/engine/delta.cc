// SPDX-License-Identifier: MIT
#include "cpu/engine/delta.h"

#include <algorithm>

namespace coterie::cpu {

template <class T>
void delta_of_outputs(const Rows& out, std::int64_t first, std::int64_t count, Tiles<T>& tiles) {
  const Kernels<T>& kernel = kernels<T>();
  // Multiplies blocks of kColumnPad rows with each other and keeps the diagonal: no other kernel
  // sums a row in this order. The cost is that of kColumnPad more keys.
  for (std::int64_t r = 0; r < count; r += kColumnPad) {
    const std::int64_t rows = std::min(kColumnPad, count - r);
    kernel.load_transposed(out, first + r, rows, T(1), tiles.v_columns, kColumnPad);
    kernel.multiply({rows, kColumnPad, out.width, tiles.g + r * tiles.value_row, tiles.value_row, 1,
                     tiles.v_columns, kColumnPad, tiles.dp, kColumnPad, false});
    for (std::int64_t t = 0; t < rows; ++t) tiles.delta[r + t] = tiles.dp[t * kColumnPad + t];
  }
}

template void delta_of_outputs(const Rows&, std::int64_t, std::int64_t, Tiles<float>&);
template void delta_of_outputs(const Rows&, std::int64_t, std::int64_t, Tiles<double>&);

}  // namespace coterie::cpu
