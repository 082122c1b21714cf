// SPDX-License-Identifier: MIT
// Attention over groups that may overlap. A token can be in any number of groups, so results are
// kept per slot (an entry in the list of a group) and summed per token afterwards (fold.h).
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "core/call.h"
#include "coterie/mechanism.h"
#include "cpu/engine/row_tiles.h"
#include "cpu/engine/rows.h"
#include "cpu/engine/segment.h"

namespace coterie::cpu {

// The slots of one (item, head), numbered first .. first + count - 1 over the whole call.
struct SlotBlock {
  const std::int32_t* tokens = nullptr;  // of `count` slots, relative to the item; -1 = empty
  std::int64_t first = 0, count = 0;
};

// The query slots or the key slots of a call.
struct SlotSide {
  std::int64_t heads = 0;
  std::vector<SlotBlock> blocks;  // (items, heads)

  const SlotBlock& block(std::int64_t item, std::int64_t head) const {
    return blocks[static_cast<std::size_t>(item * heads + head)];
  }
};

// Slots of lists (items, list heads, C, w), w per group; consecutive heads share a list when there
// are fewer lists than `heads`.
SlotSide member_slots(const TensorView& lists, std::int64_t heads);

// Queries that attend to keys: ranges of slots relative to their blocks, none of them empty.
template <class T>
struct SlotGroup {
  Range queries, keys;
  Rule<T> rule;  // in ranks: slots relative to queries.begin and keys.begin
};

template <class T>
struct GroupPlan {
  SlotSide queries, keys;   // of call.H and call.key_heads heads
  std::int64_t groups = 0;  // per (item, head)
  // Query heads that share a key head have the same keys in a group.
  std::function<SlotGroup<T>(std::int64_t item, std::int64_t head, std::int64_t group)> group;
  T scale = 1;
  const T* head_scale = nullptr;  // optional (H) factors
};

// Members of each group, -1 = empty, ascending: slot p of group c is query queries[item, head, c,
// p], which attends to keys[item, key head, c, :].
struct MemberLists {
  TensorView queries;  // (items, H, C, wq)
  TensorView keys;     // (items, Hkv, C, wk)
};

// The groups of `lists`, with call.scale. If the call is causal, keys after the query's position
// are masked; with `demote` a query sees the key at its own position only if it sees no other.
template <class T>
GroupPlan<T> member_plan(const AttentionCall& call, const MemberLists& lists, SelfAttention self);

// Row `slot` of `out` and lse[slot] for every query slot; empty slots get 0 and -inf.
template <class T>
void groups_forward(const AttentionCall& call, const GroupPlan<T>& plan, const Rows& out, T* lse,
                    std::vector<Tiles<T>>& tiles);

// Backward inputs of the queries of a group. The functions below refer to their arguments call and
// plan, which must outlive the result.
template <class T>
using GroupRows =
    std::function<RowGradients<T>(std::int64_t item, std::int64_t head, const SlotGroup<T>& group)>;

// Arrays over the query slots of a call.
template <class T>
struct SlotValues {
  const T *weight, *lse, *delta;  // weight and delta may be null
};

// A slot's gradient is its token's row of grad_out (B, H, N, Dv), times weight.
template <class T>
GroupRows<T> token_gradients(const AttentionCall& call, const GroupPlan<T>& plan,
                             const TensorView& grad_out, const SlotValues<T>& values);

// A slot's gradient is row `slot` of `gradient`.
template <class T>
GroupRows<T> slot_gradients(const GroupPlan<T>& plan, const Rows& gradient,
                            const SlotValues<T>& values);

// delta[slot] = gradient . output of every slot that is not empty, with recomputed outputs.
template <class T>
void groups_delta(const AttentionCall& call, const GroupPlan<T>& plan, const GroupRows<T>& rows,
                  T* delta, std::vector<Tiles<T>>& tiles);

// delta[slot] = sum over the group's keys of exp(score - lse) gradient . v, with the rows' lse: the
// part of gradient . output that a group adds when a query's groups share one softmax.
template <class T>
void groups_partial_delta(const AttentionCall& call, const GroupPlan<T>& plan,
                          const GroupRows<T>& rows, T* delta, std::vector<Tiles<T>>& tiles);

// Gradients of slots that are not empty: dq (query slots x Dk), dk (key slots x Dk), dv (key slots
// x Dv); the key slots of a key head get the sum over its query heads. Null: not computed.
template <class T>
struct SlotGradients {
  T *dq = nullptr, *dk = nullptr, *dv = nullptr;
};

template <class T>
void groups_backward(const AttentionCall& call, const GroupPlan<T>& plan, const GroupRows<T>& rows,
                     const SlotGradients<T>& gradients, std::vector<Tiles<T>>& tiles);

}  // namespace coterie::cpu
