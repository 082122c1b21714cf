// SPDX-License-Identifier: MIT
// Improved clustered attention: every member of a cluster attends exactly to the cluster's top
// keys, scaled to the mass that the cluster's mean gives them; all other keys are handled as in
// clustered attention. The leaking causal form keeps only the top keys.
#include <algorithm>

#include "core/dispatch.h"
#include "core/parallel.h"
#include "cpu/cluster/clustering.h"
#include "cpu/engine/top.h"
#include "cpu/mechanisms/attention.h"
#include "cpu/mechanisms/centroid_attention.h"
#include "cpu/mechanisms/near.h"

namespace coterie::cpu {

namespace {

// Positions in `saved`; the leaking form has only kLeakingLse after the selection, the one with
// near keys only kCentroids and kNearLse.
enum {
  kLabels,
  kOrder,
  kOffsets,
  kTopKeys,
  kCentroids,
  kCentroidLse,
  kMass,
  kBottom,
  kLse,
  kLeakingLse = kTopKeys + 1,
  kNearLse = kCentroids + 1
};

bool leaking(const ImprovedClusteredParams& params) { return params.causal == Causality::leaking; }

ClusterLists cluster_lists(const std::vector<TensorView>& saved) {
  return {saved[kOrder], saved[kOffsets], saved[kTopKeys]};
}

CentroidTensors centroid_tensors(const std::vector<TensorView>& saved) {
  return {cluster_lists(saved), saved[kCentroids], saved[kCentroidLse], saved[kBottom],
          saved[kMass]};
}

NearTensors near_tensors(const std::vector<TensorView>& saved) {
  return {cluster_lists(saved), saved[kLabels], saved[kCentroids], saved[kNearLse]};
}

NearSizes near_sizes(const ImprovedClusteredParams& params, const AttentionCall& call) {
  return {params.near, params.clustering.clusters, std::min(params.topk, call.S)};
}

template <class T>
struct ImprovedWorkspace {
  ClusteringWorkspace<T> clustering;
  ListWorkspace<T> lists;
  std::vector<TopBuffer<T>> top;
  T* centroids = nullptr;                 // (items, H, C, Dk), for the selection
  T *weight = nullptr, *inner = nullptr;  // (B, H, N): mass of the query's cluster; gradient . u
  CentroidGradients<T> gradients;
  KeySlots<T> slots;

