// SPDX-License-Identifier: MIT
// Tiles of rows, and the parallel loop over them. A tile is a task: large lists are split into many
// tasks, and the next free thread takes the next task.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "core/items.h"
#include "core/parallel.h"

namespace coterie::cpu {

// Rows [first, first + count) of a list of one (item, head).
struct RowTile {
  std::int64_t item, head, list, first, count;
};

// Numbers of items, heads per item and lists per head.
struct ListCounts {
  std::int64_t items, heads, lists = 1;
};

// Tiles of at most `size` rows of all lists, in ascending order; a list has
// length(item, head, list) rows.
std::vector<RowTile> list_tiles(
    const ListCounts& counts, std::int64_t size,
    const std::function<std::int64_t(std::int64_t, std::int64_t, std::int64_t)>& length);

// Tiles of at most kQueryTile rows of whole spans: the list of an (item, head) is its span.
std::vector<RowTile> span_tiles(const std::vector<Span>& spans, std::int64_t heads);

// Calls body(tile, worker) for every element of `tiles`, in parallel.
template <class Body>
void for_tiles(const std::vector<RowTile>& tiles, Body body) {
  parallel_for(static_cast<std::int64_t>(tiles.size()), [&](std::int64_t number, int worker) {
    body(tiles[static_cast<std::size_t>(number)], worker);
  });
}

// The same with the worker's own memory, one element per thread: body(tile, memory).
template <class Memory, class Body>
void for_tiles(const std::vector<RowTile>& tiles, std::vector<Memory>& memory, Body body) {
  for_tiles(tiles, [&](const RowTile& tile, int worker) {
    body(tile, memory[static_cast<std::size_t>(worker)]);
  });
}

}  // namespace coterie::cpu
