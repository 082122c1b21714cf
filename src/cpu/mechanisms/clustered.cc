// SPDX-License-Identifier: MIT
// Clustered attention: all queries of a cluster get the attention output of their mean.
#include <algorithm>

#include "core/dispatch.h"
#include "cpu/cluster/clustering.h"
#include "cpu/mechanisms/attention.h"
#include "cpu/mechanisms/centroid_attention.h"
#include "cpu/mechanisms/near.h"

namespace coterie::cpu {

namespace {

// Positions in `saved`; with near keys there is no `out`, and `lse` belongs to the queries.
struct ClusteredAt {
  enum { labels, order, offsets, centroids, lse, out };
};

NearTensors near_of(const std::vector<TensorView>& saved) {
  NearTensors tensors;
  tensors.lists.order = saved[ClusteredAt::order];
  tensors.lists.offsets = saved[ClusteredAt::offsets];
  tensors.labels = saved[ClusteredAt::labels];
  tensors.centroids = saved[ClusteredAt::centroids];
  tensors.lse = saved[ClusteredAt::lse];
  return tensors;
}

CentroidTensors centroids_of(const std::vector<TensorView>& saved) {
  CentroidTensors tensors;
  tensors.lists.order = saved[ClusteredAt::order];
  tensors.lists.offsets = saved[ClusteredAt::offsets];
  tensors.centroids = saved[ClusteredAt::centroids];
  tensors.lse = saved[ClusteredAt::lse];
  tensors.out = saved[ClusteredAt::out];
  return tensors;
}

template <class T>
struct ClusteredWorkspace {
  ClusteringWorkspace<T> clustering;
  std::vector<Tiles<T>> tiles;
  CentroidGradients<T> gradients;

  ClusteredWorkspace(Arena& arena, const ClusteredParams& params, const AttentionCall& call)
      : clustering(arena, params.clustering, call),
        tiles(make_tiles<T>(arena, call.Dk, call.Dv)),
        gradients(arena, call, params.clustering.clusters) {}
};

// Copies row labels[i] of `from`, (items, H, C, width) in memory, to row i of `to` (B, H, N, D).
template <class T>
void broadcast_rows(const AttentionCall& call, const TensorView& labels, std::int64_t clusters,
                    T* from, std::int64_t width, const TensorView& to,
                    std::vector<Tiles<T>>& tiles) {
  fill_padding(to, query_spans(call), 0);
  for_tiles(span_tiles(query_spans(call), call.H), tiles, [&](const RowTile& tile, Tiles<T>& own) {
    const Span& span = call.item(tile.item).q;
    T* scratch = width == call.Dv ? own.o : own.dq;
    Rows rows = memory_rows(from + (tile.item * call.H + tile.head) * clusters * width, width);
    rows.index = span_at<std::int32_t>(labels, span, tile.head);
    kernels<T>().load(rows, tile.first, tile.count, T(1), scratch, padded(width));
    kernels<T>().store(span_rows(to, span, tile.head), tile.first, tile.count, T(1), scratch,
                       padded(width));
  });
}

}  // namespace

template <>
std::int64_t workspace_bytes(const ClusteredParams& params, const AttentionCall& call) {
  Arena arena, near;
  dispatch_accumulator(call.inputs.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    ClusteredWorkspace<T>(arena, params, call);
    if (params.near > 0) NearWorkspace<T>(near, call, {params.near, params.clustering.clusters});
  });
  return std::max(arena.used(), near.used());
}

template <>
void select(const ClusteredParams& params, const AttentionCall& call,
            const std::vector<TensorView>& saved, const Workspace& workspace) {
  Arena arena(call.op, workspace, workspace_bytes(params, call));
  dispatch_accumulator(call.inputs.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    ClusteredWorkspace<T> ws(arena, params, call);
    cluster_queries(params.clustering, call, saved[ClusteredAt::labels], ws.clustering);
  });
  ClusterLists lists;
  lists.order = saved[ClusteredAt::order];
  lists.offsets = saved[ClusteredAt::offsets];
  group_queries(call, saved[ClusteredAt::labels], lists);
}

template <>
void attend(const ClusteredParams& params, const AttentionCall& call, const AttentionResult& result,
            const Workspace& workspace) {
  Arena arena(call.op, workspace, workspace_bytes(params, call));
  if (params.near > 0)
    return dispatch_accumulator(call.inputs.q.dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      NearWorkspace<T> ws(arena, call, {params.near, params.clustering.clusters});
      near_forward(call, params.near, near_of(result.saved), result.out, ws);
    });
  const CentroidTensors tensors = centroids_of(result.saved);
  dispatch_accumulator(call.inputs.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    ClusteredWorkspace<T> ws(arena, params, call);
    cluster_means(call, tensors.lists, tensors.centroids, ws.tiles);
    centroid_forward(call, tensors, ws.tiles);
    broadcast_rows(call, result.saved[ClusteredAt::labels], tensors.clusters(),
                   static_cast<T*>(tensors.out.data), call.Dv, result.out, ws.tiles);
  });
}

template <>
void backward(const ClusteredParams& params, const AttentionCall& call,
              const AttentionResult& result, const TensorView& grad_out,
              const AttentionGradients& gradients, const Workspace& workspace) {
  Arena arena(call.op, workspace, workspace_bytes(params, call));
  if (params.near > 0)
    return dispatch_accumulator(call.inputs.q.dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      NearWorkspace<T> ws(arena, call, {params.near, params.clustering.clusters});
      near_backward<T>(call, params.near, near_of(result.saved),
                       {result.out, result.saved[ClusteredAt::lse], grad_out, gradients.dq,
                        gradients.dk, gradients.dv},
                       ws);
    });
  const CentroidTensors tensors = centroids_of(result.saved);
  dispatch_accumulator(call.inputs.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    ClusteredWorkspace<T> ws(arena, params, call);
    centroid_output_gradients(call, tensors, grad_out, ws.gradients, ws.tiles);
    const bool means = gradients.dq.present();
    if (gradients.dk.present() || gradients.dv.present())
      centroid_backward_keys<T>(call, tensors, ws.gradients, nullptr, means, gradients.dk,
                                gradients.dv, ws.tiles);
    else if (means)
      centroid_backward_means(call, tensors, ws.gradients, ws.tiles);
    if (means)
      broadcast_rows(call, result.saved[ClusteredAt::labels], tensors.clusters(),
                     ws.gradients.dmean, call.Dk, gradients.dq, ws.tiles);
  });
}

}  // namespace coterie::cpu
