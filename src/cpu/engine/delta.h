// SPDX-License-Identifier: MIT
// delta = gradient . output, the term that every softmax gradient subtracts.
#pragma once

#include <cstdint>

#include "cpu/engine/segment.h"

namespace coterie::cpu {

// tiles.delta[r] = row r of tiles.g . row first + r of `out`, r < count <= kQueryTile. The sum runs
// in the order of the products gradient . value, so that if the output is a single value, the
// gradient of its logit is exactly 0. Overwrites tiles.v_columns and tiles.dp.
template <class T>
void delta_of_outputs(const Rows& out, std::int64_t first, std::int64_t count, Tiles<T>& tiles);

}  // namespace coterie::cpu
