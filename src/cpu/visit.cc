// SPDX-License-Identifier: MIT
#include "cpu/visit.h"

#include <algorithm>

#include "core/parallel.h"
#include "cpu/segment.h"

namespace coterie::cpu {

std::vector<RowTile> row_tiles(const std::vector<Span>& spans, std::int64_t heads) {
  std::vector<RowTile> tiles;
  for (std::size_t item = 0; item < spans.size(); ++item)
    for (std::int64_t head = 0; head < heads; ++head)
      for (std::int64_t first = 0; first < spans[item].length; first += kQueryTile)
        tiles.push_back({static_cast<std::int64_t>(item), head, first,
                         std::min(kQueryTile, spans[item].length - first)});
  return tiles;
}

void visit_rows(const std::vector<Span>& spans, std::int64_t heads,
                const std::function<void(const RowTile& tile, int worker)>& visit) {
  const std::vector<RowTile> tiles = row_tiles(spans, heads);
  parallel_for(static_cast<std::int64_t>(tiles.size()), [&](std::int64_t number, int worker) {
    visit(tiles[static_cast<std::size_t>(number)], worker);
  });
}

}  // namespace coterie::cpu
