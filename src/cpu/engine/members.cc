// SPDX-License-Identifier: MIT
#include "cpu/engine/members.h"

#include <algorithm>

#include "core/parallel.h"
#include "cpu/engine/delta.h"
#include "cpu/engine/tile_steps.h"

namespace coterie::cpu {

namespace {

template <class T>
Segment<T> group_segment(const AttentionCall& call, const GroupPlan<T>& plan, std::int64_t number,
                         std::int64_t head, const SlotGroup<T>& group) {
  const Item& item = call.items[static_cast<std::size_t>(number)];
  const std::int64_t key_head = call.key_head(head);
  const RowList queries{group.queries.end - group.queries.begin,
                        plan.queries.block(number, head).tokens + group.queries.begin};
  const RowList keys{group.keys.end - group.keys.begin,
                     plan.keys.block(number, key_head).tokens + group.keys.begin};
  Segment<T> segment;
  segment.q = list_rows(call.inputs.q, item.q, head, queries);
  segment.k = list_rows(call.k, item.k, key_head, keys);
  segment.v = list_rows(call.inputs.v, item.k, call.value_head(head), keys);
  segment.num_queries = queries.count;
  segment.num_keys = keys.count;
  segment.scale = plan.head_scale ? plan.scale * plan.head_scale[head] : plan.scale;
  segment.rule = group.rule;
  segment.dropout = dropout_of(call, number, head, queries, keys);
  return segment;
}

// Calls body(segment, group, tile, tiles) for every tile of queries.
template <class T, class Body>
void for_query_tiles(const AttentionCall& call, const GroupPlan<T>& plan,
                     std::vector<Tiles<T>>& tiles, Body body) {
  const auto length = [&](std::int64_t item, std::int64_t head, std::int64_t group) {
    const Range slots = plan.group(item, head, group).queries;
    return slots.end - slots.begin;
  };
  const std::vector<RowTile> row_list =
      list_tiles({call.num_items(), call.H, plan.groups}, kQueryTile, length);
  for_tiles(row_list, tiles, [&](const RowTile& tile, Tiles<T>& own) {
    const SlotGroup<T> group = plan.group(tile.item, tile.head, tile.list);
    body(group_segment(call, plan, tile.item, tile.head, group), group, tile, own);
  });
}

// Call-wide number of the first query slot of a tile.
template <class T>
std::int64_t first_slot(const GroupPlan<T>& plan, const SlotGroup<T>& group, const RowTile& tile) {
  return plan.queries.block(tile.item, tile.head).first + group.queries.begin + tile.first;
}

template <class T>
void clear_empty_slots(const SlotSide& side, const Rows& out, T* lse) {
  const std::size_t row_bytes = static_cast<std::size_t>(out.width * dtype_bytes(out.dtype));
  parallel_for(static_cast<std::int64_t>(side.blocks.size()), [&](std::int64_t number, int) {
    const SlotBlock& block = side.blocks[static_cast<std::size_t>(number)];
    for (std::int64_t slot = 0; slot < block.count; ++slot) {
      if (block.tokens[slot] >= 0) continue;
      // Zero bytes are the number 0 in every type.
      char* row = static_cast<char*>(out.base) + (block.first + slot) * out.stride_bytes;
      std::fill_n(row, row_bytes, char{0});
      lse[block.first + slot] = kNegInf<T>;
    }
  });
}

// Lists are ascending with -1 at the end, so the tokens of a group come first.
std::int64_t filled(const std::int32_t* tokens, std::int64_t width) {
  return std::partition_point(tokens, tokens + width, [](std::int32_t t) { return t >= 0; }) -
         tokens;
}

// The queries and keys of one group, by rank.
struct Members {
  const std::int32_t *queries, *keys;
  std::int64_t num_queries, num_keys, offset;
  bool causal;

