// SPDX-License-Identifier: MIT
// Means of groups of rows.
#pragma once

#include <cstdint>

#include "cpu/engine/segment.h"

namespace coterie::cpu {

// sum (tile_row elements) = sum of rows index[begin..end) of x, added tile by tile in list order,
// so that the result depends on the group alone. `tile` is scratch of kQueryTile x tile_row.
template <class T>
void sum_rows(const Rows& x, const std::int32_t* index, std::int64_t begin, std::int64_t end,
              T* tile, std::int64_t tile_row, T* sum);

// Writes the mean (width elements) of rows index[begin..end); unchanged if the group is empty.
template <class T>
void mean_rows(const Rows& x, const std::int32_t* index, std::int64_t begin, std::int64_t end,
               Tiles<T>& tiles, T* mean);

}  // namespace coterie::cpu
