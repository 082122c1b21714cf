// SPDX-License-Identifier: MIT
#include "cpu/engine/row_tiles.h"

#include <algorithm>

#include "cpu/engine/segment.h"

namespace coterie::cpu {

std::vector<RowTile> list_tiles(
    const ListCounts& counts, std::int64_t size,
    const std::function<std::int64_t(std::int64_t, std::int64_t, std::int64_t)>& length) {
  std::vector<RowTile> tiles;
  for (std::int64_t item = 0; item < counts.items; ++item)
    for (std::int64_t head = 0; head < counts.heads; ++head)
      for (std::int64_t list = 0; list < counts.lists; ++list) {
        const std::int64_t rows = length(item, head, list);
        for (std::int64_t first = 0; first < rows; first += size)
          tiles.push_back({item, head, list, first, std::min(size, rows - first)});
      }
  return tiles;
}

std::vector<RowTile> span_tiles(const std::vector<Span>& spans, std::int64_t heads) {
  return list_tiles({static_cast<std::int64_t>(spans.size()), heads}, kQueryTile,
                    [&](std::int64_t item, std::int64_t, std::int64_t) {
                      return spans[static_cast<std::size_t>(item)].length;
                    });
}

}  // namespace coterie::cpu
