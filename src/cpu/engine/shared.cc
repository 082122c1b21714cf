// SPDX-License-Identifier: MIT
#include "cpu/engine/shared.h"

#include <algorithm>

namespace coterie::cpu {

Range ClusterLists::members(std::int64_t item, std::int64_t head, std::int64_t cluster) const {
  const std::int32_t* offset = block_at<std::int32_t>(offsets, item, head) + cluster;
  return {offset[0], offset[1]};
}

const std::int32_t* ClusterLists::key_row(std::int64_t item, std::int64_t head,
                                          std::int64_t cluster) const {
  return block_at<std::int32_t>(keys, item, head) + cluster * width();
}

template <class T>
ListCall<T> shared_plan(const AttentionCall& call, const ClusterLists& lists) {
  ListCall<T> plan;
  plan.lists = lists.clusters();
  plan.scale = static_cast<T>(call.scale);
  plan.pair = [&call, lists](std::int64_t number, std::int64_t head, std::int64_t cluster) {
    const Item& item = call.item(number);
    const Range members = lists.members(number, head, cluster);
    const std::int32_t* order = span_at<std::int32_t>(lists.order, item.q, head) + members.begin;
    const std::int32_t* keys = lists.key_row(number, head, cluster);
    const std::int64_t num_keys = std::find(keys, keys + lists.width(), -1) - keys;
    ListPair<T> pair;
    pair.queries = {members.end - members.begin, order};
    pair.keys = {num_keys, keys};
    const bool causal = call.causal;
    const std::int64_t offset = call.position_offset(item);
    pair.rule.ranges = [=](std::int64_t first, std::int64_t count, Range* ranges) {
      for (std::int64_t r = 0; r < count; ++r) {
        const std::int64_t position = order[first + r] + offset;
        ranges[r] = {0,
                     causal ? std::upper_bound(keys, keys + num_keys, position) - keys : num_keys};
      }
    };
    return pair;
  };
  return plan;
}

template <class T>
KeySlots<T>::KeySlots(Arena& arena, const AttentionCall& call, std::int64_t clusters,
                      std::int64_t width)
    : dk(arena.take<T>(call.num_items() * call.H * clusters * width * padded(call.Dk))),
      dv(arena.take<T>(call.num_items() * call.H * clusters * width * padded(call.Dv))) {}

template <class T>
void shared_backward_slots(const AttentionCall& call, const ListCall<T>& plan,
                           const ClusterLists& lists, const ListGradients& gradients,
                           KeySlots<T>& slots, ListWorkspace<T>& workspace) {
  const auto length = [&](std::int64_t item, std::int64_t head, std::int64_t c) {
    return plan.pair(item, head, c).keys.count;
  };
  const std::vector<RowTile> row_list =
      list_tiles({call.num_items(), call.H, lists.clusters()}, kKeyTile, length);
  for_tiles(row_list, workspace.tiles, [&](const RowTile& tile, Tiles<T>& tiles) {
    std::fill_n(tiles.dk, tile.count * tiles.key_row, T(0));
    std::fill_n(tiles.dv, tile.count * tiles.value_row, T(0));
    const ListPair<T> pair = plan.pair(tile.item, tile.head, tile.list);
    backward_key_tile(make_segment(call, plan, tile.item, tile.head, pair),
                      list_row_gradients(call, plan, gradients, workspace.delta, tile.item,
                                         tile.head, pair.queries),
                      tile.first, tile.count, tiles);
    const std::int64_t slot =
        ((tile.item * call.H + tile.head) * lists.clusters() + tile.list) * lists.width() +
        tile.first;
    std::copy_n(tiles.dk, tile.count * tiles.key_row, slots.dk + slot * tiles.key_row);
    std::copy_n(tiles.dv, tile.count * tiles.value_row, slots.dv + slot * tiles.value_row);
  });
}

template <class T>
void add_slots(const AttentionCall& call, const ClusterLists& lists, std::int64_t item,
               std::int64_t head, std::int64_t first, std::int64_t count, const KeySlots<T>& slots,
               Tiles<T>& tiles) {
  const Kernels<T>& kernel = kernels<T>();
  for (std::int64_t c = 0; c < lists.clusters(); ++c) {
    const Range members = lists.members(item, head, c);
    if (members.begin == members.end) continue;
    const std::int32_t* keys = lists.key_row(item, head, c);
    const std::int32_t* end = std::find(keys, keys + lists.width(), -1);
    const std::int64_t row = ((item * call.H + head) * lists.clusters() + c) * lists.width();
    for (const std::int32_t* key = std::lower_bound(keys, end, first);
         key != end && *key < first + count; ++key) {
      const std::int64_t slot = row + (key - keys);
      kernel.row_add(tiles.dk + (*key - first) * tiles.key_row, slots.dk + slot * tiles.key_row,
                     tiles.key_row, T(1));
      kernel.row_add(tiles.dv + (*key - first) * tiles.value_row, slots.dv + slot * tiles.value_row,
                     tiles.value_row, T(1));
    }
  }
}

template <class T>
void shared_backward(const AttentionCall& call, const ListCall<T>& plan, const ClusterLists& lists,
                     const ListGradients& gradients, KeySlots<T>& slots,
                     ListWorkspace<T>& workspace) {
  lists_deltas(call, plan, gradients, workspace);
  if (gradients.dq.present()) lists_backward_queries(call, plan, gradients, workspace);
  const TensorView &dk = gradients.dk, &dv = gradients.dv;
  if (!dk.present() && !dv.present()) return;
  shared_backward_slots(call, plan, lists, gradients, slots, workspace);
  const auto add = [&](const RowTile& tile, std::int64_t head, Tiles<T>& tiles) {
    add_slots(call, lists, tile.item, head, tile.first, tile.count, slots, tiles);
  };
  write_key_tiles<T>(call, {}, add, dk, dv, workspace.tiles);
}

#define COTERIE_INSTANTIATE(T)                                                                   \
  template ListCall<T> shared_plan(const AttentionCall&, const ClusterLists&);                   \
  template struct KeySlots<T>;                                                                   \
  template void shared_backward_slots(const AttentionCall&, const ListCall<T>&,                  \
                                      const ClusterLists&, const ListGradients&, KeySlots<T>&,   \
                                      ListWorkspace<T>&);                                        \
  template void shared_backward(const AttentionCall&, const ListCall<T>&, const ClusterLists&,   \
                                const ListGradients&, KeySlots<T>&, ListWorkspace<T>&);          \
  template void add_slots(const AttentionCall&, const ClusterLists&, std::int64_t, std::int64_t, \
                          std::int64_t, std::int64_t, const KeySlots<T>&, Tiles<T>&);
COTERIE_INSTANTIATE(float)
COTERIE_INSTANTIATE(double)
#undef COTERIE_INSTANTIATE

}  // namespace coterie::cpu
