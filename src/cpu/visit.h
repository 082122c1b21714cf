// SPDX-License-Identifier: MIT
// Parallel loops over the valid rows of (B, H, N, ...) tensors.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "core/items.h"

namespace coterie::cpu {

// Rows [first, first + count) of an item, count <= kQueryTile.
struct RowTile {
  std::int64_t item, head, first, count;
};

// The tiles of all spans and heads, item by item.
std::vector<RowTile> row_tiles(const std::vector<Span>& spans, std::int64_t heads);

void visit_rows(const std::vector<Span>& spans, std::int64_t heads,
                const std::function<void(const RowTile& tile, int worker)>& visit);

}  // namespace coterie::cpu