  ImprovedWorkspace(Arena& arena, const ImprovedClusteredParams& params, const AttentionCall& call)
      : clustering(arena, params.clustering, call),
        lists(arena, call),
        top(make_top_buffers<T>(arena, std::min(params.topk, call.S))),
        centroids(arena.take<T>(call.num_items() * call.H * params.clustering.clusters * call.Dk)),
        weight(arena.take<T>(call.B * call.H * call.N)),
        inner(arena.take<T>(call.B * call.H * call.N)),
        gradients(arena, call, params.clustering.clusters),
        slots(arena, call, params.clustering.clusters, std::min(params.topk, call.S)) {}
};

template <class T>
void select_top_keys(const AttentionCall& call, const ClusterLists& lists,
                     ImprovedWorkspace<T>& ws) {
  const TensorView centroids =
      TensorView::contiguous(ws.centroids, accumulator_dtype(call.inputs.q.dtype),
                             {call.num_items(), call.H, lists.clusters(), call.Dk});
  cluster_means(call, lists, centroids, ws.lists.tiles);
  for_tiles(centroid_tiles(call, lists.clusters()), [&](const RowTile& tile, int worker) {
    std::int32_t* rows = block_at<std::int32_t>(lists.keys, tile.item, tile.head);
    select_tile(centroid_segment<T>(call, lists, centroids, tile.item, tile.head), tile.first,
                tile.count, ws.lists.tiles[static_cast<std::size_t>(worker)],
                ws.top[static_cast<std::size_t>(worker)], rows + tile.first * lists.width());
  });
}

// out = mass * (attention over the top keys) + bottom.
template <class T>
void add_bottom(const AttentionCall& call, const CentroidTensors& tensors, ListCall<T>& plan) {
  plan.finish = [&call, &tensors](const RowTile& tile, Tiles<T>& tiles) {
    const Kernels<T>& kernel = kernels<T>();
    const T mass = block_at<T>(tensors.mass, tile.item, tile.head)[tile.list];
    const T* bottom = block_at<T>(tensors.out, tile.item, tile.head) + tile.list * call.Dv;
    for (std::int64_t r = 0; r < tile.count; ++r) {
      kernel.row_scale(tiles.o + r * tiles.value_row, call.Dv, mass);
      kernel.row_add(tiles.o + r * tiles.value_row, bottom, call.Dv, T(1));
    }
  };
}

// For every query: the mass of its cluster, gradient . u, and delta = mass * gradient . u, where u
// is its attention over the top keys. u is recomputed: deriving it from the stored output would
// divide that output's rounding error by the mass.
template <class T>
void inner_products(const AttentionCall& call, const ListCall<T>& plan,
                    const CentroidTensors& tensors, const ListGradients& gradients,
                    ImprovedWorkspace<T>& ws) {
  const std::vector<RowTile> row_list = list_query_tiles(call, plan);
  for_tiles(row_list, ws.lists.tiles, [&](const RowTile& tile, Tiles<T>& tiles) {
    const ListPair<T> pair = plan.pair(tile.item, tile.head, tile.list);
    delta_tile(
        make_segment(call, plan, tile.item, tile.head, pair),
        list_row_gradients<T>(call, plan, gradients, nullptr, tile.item, tile.head, pair.queries),
        tile.first, tile.count, tiles);
    const Span& span = call.item(tile.item).q;
    const std::int64_t first = (span.batch * call.H + tile.head) * call.N + span.begin;
    const T mass = block_at<T>(tensors.mass, tile.item, tile.head)[tile.list];
    for (std::int64_t r = 0; r < tile.count; ++r) {
      const std::int64_t row = first + pair.queries.row(tile.first + r);
      ws.inner[row] = tiles.delta[r];
      ws.weight[row] = mass;
      ws.lists.delta[row] = mass * tiles.delta[r];
    }
  });
}

// dmass_c = sum of gradient . u over the cluster, or 0.
template <class T>
void mass_gradients(const AttentionCall& call, const ClusterLists& lists, bool mass_grad,
                    ImprovedWorkspace<T>& ws) {
  parallel_for(call.num_items() * call.H, [&](std::int64_t problem, int) {
    const std::int64_t item = problem / call.H, head = problem % call.H;
    const Span& span = call.item(item).q;
    const std::int32_t* order = span_at<std::int32_t>(lists.order, span, head);
    const T* inner = ws.inner + (span.batch * call.H + head) * call.N + span.begin;
    for (std::int64_t c = 0; c < lists.clusters(); ++c) {
      const Range members = lists.members(item, head, c);
      T sum = 0;
      for (std::int64_t s = members.begin; mass_grad && s < members.end; ++s)
        sum += inner[order[s]];
      ws.gradients.dmass[problem * lists.clusters() + c] = sum;
    }
  });
}

// Adds each member's share of the mean's gradient to its own gradient.
template <class T>
void add_mean_gradient(const AttentionCall& call, std::int64_t clusters, const T* dmean,
                       ListCall<T>& plan) {
  plan.finish_backward = [&call, clusters, dmean](const RowTile& tile, Tiles<T>& tiles) {
    const std::int64_t row = (tile.item * call.H + tile.head) * clusters + tile.list;
    for (std::int64_t r = 0; r < tile.count; ++r)
      kernels<T>().row_add(tiles.dq + r * tiles.key_row, dmean + row * call.Dk, call.Dk, T(1));
  };
}

template <class T>
void backward_exact(const ImprovedClusteredParams& params, const AttentionCall& call,
                    const AttentionResult& result, const ListGradients& gradients,
                    ImprovedWorkspace<T>& ws) {
  const CentroidTensors tensors = centroid_tensors(result.saved);
  ListCall<T> plan = shared_plan<T>(call, tensors.lists);
  inner_products(call, plan, tensors, gradients, ws);
  mass_gradients(call, tensors.lists, params.mass_grad, ws);
  plan.weight = ws.weight;
  centroid_output_gradients(call, tensors, gradients.grad_out, ws.gradients, ws.lists.tiles);
  const bool means = gradients.dq.present();
  if (gradients.dk.present() || gradients.dv.present()) {
    shared_backward_slots(call, plan, tensors.lists, gradients, ws.slots, ws.lists);
    centroid_backward_keys(call, tensors, ws.gradients, &ws.slots, means, gradients.dk,
                           gradients.dv, ws.lists.tiles);
  } else if (means) {
    centroid_backward_means(call, tensors, ws.gradients, ws.lists.tiles);
  }
  if (!means) return;
  add_mean_gradient(call, tensors.clusters(), ws.gradients.dmean, plan);
  lists_backward_queries(call, plan, gradients, ws.lists);
}

}  // namespace

template <>
std::int64_t workspace_bytes(const ImprovedClusteredParams& params, const AttentionCall& call) {
  Arena arena, near;
  dispatch_accumulator(call.inputs.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    ImprovedWorkspace<T>(arena, params, call);
    if (params.near > 0) NearWorkspace<T>(near, call, near_sizes(params, call));
  });
  return std::max(arena.used(), near.used());
}

