// SPDX-License-Identifier: MIT
// LSH attention (Reformer, Kitaev et al. 2020, and the plain-mean baseline of Vyas et al. 2020):
// keys are the unit queries, and each round attends along a band of its own sorted order. With
// combine=lse the rounds form one softmax, their outputs merged by log-sum-exps; with combine=mean
// each round is a separate softmax with weight 1/R.
#include <algorithm>
#include <cmath>

#include "core/dispatch.h"
#include "cpu/engine/tile_steps.h"
#include "cpu/mechanisms/attention.h"
#include "cpu/mechanisms/lsh_pass.h"

namespace coterie::cpu {

namespace {

template <class T>
struct LshForward : LshPass<T> {
  TokenSums<T> out;

  LshForward(Arena& arena, const LshParams& lsh, const AttentionCall& attention)
      : LshPass<T>(arena, lsh, attention), out(arena, attention, attention.H, attention.Dv) {}
};

// Merges a part's output row into the sum so far, which becomes the attention over both key sets.
template <class T>
void merge_part(T part_lse, const T* part, T& lse, T* sum, std::int64_t width) {
  if (part_lse == kNegInf<T>) return;
  const T high = std::max(lse, part_lse);
  const T total = high + std::log(std::exp(lse - high) + std::exp(part_lse - high));
  kernels<T>().row_scale(sum, width, std::exp(lse - total));
  kernels<T>().row_add(sum, part, width, std::exp(part_lse - total));
  lse = total;
}

template <class T>
void forward_part(LshForward<T>& pass, std::int64_t round, const ListCall<T>& plan,
                  const TensorView& lse) {
  const AttentionCall& call = pass.call;
  const auto count = [&](std::int64_t item, std::int64_t head) {
    return plan.pair(item, head, 0).queries.count;
  };
  pass.for_lists(call.H, kQueryTile, count, [&](const RowTile& tile, Tiles<T>& tiles) {
    const ListPair<T> pair = plan.pair(tile.item, tile.head, 0);
    forward_tile(make_segment(call, plan, tile.item, tile.head, pair), tile.first, tile.count,
                 tiles);
    const Span& span = call.item(tile.item).q;
    T* lse_rows = pass.lse_at(lse, span, tile.head, round);
    if (!pass.merges()) pass.out.add(span, tile.head, pair.queries, tile, tiles.o);
    for (std::int64_t r = 0; r < tile.count; ++r) {
      const std::int64_t token = pair.queries.row(tile.first + r);
      if (pass.merges())
        merge_part(tiles.lse[r], tiles.o + r * tiles.value_row, lse_rows[token],
                   pass.out.at(span, tile.head, token), tiles.value_row);
      else
        lse_rows[token] = tiles.lse[r];
    }
  });
}

template <class T>
void forward(LshForward<T>& pass, const AttentionResult& result) {
  const TensorView &order = result.saved[0], &lse = result.saved[1];
  pass.prepare(order);
  pass.out.clear();
  std::fill_n(static_cast<T*>(lse.data), lse.count(), kNegInf<T>);
  pass.for_parts(order, [&](std::int64_t round, const ListCall<T>& plan) {
    forward_part(pass, round, plan, lse);
  });
  pass.out.store(pass.call, pass.round_weight(), result.out);
}

}  // namespace

template <>
std::int64_t workspace_bytes(const LshParams& params, const AttentionCall& call) {
  Arena select, attend, backward;
  dispatch_accumulator(call.inputs.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    LshSelectWorkspace<T>(select, params, call);
    LshForward<T>(attend, params, call);
    LshBackward<T>(backward, params, call);
  });
  return std::max({select.used(), attend.used(), backward.used()});
}

template <>
void select(const LshParams& params, const AttentionCall& call,
            const std::vector<TensorView>& saved, const Workspace& workspace) {
  Arena arena(call.op, workspace, workspace_bytes(params, call));
  dispatch_accumulator(call.inputs.q.dtype, [&](auto tag) {
    LshSelectWorkspace<typename decltype(tag)::type> memory(arena, params, call);
    lsh_select(params, call, saved[0], memory);
  });
}

template <>
void attend(const LshParams& params, const AttentionCall& call, const AttentionResult& result,
            const Workspace& workspace) {
  Arena arena(call.op, workspace, workspace_bytes(params, call));
  dispatch_accumulator(call.inputs.q.dtype, [&](auto tag) {
    LshForward<typename decltype(tag)::type> pass(arena, params, call);
    forward(pass, result);
  });
}

template <>
void backward(const LshParams& params, const AttentionCall& call, const AttentionResult& result,
              const TensorView& grad_out, const AttentionGradients& gradients,
              const Workspace& workspace) {
  Arena arena(call.op, workspace, workspace_bytes(params, call));
  dispatch_accumulator(call.inputs.q.dtype, [&](auto tag) {
    LshBackward<typename decltype(tag)::type>(arena, params, call).run(result, grad_out, gradients);
  });
}

}  // namespace coterie::cpu
