// SPDX-License-Identifier: MIT
// Mechanisms whose keys depend only on positions: full, local, strided; and oracle-top, which keeps
// the best of all keys.
#include <algorithm>
#include <limits>

#include "core/dispatch.h"
#include "core/parallel.h"
#include "cpu/engine/partition.h"
#include "cpu/engine/top.h"
#include "cpu/mechanisms/attention.h"

namespace coterie::cpu {

namespace {

std::int64_t floor_div(std::int64_t a, std::int64_t b) { return (a >= 0 ? a : a - b + 1) / b; }

// A rule from a function rank -> Range whose limits never decrease.
template <class T, class RangeOf>
Rule<T> ascending_rule(std::int64_t num_queries, std::int64_t num_keys, RangeOf range_of) {
  const auto clipped = [=](std::int64_t t) {
    Range range = range_of(t);
    range.begin = std::clamp<std::int64_t>(range.begin, 0, num_keys);
    range.end = std::clamp<std::int64_t>(range.end, range.begin, num_keys);
    return range;
  };
  Rule<T> rule;
  rule.ranges = [=](std::int64_t first, std::int64_t count, Range* ranges) {
    for (std::int64_t r = 0; r < count; ++r) ranges[r] = clipped(first + r);
  };
  rule.queries = [=](std::int64_t begin, std::int64_t end) {
    // First rank for which `past` holds, by bisection.
    const auto first_rank = [&](auto past) {
      std::int64_t low = 0, high = num_queries;
      while (low < high) {
        const std::int64_t middle = (low + high) / 2;
        if (past(range_of(middle)))
          high = middle;
        else
          low = middle + 1;
      }
      return low;
    };
    return Range{first_rank([&](const Range& range) { return range.end > begin; }),
                 first_rank([&](const Range& range) { return range.begin >= end; })};
  };
  return rule;
}

template <class T>
ListPair<T> make_pair(const FullParams&, const AttentionCall& call, const Item& item,
                      std::int64_t) {
  const std::int64_t offset = call.position_offset(item), keys = item.k.length;
  const bool causal = call.causal;
  return {{item.q.length}, {keys}, ascending_rule<T>(item.q.length, keys, [=](std::int64_t i) {
            return Range{0, causal ? i + offset + 1 : keys};
          })};
}

template <class T>
ListPair<T> make_pair(const OracleTopParams&, const AttentionCall& call, const Item& item,
                      std::int64_t list) {
  return make_pair<T>(FullParams{}, call, item, list);
}

template <class T>
ListPair<T> make_pair(const LocalParams& params, const AttentionCall& call, const Item& item,
                      std::int64_t) {
  const std::int64_t offset = call.position_offset(item), longest = call.N + call.S;
  const std::int64_t window = std::min(params.window, 2 * longest);
  const std::int64_t flange = std::min(params.flange, longest);
  const bool causal = call.causal;
  const auto sliding = [=](std::int64_t i) {
    if (causal) return Range{i + offset - window + 1, i + offset + 1};
    return Range{i - window / 2, i + (window + 1) / 2};
  };
  const auto blocked = [=](std::int64_t i) {
    const std::int64_t block = floor_div(i + offset, window);
    return Range{(block - flange) * window,
                 causal ? i + offset + 1 : (block + flange + 1) * window};
  };
  return {{item.q.length},
          {item.k.length},
          params.kind == LocalKind::sliding
              ? ascending_rule<T>(item.q.length, item.k.length, sliding)
              : ascending_rule<T>(item.q.length, item.k.length, blocked)};
}

// No two positions are more than N + S apart, so a larger stride changes nothing.
std::int64_t effective_stride(const StridedParams& params, const AttentionCall& call) {
  return std::min(params.stride, call.N + call.S);
}

// List r contains the keys and the query positions congruent to r.
template <class T>
ListPair<T> make_pair(const StridedParams& params, const AttentionCall& call, const Item& item,
                      std::int64_t residue) {
  const std::int64_t stride = effective_stride(params, call), offset = call.position_offset(item);
  const auto members = [&](std::int64_t first, std::int64_t length) {
    return first < length ? (length - first + stride - 1) / stride : 0;
  };
  const std::int64_t first = residue - offset - floor_div(residue - offset, stride) * stride;
  const std::int64_t rank = (first + offset - residue) / stride;  // of query 0 among the keys
  RowList queries{members(first, item.q.length), nullptr, first, stride};
  RowList keys{members(residue, item.k.length), nullptr, residue, stride};
  const bool causal = call.causal;
  const std::int64_t num_keys = keys.count;
  return {queries, keys, ascending_rule<T>(queries.count, num_keys, [=](std::int64_t t) {
            return Range{0, causal ? rank + t + 1 : num_keys};
          })};
}

std::int64_t num_lists(const StridedParams& params, const AttentionCall& call) {
  return effective_stride(params, call);
}
template <class Params>
std::int64_t num_lists(const Params&, const AttentionCall&) {
  return 1;
}

// Applies AttentionInputs::mask, if given, on top of the rule.
template <class T>
void apply_mask(const AttentionCall& call, const Item& item, std::int64_t head, ListPair<T>& pair) {
  const TensorView& mask = call.inputs.mask;
  if (!mask.present()) return;
  const std::uint8_t* base = static_cast<const std::uint8_t*>(mask.data) +
                             item.q.batch * mask.stride(0) + head * mask.stride(1) +
                             item.q.begin * mask.stride(2) + item.k.begin * mask.stride(3);
  const RowList queries = pair.queries, keys = pair.keys;
  const std::int64_t row = mask.stride(2), column = mask.stride(3);
  pair.rule.filter = [=](std::int64_t query, std::int64_t begin, std::int64_t count, T* scores) {
    const std::uint8_t* allowed = base + queries.row(query) * row;
    for (std::int64_t t = 0; t < count; ++t)
      if (!allowed[keys.row(begin + t) * column]) scores[t] = -std::numeric_limits<T>::infinity();
  };
}

template <class T, class Params>
ListCall<T> make_plan(const Params& params, const AttentionCall& call) {
  ListCall<T> plan;
  plan.lists = num_lists(params, call);
  plan.scale = static_cast<T>(call.scale);
  plan.pair = [&](std::int64_t number, std::int64_t head, std::int64_t list) {
    const Item& item = call.item(number);
    ListPair<T> pair = make_pair<T>(params, call, item, list);
    apply_mask(call, item, head, pair);
    return pair;
  };
  return plan;
}

// Oracle-top attends over all keys, with those outside the query's list masked.
template <class T>
ListCall<T> make_listed_plan(const OracleTopParams& params, const AttentionCall& call,
                             const TensorView& top_keys) {
  ListCall<T> plan = make_plan<T>(params, call);
  const std::int64_t width = top_keys.size(3);
  const auto positional = plan.pair;
  plan.pair = [&call, top_keys, width, positional](std::int64_t number, std::int64_t head,
                                                   std::int64_t list) {
    ListPair<T> pair = positional(number, head, list);
    const Item& item = call.item(number);
    const std::int32_t* lists =
        block_at<std::int32_t>(top_keys, item.q.batch, head) + item.q.begin * width;
    pair.rule.filter = [=](std::int64_t query, std::int64_t begin, std::int64_t count, T* scores) {
      const std::int32_t* row = lists + query * width;
      const std::int32_t* end = std::find(row, row + width, -1);
      const std::int32_t* next = std::lower_bound(row, end, begin);
      for (std::int64_t t = 0; t < count; ++t) {
        if (next != end && *next == begin + t)
          ++next;
        else
          scores[t] = -std::numeric_limits<T>::infinity();
      }
    };
    return pair;
  };
  return plan;
}

template <class T>
struct OracleWorkspace {
  ListWorkspace<T> lists;
  std::vector<TopBuffer<T>> top;