  std::int64_t position(std::int64_t query) const { return queries[query] + offset; }
  std::int64_t seen(std::int64_t query) const {
    if (!causal) return num_keys;
    return std::upper_bound(keys, keys + num_keys, position(query)) - keys;
  }
};

template <class T>
Rule<T> member_rule(const Members& members, SelfAttention self) {
  Rule<T> rule;
  rule.ranges = [=](std::int64_t first, std::int64_t count, Range* ranges) {
    for (std::int64_t r = 0; r < count; ++r) ranges[r] = {0, members.seen(first + r)};
  };
  if (members.causal)
    rule.queries = [=](std::int64_t begin, std::int64_t) {
      const std::int64_t first_key = members.keys[begin] - members.offset;
      const std::int32_t* end = members.queries + members.num_queries;
      return Range{std::lower_bound(members.queries, end, first_key) - members.queries,
                   members.num_queries};
    };
  if (self == SelfAttention::demote)
    rule.filter = [=](std::int64_t query, std::int64_t begin, std::int64_t count, T* scores) {
      if (members.seen(query) <= 1) return;
      const std::int32_t *first = members.keys + begin, *end = first + count;
      const std::int64_t own = members.position(query);
      const std::int32_t* found = std::lower_bound(first, end, own);
      if (found != end && *found == own) scores[found - first] = kNegInf<T>;
    };
  return rule;
}

}  // namespace

SlotSide member_slots(const TensorView& lists, std::int64_t heads) {
  SlotSide side;
  side.heads = heads;
  const std::int64_t slots = lists.size(2) * lists.size(3), sharing = heads / lists.size(1);
  for (std::int64_t item = 0; item < lists.size(0); ++item)
    for (std::int64_t head = 0; head < heads; ++head)
      side.blocks.push_back({block_at<const std::int32_t>(lists, item, head / sharing),
                             (item * heads + head) * slots, slots});
  return side;
}

template <class T>
GroupPlan<T> member_plan(const AttentionCall& call, const MemberLists& lists, SelfAttention self) {
  GroupPlan<T> plan;
  plan.queries = member_slots(lists.queries, call.H);
  plan.keys = member_slots(lists.keys, call.key_heads);
  plan.groups = lists.queries.size(2);
  plan.scale = static_cast<T>(call.scale);
  const std::int64_t query_width = lists.queries.size(3), key_width = lists.keys.size(3);
  plan.group = [&call, queries = plan.queries, keys = plan.keys, query_width, key_width, self](
                   std::int64_t number, std::int64_t head, std::int64_t group) {
    const Item& item = call.items[static_cast<std::size_t>(number)];
    const std::int64_t q = group * query_width, k = group * key_width;
    const std::int32_t* query_tokens = queries.block(number, head).tokens + q;
    const std::int32_t* key_tokens = keys.block(number, call.key_head(head)).tokens + k;
    const Members members{query_tokens,
                          key_tokens,
                          filled(query_tokens, query_width),
                          filled(key_tokens, key_width),
                          call.position_offset(item),
                          call.causal};
    return SlotGroup<T>{
        {q, q + members.num_queries}, {k, k + members.num_keys}, member_rule<T>(members, self)};
  };
  return plan;
}

template <class T>
void groups_forward(const AttentionCall& call, const GroupPlan<T>& plan, const Rows& out, T* lse,
                    std::vector<Tiles<T>>& tiles) {
  clear_empty_slots(plan.queries, out, lse);
  for_query_tiles(call, plan, tiles,
                  [&](const Segment<T>& segment, const SlotGroup<T>& group, const RowTile& tile,
                      Tiles<T>& own) {
                    forward_tile(segment, tile.first, tile.count, own);
                    const std::int64_t slot = first_slot(plan, group, tile);
                    kernels<T>().store(out, slot, tile.count, T(1), own.o, own.value_row);
                    std::copy_n(own.lse, tile.count, lse + slot);
                  });
}

template <class T>
GroupRows<T> token_gradients(const AttentionCall& call, const GroupPlan<T>& plan,
                             const TensorView& grad_out, const SlotValues<T>& values) {
  return [&call, &plan, grad_out, values](std::int64_t item, std::int64_t head,
                                          const SlotGroup<T>& group) {
    const SlotBlock& block = plan.queries.block(item, head);
    RowGradients<T> rows = slot_gradients(plan, Rows{}, values)(item, head, group);
    rows.gradient = list_rows(grad_out, call.items[static_cast<std::size_t>(item)].q, head,
                              {block.count, block.tokens + group.queries.begin});
    return rows;
  };
}

template <class T>
GroupRows<T> slot_gradients(const GroupPlan<T>& plan, const Rows& gradient,
                            const SlotValues<T>& values) {
  return
      [&plan, gradient, values](std::int64_t item, std::int64_t head, const SlotGroup<T>& group) {
        const std::int64_t slot = plan.queries.block(item, head).first + group.queries.begin;
        RowGradients<T> rows;
        rows.gradient = gradient;
        rows.gradient.base = static_cast<char*>(gradient.base) + slot * gradient.stride_bytes;
        rows.weight = values.weight ? values.weight + slot : nullptr;
        rows.lse = values.lse + slot;
        rows.delta = values.delta ? values.delta + slot : nullptr;
        return rows;
      };
}

template <class T>
void groups_delta(const AttentionCall& call, const GroupPlan<T>& plan, const GroupRows<T>& rows,
                  T* delta, std::vector<Tiles<T>>& tiles) {
  for_query_tiles(call, plan, tiles,
                  [&](const Segment<T>& segment, const SlotGroup<T>& group, const RowTile& tile,
                      Tiles<T>& own) {
                    forward_tile(segment, tile.first, tile.count, own);
                    const RowGradients<T> gradients = rows(tile.item, tile.head, group);
                    Pass<T>{segment, own, &gradients}.load_gradients(tile.first, tile.count);
                    Rows out = memory_rows(own.o, own.value_row);
                    out.width = call.Dv;
                    delta_of_outputs(out, 0, tile.count, own);
                    std::copy_n(own.delta, tile.count, delta + first_slot(plan, group, tile));
                  });
}

template <class T>
void groups_partial_delta(const AttentionCall& call, const GroupPlan<T>& plan,
                          const GroupRows<T>& rows, T* delta, std::vector<Tiles<T>>& tiles) {
  for_query_tiles(call, plan, tiles,
                  [&](const Segment<T>& segment, const SlotGroup<T>& group, const RowTile& tile,
                      Tiles<T>& own) {
                    delta_tile(segment, rows(tile.item, tile.head, group), tile.first, tile.count,
                               own);
                    std::copy_n(own.delta, tile.count, delta + first_slot(plan, group, tile));
                  });
}

namespace {

template <class T>
void backward_keys(const AttentionCall& call, const GroupPlan<T>& plan, const GroupRows<T>& rows,
                   const SlotGradients<T>& gradients, std::vector<Tiles<T>>& tiles) {
  const std::int64_t sharing = call.H / call.key_heads;
  const auto length = [&](std::int64_t item, std::int64_t key_head, std::int64_t group) {
    const Range slots = plan.group(item, key_head * sharing, group).keys;
    return slots.end - slots.begin;
  };
  const std::vector<RowTile> row_list =
      list_tiles({call.num_items(), call.key_heads, plan.groups}, kKeyTile, length);
  for_tiles(row_list, tiles, [&](const RowTile& tile, Tiles<T>& own) {
    std::fill_n(own.dk, tile.count * own.key_row, T(0));
    std::fill_n(own.dv, tile.count * own.value_row, T(0));
    std::int64_t slot = plan.keys.block(tile.item, tile.head).first + tile.first;
    for (std::int64_t head = tile.head * sharing; head < (tile.head + 1) * sharing; ++head) {
      const SlotGroup<T> group = plan.group(tile.item, head, tile.list);
      if (head == tile.head * sharing) slot += group.keys.begin;
      backward_key_tile(group_segment(call, plan, tile.item, head, group),
                        rows(tile.item, head, group), tile.first, tile.count, own);
    }
    const Kernels<T>& kernel = kernels<T>();
    if (gradients.dk)
      kernel.store(memory_rows(gradients.dk, call.Dk), slot, tile.count, T(1), own.dk, own.key_row);
    if (gradients.dv)
      kernel.store(memory_rows(gradients.dv, call.Dv), slot, tile.count, T(1), own.dv,
                   own.value_row);
  });
}

}  // namespace

template <class T>
void groups_backward(const AttentionCall& call, const GroupPlan<T>& plan, const GroupRows<T>& rows,
                     const SlotGradients<T>& gradients, std::vector<Tiles<T>>& tiles) {
  if (gradients.dq)
    for_query_tiles(call, plan, tiles,
                    [&](const Segment<T>& segment, const SlotGroup<T>& group, const RowTile& tile,
                        Tiles<T>& own) {
                      backward_query_tile(segment, rows(tile.item, tile.head, group), tile.first,
                                          tile.count, own);
                      kernels<T>().store(memory_rows(gradients.dq, call.Dk),
                                         first_slot(plan, group, tile), tile.count, T(1), own.dq,
                                         own.key_row);
                    });
  if (gradients.dk || gradients.dv) backward_keys(call, plan, rows, gradients, tiles);
}

#define COTERIE_INSTANTIATE(T)                                                                   \
  template GroupPlan<T> member_plan(const AttentionCall&, const MemberLists&, SelfAttention);    \
  template void groups_forward(const AttentionCall&, const GroupPlan<T>&, const Rows&, T*,       \
                               std::vector<Tiles<T>>&);                                          \
  template GroupRows<T> token_gradients(const AttentionCall&, const GroupPlan<T>&,               \
                                        const TensorView&, const SlotValues<T>&);                \
  template GroupRows<T> slot_gradients(const GroupPlan<T>&, const Rows&, const SlotValues<T>&);  \
  template void groups_delta(const AttentionCall&, const GroupPlan<T>&, const GroupRows<T>&, T*, \
                             std::vector<Tiles<T>>&);                                            \
  template void groups_partial_delta(const AttentionCall&, const GroupPlan<T>&,                  \
                                     const GroupRows<T>&, T*, std::vector<Tiles<T>>&);           \
  template void groups_backward(const AttentionCall&, const GroupPlan<T>&, const GroupRows<T>&,  \
                                const SlotGradients<T>&, std::vector<Tiles<T>>&);
COTERIE_INSTANTIATE(float)
COTERIE_INSTANTIATE(double)
#undef COTERIE_INSTANTIATE

}  // namespace coterie::cpu
