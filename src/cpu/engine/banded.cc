// SPDX-License-Identifier: MIT
// Visible keys and the forward pass. The backward pass is in banded_backward.cc.
#include "cpu/engine/banded.h"

#include <algorithm>

#include "core/parallel.h"
#include "cpu/engine/merge.h"
#include "cpu/engine/tile_steps.h"

namespace coterie::cpu {

BandedLayout::BandedLayout(Arena& arena, const BandedParams& params, const AttentionCall& call)
    : key_ends(arena.take<std::int32_t>(call.B * call.H * call.N * params.clusters_per_query)),
      own_key(arena.take<std::uint8_t>(call.B * call.H * call.N)),
      query_slots(arena, call.B * call.H * call.N * params.clusters_per_query, call.H,
                  call.B * call.N, call.num_items()) {}

namespace {

SlotSide run_slots(const TensorView& order, const std::vector<Span>& spans,
                   std::int64_t per_token) {
  SlotSide side;
  side.heads = order.size(1);
  for (const Span& span : spans)
    for (std::int64_t head = 0; head < side.heads; ++head) {
      const std::int32_t* tokens = span_at<const std::int32_t>(order, span, head, per_token);
      side.blocks.push_back(
          {tokens, tokens - static_cast<const std::int32_t*>(order.data), span.length * per_token});
    }
  return side;
}

// The run of a cluster on both sides.
struct RunPair {
  Range queries, keys;                            // slots within their blocks
  const std::int32_t *query_tokens, *key_tokens;  // of the run
  std::int32_t* key_ends;                         // of the run's queries
};

template <class T>
RunPair run_pair(const BandedProblem<T>& problem, const GroupPlan<T>& plan,
                 const BandedLayout& layout, std::int64_t item, std::int64_t head,
                 std::int64_t cluster) {
  const std::int64_t key_head = problem.call.key_head(head);
  const auto* q = block_at<const std::int32_t>(problem.runs.q_offsets, item, head) + cluster;
  const auto* k = block_at<const std::int32_t>(problem.runs.k_offsets, item, key_head) + cluster;
  const SlotBlock& queries = plan.queries.block(item, head);
  const SlotBlock& keys = plan.keys.block(item, key_head);
  return {{q[0], q[1]},
          {k[0], k[1]},
          queries.tokens + q[0],
          keys.tokens + k[0],
          layout.key_ends + queries.first + q[0]};
}

// The number of visible keys (2 means two or more), and whether the own key is among them.
constexpr std::uint8_t kManyKeys = 2, kCountMask = 3, kOwnKeySeen = 4;

void note_keys(std::int64_t count, bool own, std::uint8_t& seen) {
  const std::int64_t total = (seen & kCountMask) + count;
  seen = static_cast<std::uint8_t>(std::min<std::int64_t>(total, kManyKeys) | (seen & kOwnKeySeen) |
                                   (own ? kOwnKeySeen : 0));
}

std::uint8_t own_key_flag(const BandedParams& params, std::uint8_t seen) {
  const bool found = seen & kOwnKeySeen, added = params.include_self && !found;
  const bool others = (seen & kCountMask) - (found ? 1 : 0) > 0;
  const bool demoted = params.self == SelfAttention::demote && others;
  if (found) return demoted ? kDropOwnKey : 0;
  return added && !demoted ? kAddOwnKey : 0;
}

// Key ends and own-key flags of one item and head.
template <class T>
void lay_out(const BandedProblem<T>& problem, const GroupPlan<T>& plan, BandedLayout& layout,
             std::int64_t number, std::int64_t head) {
  const Item& item = problem.call.items[static_cast<std::size_t>(number)];
  const std::int64_t offset = problem.call.position_offset(item);
  std::uint8_t* own_key = layout.own_key_at(problem.call, item.q, head);
  std::fill_n(own_key, item.q.length, std::uint8_t{0});
  for (std::int64_t cluster = 0; cluster < plan.groups; ++cluster) {
    const RunPair run = run_pair(problem, plan, layout, number, head, cluster);
    const std::int64_t num_queries = run.queries.end - run.queries.begin;
    const std::int64_t num_keys = run.keys.end - run.keys.begin;
    std::int32_t end = 0;
    for (std::int64_t q = 0; q < num_queries; ++q) {
      const std::int32_t token = run.query_tokens[q];
      while (end < num_keys && run.key_tokens[end] <= token + offset) ++end;
      run.key_ends[q] = end;
      note_keys(std::min<std::int64_t>(end, problem.params.window),
                end > 0 && run.key_tokens[end - 1] == token + offset, own_key[token]);
    }
  }
  for (std::int64_t i = 0; i < item.q.length; ++i)
    own_key[i] = own_key_flag(problem.params, own_key[i]);
}

template <class T>
Rule<T> banded_rule(const RunPair& run, std::int64_t window, std::int64_t offset,
                    const std::uint8_t* own_key) {
  const std::int32_t* ends = run.key_ends;
  const std::int64_t num_queries = run.queries.end - run.queries.begin;
  Rule<T> rule;
  rule.ranges = [=](std::int64_t first, std::int64_t count, Range* ranges) {
    for (std::int64_t r = 0; r < count; ++r) {
      const std::int64_t end = ends[first + r];
      ranges[r] = {std::max<std::int64_t>(0, end - window), end};
    }
  };
  // Ends never decrease along a run.
  rule.queries = [=](std::int64_t begin, std::int64_t end) {
    const auto first_with = [&](auto holds) {
      return std::partition_point(ends, ends + num_queries,
                                  [&](std::int32_t e) { return !holds(e); }) -
             ends;
    };
    return Range{first_with([&](std::int64_t e) { return e > begin; }),
                 first_with([&](std::int64_t e) { return e - window >= end; })};
  };
  if (own_key)
    rule.filter = [=](std::int64_t query, std::int64_t begin, std::int64_t count, T* scores) {
      const std::int32_t token = run.query_tokens[query];
      const std::int64_t last = ends[query] - 1;  // the own key, if it is in this run
      if (own_key[token] != kDropOwnKey || last < begin || last >= begin + count) return;
      if (run.key_tokens[last] == token + offset) scores[last - begin] = kNegInf<T>;
    };
  return rule;
}

}  // namespace

template <class T>
GroupPlan<T> banded_plan(const BandedProblem<T>& problem, BandedLayout& layout) {
  const AttentionCall& call = problem.call;
  GroupPlan<T> plan;
  plan.queries =
      run_slots(problem.runs.q_order, query_spans(call), problem.params.clusters_per_query);
  plan.keys = run_slots(problem.runs.k_order, key_spans(call), 1);
  plan.groups = problem.runs.q_offsets.size(2) - 1;
  plan.scale = static_cast<T>(call.scale);
  plan.head_scale = problem.head_scale;
  layout.query_slots.build(plan.queries, query_spans(call));
  parallel_for(call.num_items() * call.H, [&](std::int64_t task, int) {
    lay_out(problem, plan, layout, task / call.H, task % call.H);
  });
  const GroupPlan<T> sides = plan;  // without `group`, which cannot capture itself
  plan.group = [&problem, &layout, sides](std::int64_t number, std::int64_t head,
                                          std::int64_t cluster) {
    const Item& item = problem.call.items[static_cast<std::size_t>(number)];
    const RunPair run = run_pair(problem, sides, layout, number, head, cluster);
    const bool demote = problem.params.self == SelfAttention::demote;
    return SlotGroup<T>{
        run.queries, run.keys,
        banded_rule<T>(run, problem.params.window, problem.call.position_offset(item),
                       demote ? layout.own_key_at(problem.call, item.q, head) : nullptr)};
  };
  return plan;
}

template <class T>
BandedForward<T>::BandedForward(Arena& arena, const BandedParams& params, const AttentionCall& call)
    : layout(arena, params, call),
      slot_out(arena.take<T>(call.B * call.H * call.N * params.clusters_per_query * call.Dv)),
      slot_lse(arena.take<T>(call.B * call.H * call.N * params.clusters_per_query)) {}

namespace {

// Writes scaled logits of queries with their own keys to tiles.max and own values, times their
// factors of dropout, to tiles.v.
template <class T>
void own_key_parts(const BandedProblem<T>& problem, const RowTile& tile, Tiles<T>& tiles) {
  const AttentionCall& call = problem.call;
  const Kernels<T>& kernel = kernels<T>();
  const Item& item = call.items[static_cast<std::size_t>(tile.item)];
  const T factor = problem.head_scale ? problem.head_scale[tile.head] : T(1);
  kernel.load(span_rows(call.inputs.q, item.q, tile.head), tile.first, tile.count,
              static_cast<T>(call.scale) * factor, tiles.q, tiles.key_row);
  kernel.load(span_rows(call.k, item.k, call.key_head(tile.head)), tile.first, tile.count, T(1),
              tiles.k, tiles.key_row);
  kernel.load(span_rows(call.inputs.v, item.k, call.value_head(tile.head)), tile.first, tile.count,
              T(1), tiles.v, tiles.value_row);
  for (std::int64_t r = 0; r < tile.count; ++r) {
    tiles.max[r] =
        kernel.row_dot(tiles.q + r * tiles.key_row, tiles.k + r * tiles.key_row, tiles.key_row);
    if (call.dropout.on())
      kernel.row_scale(tiles.v + r * tiles.value_row, tiles.value_row,
                       own_key_factor<T>(call, tile.item, tile.head, tile.first + r));
  }
}

template <class T>
void merge_tile(const BandedProblem<T>& problem, const BandedForward<T>& workspace,
                const RowTile& tile, const std::uint8_t* own_key, Tiles<T>& tiles) {
  const SlotIndex& index = workspace.layout.query_slots;
  const std::int64_t first_slot = index.side().block(tile.item, tile.head).first;
  if (problem.params.include_self) own_key_parts(problem, tile, tiles);
  std::vector<Partial<T>> parts;
  for (std::int64_t r = 0; r < tile.count; ++r) {
    parts.clear();
    for (const std::int32_t slot : index.slots_of(tile.item, tile.head, tile.first + r))
      parts.push_back({workspace.slot_out + (first_slot + slot) * problem.call.Dv,
                       workspace.slot_lse[first_slot + slot]});
    if (own_key[tile.first + r] == kAddOwnKey)
      parts.push_back({tiles.v + r * tiles.value_row, tiles.max[r]});
    tiles.lse[r] = merge_row(parts, problem.call.Dv, tiles.o + r * tiles.value_row);
  }
}

}  // namespace

template <class T>
void banded_forward(const BandedProblem<T>& problem, const TensorView& out, const TensorView& lse,
                    BandedForward<T>& workspace, std::vector<Tiles<T>>& tiles) {
  const AttentionCall& call = problem.call;
  const GroupPlan<T> plan = banded_plan(problem, workspace.layout);
  groups_forward(call, plan, memory_rows(workspace.slot_out, call.Dv), workspace.slot_lse, tiles);
  const std::vector<Span> spans = query_spans(call);
  fill_padding(out, spans, 0);
  fill_padding(lse, spans, -std::numeric_limits<double>::infinity());
  for_tiles(span_tiles(spans, call.H), tiles, [&](const RowTile& tile, Tiles<T>& own) {
    const Span& span = spans[static_cast<std::size_t>(tile.item)];
    merge_tile(problem, workspace, tile, workspace.layout.own_key_at(call, span, tile.head), own);
    kernels<T>().store(span_rows(out, span, tile.head), tile.first, tile.count, T(1), own.o,
                       own.value_row);
    std::copy_n(own.lse, tile.count, span_at<T>(lse, span, tile.head) + tile.first);
  });
}

#define COTERIE_INSTANTIATE(T)                                                                \
  template GroupPlan<T> banded_plan(const BandedProblem<T>&, BandedLayout&);                  \
  template struct BandedForward<T>;                                                           \
  template void banded_forward(const BandedProblem<T>&, const TensorView&, const TensorView&, \
                               BandedForward<T>&, std::vector<Tiles<T>>&);
COTERIE_INSTANTIATE(float)
COTERIE_INSTANTIATE(double)
#undef COTERIE_INSTANTIATE

}  // namespace coterie::cpu