  OracleWorkspace(Arena& arena, const OracleTopParams& params, const AttentionCall& call)
      : lists(arena, call), top(make_top_buffers<T>(arena, std::min(params.topk, call.S))) {}
};

template <class T>
void select_top_keys(const OracleTopParams& params, const AttentionCall& call,
                     const TensorView& top_keys, OracleWorkspace<T>& workspace) {
  const ListCall<T> plan = make_plan<T>(params, call);
  fill_padding(top_keys, query_spans(call), -1);
  const std::int64_t tiles_per_head = (call.N + kQueryTile - 1) / kQueryTile;
  parallel_for(call.num_items() * call.H * tiles_per_head, [&](std::int64_t task, int worker) {
    const std::int64_t first = task % tiles_per_head * kQueryTile;
    const std::int64_t head = task / tiles_per_head % call.H;
    const std::int64_t number = task / tiles_per_head / call.H;
    const Item& item = call.item(number);
    if (first >= item.q.length) return;
    std::int32_t* rows = block_at<std::int32_t>(top_keys, item.q.batch, head) +
                         (item.q.begin + first) * top_keys.size(3);
    select_tile(make_segment(call, plan, number, head, plan.pair(number, head, 0)), first,
                std::min(kQueryTile, item.q.length - first),
                workspace.lists.tiles[static_cast<std::size_t>(worker)],
                workspace.top[static_cast<std::size_t>(worker)], rows);
  });
}

ListGradients list_gradients(const AttentionResult& result, const TensorView& lse,
                             const TensorView& grad_out, const AttentionGradients& gradients) {
  return {result.out, lse, grad_out, gradients.dq, gradients.dk, gradients.dv};
}

}  // namespace

template <class Params>
std::int64_t workspace_bytes(const Params&, const AttentionCall& call) {
  Arena arena;
  dispatch_accumulator(call.inputs.q.dtype,
                       [&](auto tag) { ListWorkspace<typename decltype(tag)::type>(arena, call); });
  return arena.used();
}

template <class Params>
void select(const Params&, const AttentionCall&, const std::vector<TensorView>&, const Workspace&) {
}

template <class Params>
void attend(const Params& params, const AttentionCall& call, const AttentionResult& result,
            const Workspace& workspace) {
  Arena arena(call.op, workspace, workspace_bytes(params, call));
  dispatch_accumulator(call.inputs.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    ListWorkspace<T> lists(arena, call);
    lists_forward(call, make_plan<T>(params, call), result.out, result.saved[0], lists);
  });
}