template <>
void select(const ImprovedClusteredParams& params, const AttentionCall& call,
            const std::vector<TensorView>& saved, const Workspace& workspace) {
  Arena arena(call.op, workspace, workspace_bytes(params, call));
  const ClusterLists lists = cluster_lists(saved);
  dispatch_accumulator(call.inputs.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    ImprovedWorkspace<T> ws(arena, params, call);
    cluster_queries(params.clustering, call, saved[kLabels], ws.clustering);
    group_queries(call, saved[kLabels], lists);
    select_top_keys(call, lists, ws);
  });
}

template <>
void attend(const ImprovedClusteredParams& params, const AttentionCall& call,
            const AttentionResult& result, const Workspace& workspace) {
  Arena arena(call.op, workspace, workspace_bytes(params, call));
  const ClusterLists lists = cluster_lists(result.saved);
  dispatch_accumulator(call.inputs.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (params.near > 0) {
      NearWorkspace<T> ws(arena, call, near_sizes(params, call));
      return near_forward(call, params.near, near_tensors(result.saved), result.out, ws);
    }
    ImprovedWorkspace<T> ws(arena, params, call);
    ListCall<T> plan = shared_plan<T>(call, lists);
    if (leaking(params))
      return lists_forward(call, plan, result.out, result.saved[kLeakingLse], ws.lists);
    const CentroidTensors tensors = centroid_tensors(result.saved);
    cluster_means(call, lists, tensors.centroids, ws.lists.tiles);
    centroid_forward(call, tensors, ws.lists.tiles);
    add_bottom(call, tensors, plan);
    lists_forward(call, plan, result.out, result.saved[kLse], ws.lists);
  });
}

template <>
void backward(const ImprovedClusteredParams& params, const AttentionCall& call,
              const AttentionResult& result, const TensorView& grad_out,
              const AttentionGradients& gradients, const Workspace& workspace) {
  Arena arena(call.op, workspace, workspace_bytes(params, call));
  const int lse = params.near > 0 ? kNearLse : leaking(params) ? kLeakingLse : kLse;
  ListGradients lists{result.out,   result.saved[static_cast<std::size_t>(lse)],
                      grad_out,     gradients.dq,
                      gradients.dk, gradients.dv};
  dispatch_accumulator(call.inputs.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (params.near > 0) {
      NearWorkspace<T> ws(arena, call, near_sizes(params, call));
      return near_backward(call, params.near, near_tensors(result.saved), lists, ws);
    }
    ImprovedWorkspace<T> ws(arena, params, call);
    if (leaking(params))
      shared_backward(call, shared_plan<T>(call, cluster_lists(result.saved)),
                      cluster_lists(result.saved), lists, ws.slots, ws.lists);
    else
      backward_exact(params, call, result, lists, ws);
  });
}

}  // namespace coterie::cpu
