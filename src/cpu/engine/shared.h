// SPDX-License-Identifier: MIT
// Attention of clusters of queries over one key list per cluster. Clusters may list the same key,
// so key gradients are first computed per (cluster, slot) and then summed per key.
#pragma once

#include <cstdint>

#include "cpu/engine/partition.h"

namespace coterie::cpu {

// The lists of a call, all int32 and contiguous.
struct ClusterLists {
  TensorView order;    // (B, H, N)
  TensorView offsets;  // (items, H, C+1)
  TensorView keys;     // (items, H, C, width), ascending, -1 beyond the last

  std::int64_t clusters() const { return offsets.size(2) - 1; }
  std::int64_t width() const { return keys.size(3); }
  Range members(std::int64_t item, std::int64_t head, std::int64_t cluster) const;
  const std::int32_t* key_row(std::int64_t item, std::int64_t head, std::int64_t cluster) const;
};

// One list per cluster; with call.causal a query sees the listed keys that are not after it.
template <class T>
ListCall<T> shared_plan(const AttentionCall& call, const ClusterLists& lists);

// Key and value gradients of every (cluster, slot): items x H x C x width rows each.
template <class T>
struct KeySlots {
  T *dk = nullptr, *dv = nullptr;

  KeySlots(Arena& arena, const AttentionCall& call, std::int64_t clusters, std::int64_t width);
};

// Fills the slots, from workspace.delta.
template <class T>
void shared_backward_slots(const AttentionCall& call, const ListCall<T>& plan,
                           const ClusterLists& lists, const ListGradients& gradients,
                           KeySlots<T>& slots, ListWorkspace<T>& workspace);

// Adds the slots of keys [first, first + count) of one query head to tiles.dk and tiles.dv.
template <class T>
void add_slots(const AttentionCall& call, const ClusterLists& lists, std::int64_t item,
               std::int64_t head, std::int64_t first, std::int64_t count, const KeySlots<T>& slots,
               Tiles<T>& tiles);

// The whole backward pass of attention over shared lists.
template <class T>
void shared_backward(const AttentionCall& call, const ListCall<T>& plan, const ClusterLists& lists,
                     const ListGradients& gradients, KeySlots<T>& slots,
                     ListWorkspace<T>& workspace);

}  // namespace coterie::cpu