template <class Params>
void backward(const Params& params, const AttentionCall& call, const AttentionResult& result,
              const TensorView& grad_out, const AttentionGradients& gradients,
              const Workspace& workspace) {
  Arena arena(call.op, workspace, workspace_bytes(params, call));
  dispatch_accumulator(call.inputs.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    ListWorkspace<T> lists(arena, call);
    lists_backward(call, make_plan<T>(params, call),
                   list_gradients(result, result.saved[0], grad_out, gradients), lists);
  });
}

template <>
std::int64_t workspace_bytes(const OracleTopParams& params, const AttentionCall& call) {
  Arena arena;
  dispatch_accumulator(call.inputs.q.dtype, [&](auto tag) {
    OracleWorkspace<typename decltype(tag)::type>(arena, params, call);
  });
  return arena.used();
}

template <>
void select(const OracleTopParams& params, const AttentionCall& call,
            const std::vector<TensorView>& saved, const Workspace& workspace) {
  Arena arena(call.op, workspace, workspace_bytes(params, call));
  dispatch_accumulator(call.inputs.q.dtype, [&](auto tag) {
    OracleWorkspace<typename decltype(tag)::type> oracle(arena, params, call);
    select_top_keys(params, call, saved[0], oracle);
  });
}

template <>
void attend(const OracleTopParams& params, const AttentionCall& call, const AttentionResult& result,
            const Workspace& workspace) {
  Arena arena(call.op, workspace, workspace_bytes(params, call));
  dispatch_accumulator(call.inputs.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    ListWorkspace<T> lists(arena, call);
    lists_forward(call, make_listed_plan<T>(params, call, result.saved[0]), result.out,
                  result.saved[1], lists);
  });
}

template <>
void backward(const OracleTopParams& params, const AttentionCall& call,
              const AttentionResult& result, const TensorView& grad_out,
              const AttentionGradients& gradients, const Workspace& workspace) {
  Arena arena(call.op, workspace, workspace_bytes(params, call));
  dispatch_accumulator(call.inputs.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    ListWorkspace<T> lists(arena, call);
    lists_backward(call, make_listed_plan<T>(params, call, result.saved[0]),
                   list_gradients(result, result.saved[1], grad_out, gradients), lists);
  });
}

#define COTERIE_INSTANTIATE(Params)                                                         \
  template std::int64_t workspace_bytes(const Params&, const AttentionCall&);               \
  template void select(const Params&, const AttentionCall&, const std::vector<TensorView>&, \
                       const Workspace&);                                                   \
  template void attend(const Params&, const AttentionCall&, const AttentionResult&,         \
                       const Workspace&);                                                   \
  template void backward(const Params&, const AttentionCall&, const AttentionResult&,       \
                         const TensorView&, const AttentionGradients&, const Workspace&);
COTERIE_INSTANTIATE(FullParams)
COTERIE_INSTANTIATE(LocalParams)
COTERIE_INSTANTIATE(StridedParams)
#undef COTERIE_INSTANTIATE

}  // namespace coterie::cpu
