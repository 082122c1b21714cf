// SPDX-License-Identifier: MIT
// The backward pass of lists with five products per pair of tiles instead of seven: a tile of keys
// also adds to the gradients of its queries, in ascending order of the keys.
#include <algorithm>
#include <numeric>

#include "cpu/engine/partition.h"
#include "cpu/engine/tile_steps.h"
#include "cpu/engine/turns.h"

namespace coterie::cpu {

namespace {

// The key tiles that each tile of queries sees, and the order in which they add to its gradients.
template <class T>
struct QueryTurns {
  const AttentionCall& call;
  const ListCall<T>& plan;
  std::vector<std::int64_t> first_tile;  // of each (item, head, list)
  std::vector<Range> spans;              // in key tiles
  Turns turns;

  QueryTurns(const AttentionCall& calling, const ListCall<T>& planned,
             const std::vector<RowTile>& row_list);

  std::size_t list_number(std::int64_t item, std::int64_t head, std::int64_t list) const {
    return static_cast<std::size_t>((item * call.H + head) * plan.lists + list);
  }
  void add(const RowTile& keys, std::int64_t head, const ListGradients& gradients, const T* delta,
           Tiles<T>& tiles);
};

template <class T>
QueryTurns<T>::QueryTurns(const AttentionCall& calling, const ListCall<T>& planned,
                          const std::vector<RowTile>& row_list)
    : call(calling), plan(planned), turns(static_cast<std::int64_t>(row_list.size())) {
  first_tile.assign(list_number(call.num_items(), 0, 0) + 1, 0);
  Range ranges[kQueryTile];
  for (const RowTile& tile : row_list) {
    plan.pair(tile.item, tile.head, tile.list).rule.ranges(tile.first, tile.count, ranges);
    const Range span = tile_span(ranges, tile.count);
    Range key_tiles;
    if (span.begin < span.end)
      key_tiles = {span.begin / kKeyTile, (span.end + kKeyTile - 1) / kKeyTile};
    turns.start(static_cast<std::int64_t>(spans.size()), key_tiles.begin);
    spans.push_back(key_tiles);
    ++first_tile[list_number(tile.item, tile.head, tile.list) + 1];
  }
  std::partial_sum(first_tile.begin(), first_tile.end(), first_tile.begin());
}

// Computes the gradients of a tile of keys and adds its part to dq after all earlier key tiles.
template <class T>
void QueryTurns<T>::add(const RowTile& keys, std::int64_t head, const ListGradients& gradients,
                        const T* delta, Tiles<T>& tiles) {
  const ListPair<T> pair = plan.pair(keys.item, head, keys.list);
  const std::size_t list = list_number(keys.item, head, keys.list);
  const std::int64_t begin = first_tile[list], end = first_tile[list + 1];
  const std::int64_t task = keys.first / kKeyTile;
  const Rows dq = list_rows(gradients.dq, call.item(keys.item).q, head, pair.queries);
  const QuerySums sums = [&](std::int64_t first, std::int64_t count) {
    const Turns::Turn turn(turns, begin + first / kQueryTile, task);
    add_to_queries(dq, first, count, keys.count, tiles);
  };
  backward_key_tile(make_segment(call, plan, keys.item, head, pair),
                    list_row_gradients(call, plan, gradients, delta, keys.item, head, pair.queries),
                    keys.first, keys.count, tiles, static_cast<const TileHook<T>*>(nullptr), &sums);
  // Query tiles whose span includes this key tile although none of their queries sees it.
  for (std::int64_t sum = begin; sum < end; ++sum) {
    const Range& span = spans[static_cast<std::size_t>(sum)];
    if (task < span.begin || task >= span.end || turns.next(sum) > task) continue;
    const Turns::Turn nothing_to_add(turns, sum, task);
  }
}

}  // namespace

template <class T>
void lists_backward_together(const AttentionCall& call, const ListCall<T>& plan,
                             const ListGradients& gradients, ListWorkspace<T>& workspace) {
  fill_padding(gradients.dq, query_spans(call), 0);
  const std::vector<RowTile> row_list = list_query_tiles(call, plan);
  for_tiles(row_list, workspace.tiles, [&](const RowTile& tile, Tiles<T>& tiles) {
    std::fill_n(tiles.dq, tile.count * tiles.key_row, T(0));
    const RowList queries = plan.pair(tile.item, tile.head, tile.list).queries;
    kernels<T>().store(list_rows(gradients.dq, call.item(tile.item).q, tile.head, queries),
                       tile.first, tile.count, T(1), tiles.dq, tiles.key_row);
  });
  QueryTurns<T> turns(call, plan, row_list);
  const auto add = [&](const RowTile& tile, std::int64_t head, Tiles<T>& tiles) {
    turns.turns.run([&] { turns.add(tile, head, gradients, workspace.delta, tiles); });
  };
  write_key_tiles<T>(call, key_lists(call, plan), add, gradients.dk, gradients.dv, workspace.tiles);
}

#define COTERIE_INSTANTIATE(T)                                                    \
  template void lists_backward_together(const AttentionCall&, const ListCall<T>&, \
                                        const ListGradients&, ListWorkspace<T>&);
COTERIE_INSTANTIATE(float)
COTERIE_INSTANTIATE(double)
#undef COTERIE_INSTANTIATE

}  // namespace coterie::cpu
