// SPDX-License-Identifier: MIT
// CAST (cast.h): the forward pass, and the entry points.
#include <algorithm>

#include "core/dispatch.h"
#include "core/parallel.h"
#include "cpu/engine/tile_steps.h"
#include "cpu/mechanisms/attention.h"
#include "cpu/mechanisms/cast_backward.h"
#include "cpu/mechanisms/cast_select.h"

namespace coterie::cpu {

namespace {

template <class T>
struct CastForward : CastPass<T> {
  T* inner_out;  // (slots, Dv)

  CastForward(Arena& arena, const CastParams& cast, const AttentionCall& attention)
      : CastPass<T>(arena, cast, attention), inner_out(arena.take<T>(this->slots * attention.Dv)) {}
};

// Attention inside a cluster, one row per slot, and the cluster's summary.
template <class T>
void attend_cluster(CastForward<T>& pass, const CastSaved<T>& saved, const RowTile& task,
                    Tiles<T>& tiles) {
  const Kernels<T>& kernel = kernels<T>();
  const std::int64_t number = pass.block(task.item, task.head) * pass.clusters + task.list;
  const std::int64_t slot = number * pass.width, value_width = pass.call.Dv;
  const RowList list = pass.members(saved, task.item, task.head, task.list);
  const Segment<T> inner = pass.inner(task.item, task.head, list);
  for (std::int64_t first = 0; first < list.count; first += kQueryTile) {
    const std::int64_t count = std::min(kQueryTile, list.count - first);
    forward_tile(inner, first, count, tiles);
    kernel.store(memory_rows(pass.inner_out, value_width), slot + first, count, T(1), tiles.o,
                 tiles.value_row);
    if (saved.member_lse) std::copy_n(tiles.lse, count, saved.member_lse + slot + first);
  }
  if (saved.member_lse)
    std::fill(saved.member_lse + slot + list.count, saved.member_lse + slot + pass.width,
              kNegInf<T>);
  forward_tile(pass.outer(task.item, task.head, task.list, list), 0, 1, tiles);
  std::copy_n(tiles.o, value_width, saved.summary + number * value_width);
  if (saved.summary_lse) saved.summary_lse[number] = tiles.lse[0];
}

// Attention of tokens over clusters; the values of a token's own clusters are its inner outputs.
template <class T>
void mix_clusters(CastForward<T>& pass, const CastSaved<T>& saved, const TensorView& out,
                  const RowTile& tile, Tiles<T>& tiles) {
  const Span& span = pass.call.item(tile.item).q;
  const std::int64_t value_width = pass.call.Dv;
  TileHook<T> hook;
  hook.forward = [&](std::int64_t row, std::int64_t token, std::int64_t begin, std::int64_t count,
                     T, T* p) {
    T* sum = tiles.o + row * tiles.value_row;
    pass.for_own(tile.item, tile.head, token, {begin, begin + count},
                 [&](std::int64_t cluster, std::int64_t slot) {
                   const T weight = p[cluster - begin];
                   const T* own = pass.inner_out + slot * value_width;
                   for (std::int64_t d = 0; d < value_width; ++d) sum[d] += weight * own[d];
                   p[cluster - begin] = 0;
                 });
  };
  forward_tile(pass.mix(saved, tile.item, tile.head), tile.first, tile.count, tiles, &hook);
  kernels<T>().store(span_rows(out, span, tile.head), tile.first, tile.count, T(1), tiles.o,
                     tiles.value_row);
  if (saved.combine_lse.present())
    std::copy_n(tiles.lse, tile.count, span_at<T>(saved.combine_lse, span, tile.head) + tile.first);
}

template <class T>
void forward(CastForward<T>& pass, const CastSaved<T>& saved, const TensorView& out) {
  const AttentionCall& call = pass.call;
  pass.prepare(saved);
  parallel_for(call.num_items() * call.H * pass.clusters, [&](std::int64_t task, int worker) {
    const std::int64_t block = task / pass.clusters;
    attend_cluster(pass, saved, {block / call.H, block % call.H, task % pass.clusters, 0, 0},
                   pass.tiles(worker));
  });
  fill_padding(out, query_spans(call), 0);
  if (saved.combine_lse.present()) fill_padding(saved.combine_lse, query_spans(call), kNegInf<T>);
  const std::vector<RowTile> row_list = span_tiles(query_spans(call), call.H);
  for_tiles(row_list, pass.lists.tiles, [&](const RowTile& tile, Tiles<T>& tiles) {
    mix_clusters(pass, saved, out, tile, tiles);
  });
}

}  // namespace

template <>
std::int64_t workspace_bytes(const CastParams& params, const AttentionCall& call) {
  Arena select, attend, backward;
  dispatch_accumulator(call.inputs.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    CastSelectWorkspace<T>(select, params, call);
    CastForward<T>(attend, params, call);
    CastBackward<T>(backward, params, call);
  });
  return std::max({select.used(), attend.used(), backward.used()});
}

template <>
void select(const CastParams& params, const AttentionCall& call,
            const std::vector<TensorView>& saved, const Workspace& workspace) {
  Arena arena(call.op, workspace, workspace_bytes(params, call));
  dispatch_accumulator(call.inputs.q.dtype, [&](auto tag) {
    CastSelectWorkspace<typename decltype(tag)::type> memory(arena, params, call);
    cast_select(params, call, saved[0], memory);
  });
}

template <>
void attend(const CastParams& params, const AttentionCall& call, const AttentionResult& result,
            const Workspace& workspace) {
  Arena arena(call.op, workspace, workspace_bytes(params, call));
  dispatch_accumulator(call.inputs.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    CastForward<T> pass(arena, params, call);
    forward(pass, CastSaved<T>(params, result.saved), result.out);
  });
}

template <>
void backward(const CastParams& params, const AttentionCall& call, const AttentionResult& result,
              const TensorView& grad_out, const AttentionGradients& gradients,
              const Workspace& workspace) {
  Arena arena(call.op, workspace, workspace_bytes(params, call));
  dispatch_accumulator(call.inputs.q.dtype, [&](auto tag) {
    CastBackward<typename decltype(tag)::type>(arena, params, call)
        .run(result, grad_out, gradients);
  });
}

}  // namespace coterie::cpu
