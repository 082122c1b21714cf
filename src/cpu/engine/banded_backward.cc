// SPDX-License-Identifier: MIT
#include <algorithm>
#include <cmath>

#include "core/parallel.h"
#include "cpu/engine/banded.h"
#include "cpu/engine/delta.h"
#include "cpu/engine/tile_steps.h"

namespace coterie::cpu {

template <class T>
BandedBackward<T>::BandedBackward(Arena& arena, const BandedParams& params,
                                  const AttentionCall& call)
    : layout(arena, params, call),
      key_slots(arena, call.B * call.key_heads * call.S, call.key_heads, call.B * call.S,
                call.num_items()),
      delta(arena.take<T>(call.B * call.H * call.N)),
      own_weight(params.include_self ? arena.take<T>(call.B * call.H * call.N) : nullptr),
      own_dlogit(params.include_self ? arena.take<T>(call.B * call.H * call.N) : nullptr),
      dq(arena.take<T>(call.B * call.H * call.N * params.clusters_per_query * call.Dk)),
      dk(arena.take<T>(call.B * call.key_heads * call.S * call.Dk)),
      dv(arena.take<T>(call.B * call.key_heads * call.S * call.Dv)) {}

namespace {

// Values of one (item, head) in a (B, H, N) array.
template <class T>
T* rows_at(T* values, const AttentionCall& call, const Span& span, std::int64_t head) {
  return values + (span.batch * call.H + head) * call.N + span.begin;
}

// delta = gradient . output.
template <class T>
void delta_rows(const AttentionCall& call, const BandedResult& result, T* delta,
                std::vector<Tiles<T>>& tiles) {
  const Kernels<T>& kernel = kernels<T>();
  const std::vector<Span> spans = query_spans(call);
  for_tiles(span_tiles(spans, call.H), tiles, [&](const RowTile& tile, Tiles<T>& own) {
    const Span& span = spans[static_cast<std::size_t>(tile.item)];
    kernel.load(span_rows(result.grad_out, span, tile.head), tile.first, tile.count, T(1), own.g,
                own.value_row);
    delta_of_outputs(span_rows(result.out, span, tile.head), tile.first, tile.count, own);
    std::copy_n(own.delta, tile.count, rows_at(delta, call, span, tile.head) + tile.first);
  });
}

// The same as a sum over a query's clusters; the part of an added own key follows later. Outputs
// rounded to 16 bits would be too inaccurate for small gradients.
template <class T>
void delta_parts(const AttentionCall& call, const SlotIndex& slots, const T* parts, T* delta) {
  parallel_for(call.num_items() * call.H, [&](std::int64_t problem, int) {
    const std::int64_t item = problem / call.H, head = problem % call.H;
    const Span& span = call.item(item).q;
    const T* part = parts + slots.side().block(item, head).first;
    T* sums = rows_at(delta, call, span, head);
    for (std::int64_t i = 0; i < span.length; ++i) {
      sums[i] = 0;
      for (const std::int32_t slot : slots.slots_of(item, head, i)) sums[i] += part[slot];
    }
  });
}

// For added own keys: the weight of the value, and the gradient of the logit times the scale.
// Unless `complete`, the own key's part is added to delta.
template <class T>
void own_key_gradients(const BandedProblem<T>& problem, const BandedResult& result, bool complete,
                       BandedBackward<T>& workspace, std::vector<Tiles<T>>& tiles) {
  const AttentionCall& call = problem.call;
  const Kernels<T>& kernel = kernels<T>();
  for_tiles(span_tiles(query_spans(call), call.H), tiles, [&](const RowTile& tile, Tiles<T>& own) {
    const Item& item = call.items[static_cast<std::size_t>(tile.item)];
    const T scale =
        static_cast<T>(call.scale) * (problem.head_scale ? problem.head_scale[tile.head] : T(1));
    kernel.load(span_rows(call.inputs.q, item.q, tile.head), tile.first, tile.count, scale, own.q,
                own.key_row);
    kernel.load(span_rows(call.k, item.k, call.key_head(tile.head)), tile.first, tile.count, T(1),
                own.k, own.key_row);
    kernel.load(span_rows(result.grad_out, item.q, tile.head), tile.first, tile.count, T(1), own.g,
                own.value_row);
    kernel.load(span_rows(call.inputs.v, item.k, call.value_head(tile.head)), tile.first,
                tile.count, T(1), own.v, own.value_row);
    const std::uint8_t* own_key = workspace.layout.own_key_at(call, item.q, tile.head);
    const T* lse = span_at<const T>(result.lse, item.q, tile.head);
    T* delta = rows_at(workspace.delta, call, item.q, tile.head);
    T* weight = rows_at(workspace.own_weight, call, item.q, tile.head);
    T* dlogit = rows_at(workspace.own_dlogit, call, item.q, tile.head);
    for (std::int64_t r = 0; r < tile.count; ++r) {
      const std::int64_t i = tile.first + r;
      weight[i] = dlogit[i] = 0;
      if (own_key[i] != kAddOwnKey) continue;
      const T logit = kernel.row_dot(own.q + r * own.key_row, own.k + r * own.key_row, own.key_row);
      const T factor = own_key_factor<T>(call, tile.item, tile.head, i);
      const T dp = factor * kernel.row_dot(own.g + r * own.value_row, own.v + r * own.value_row,
                                           own.value_row);
      const T p = std::exp(logit - lse[i]);
      if (!complete) delta[i] += p * dp;
      dlogit[i] = scale * p * (dp - delta[i]);
      weight[i] = factor * p;
    }
  });
}

// Adds factor[token] times the rows of (item, head) of a tensor to the sums.
template <class T>
void add_own_rows(const TensorView& tensor, const Span& span, std::int64_t head, const T* factor,
                  const RowTile& tile, T* sums, std::int64_t sums_row) {
  std::vector<T> row(static_cast<std::size_t>(sums_row));
  const Rows rows = span_rows(tensor, span, head);
  for (std::int64_t r = 0; r < tile.count; ++r) {
    if (factor[tile.first + r] == T(0)) continue;
    kernels<T>().load(rows, tile.first + r, 1, T(1), row.data(), sums_row);
    kernels<T>().row_add(sums + r * sums_row, row.data(), sums_row, factor[tile.first + r]);
  }
}

// Adds the slots, then factor times the rows of `tensor` of every query head that shares the row's
// head.
template <class T>
RowSums<T> sums_with_own_keys(const BandedProblem<T>& problem, const SlotRows<T>& slots,
                              const TensorView& tensor, T* factor) {
  if (!factor) return slot_sums(slots);
  const AttentionCall& call = problem.call;
  return [&call, slots, tensor, factor](const RowTile& tile, T* sums, std::int64_t sums_row) {
    add_slots(slots, tile, sums, sums_row);
    const Item& item = call.items[static_cast<std::size_t>(tile.item)];
    const std::int64_t sharing = call.H / slots.heads;
    for (std::int64_t head = tile.head * sharing; head < (tile.head + 1) * sharing; ++head)
      add_own_rows(tensor, item.q, head / (call.H / tensor.size(1)),
                   rows_at(factor, call, item.q, head), tile, sums, sums_row);
  };
}

}  // namespace

template <class T>
GradientSums<T> banded_backward(const BandedProblem<T>& problem, const BandedResult& result,
                                const WantedGradients& wanted, BandedBackward<T>& workspace,
                                std::vector<Tiles<T>>& tiles) {
  const AttentionCall& call = problem.call;
  const GroupPlan<T> plan = banded_plan(problem, workspace.layout);
  workspace.key_slots.build(plan.keys, key_spans(call));
  const GroupRows<T> rows = [&](std::int64_t number, std::int64_t head, const SlotGroup<T>& group) {
    const Span& span = call.items[static_cast<std::size_t>(number)].q;
    const std::int32_t* tokens = plan.queries.block(number, head).tokens + group.queries.begin;
    RowGradients<T> row;
    row.gradient = list_rows(result.grad_out, span, head, {0, tokens});
    row.lse = span_at<const T>(result.lse, span, head);
    row.delta = rows_at(workspace.delta, call, span, head);
    row.index = tokens;
    return row;
  };
  const bool complete = dtype_bytes(result.out.dtype) > 2;
  if (complete) {
    delta_rows(call, result, workspace.delta, tiles);
  } else {
    T* parts = workspace.dq;  // not in use yet
    groups_partial_delta(call, plan, rows, parts, tiles);
    delta_parts(call, workspace.layout.query_slots, parts, workspace.delta);
  }
  if (problem.params.include_self) own_key_gradients(problem, result, complete, workspace, tiles);
  groups_backward(call, plan, rows,
                  {wanted.dq ? workspace.dq : nullptr, wanted.dk ? workspace.dk : nullptr,
                   wanted.dv ? workspace.dv : nullptr},
                  tiles);
  const SlotIndex *queries = &workspace.layout.query_slots, *keys = &workspace.key_slots;
  return {sums_with_own_keys<T>(problem, {queries, workspace.dq, call.Dk, call.H}, call.k,
                                workspace.own_dlogit),
          sums_with_own_keys<T>(problem, {keys, workspace.dk, call.Dk, call.key_heads},
                                call.inputs.q, workspace.own_dlogit),
          sums_with_own_keys<T>(problem, {keys, workspace.dv, call.Dv, call.value_heads},
                                result.grad_out, workspace.own_weight)};
}

#define COTERIE_INSTANTIATE(T)                                                           \
  template struct BandedBackward<T>;                                                     \
  template GradientSums<T> banded_backward(const BandedProblem<T>&, const BandedResult&, \
                                           const WantedGradients&, BandedBackward<T>&,   \
                                           std::vector<Tiles<T>>&);
COTERIE_INSTANTIATE(float)
COTERIE_INSTANTIATE(double)
#undef COTERIE_INSTANTIATE

}  // namespace coterie::cpu
