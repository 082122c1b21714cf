// SPDX-License-Identifier: MIT
#include "cpu/mechanisms/centroid_attention.h"

#include <algorithm>

#include "core/parallel.h"
#include "cpu/cluster/group.h"
#include "cpu/cluster/means.h"
#include "cpu/engine/turns.h"

namespace coterie::cpu {

namespace {

// Calls body(problem, item, head, cluster, members, tiles) for every cluster.
template <class T, class Body>
void for_clusters(const AttentionCall& call, const ClusterLists& lists,
                  std::vector<Tiles<T>>& tiles, Body body) {
  const std::int64_t clusters = lists.clusters();
  parallel_for(call.num_items() * call.H * clusters, [&](std::int64_t task, int worker) {
    const std::int64_t item = task / clusters / call.H, head = task / clusters % call.H;
    body(task, item, head, lists.members(item, head, task % clusters),
         tiles[static_cast<std::size_t>(worker)]);
  });
}

// Calls visit(t) for every listed key begin + t, 0 <= t < count, of a cluster.
template <class Visit>
void for_listed(const std::int32_t* keys, std::int64_t width, std::int64_t begin,
                std::int64_t count, Visit visit) {
  const std::int32_t* end = std::find(keys, keys + width, -1);
  for (const std::int32_t* key = std::lower_bound(keys, end, begin);
       key != end && *key < begin + count; ++key)
    visit(*key - begin);
}

// Removes the listed keys from the output and sums their weights in tiles.delta.
template <class T>
TileHook<T> forward_hook(const ClusterLists& lists, std::int64_t item, std::int64_t head,
                         Tiles<T>& tiles) {
  TileHook<T> hook;
  hook.forward = [&lists, &tiles, item, head](std::int64_t row, std::int64_t cluster,
                                              std::int64_t begin, std::int64_t count, T rescale,
                                              T* p) {
    T listed = 0;
    for_listed(lists.key_row(item, head, cluster), lists.width(), begin, count,
               [&](std::int64_t t) {
                 listed += p[t];
                 p[t] = 0;
               });
    tiles.delta[row] = tiles.delta[row] * rescale + listed;
  };
  return hook;
}

// Listed keys affect the output only through their mass.
template <class T>
TileHook<T> backward_hook(const ClusterLists& lists, std::int64_t item, std::int64_t head,
                          const T* dmass) {
  TileHook<T> hook;
  hook.backward = [&lists, item, head, dmass](std::int64_t cluster, std::int64_t begin,
                                              std::int64_t count, T* p_for_v, T* dp) {
    for_listed(lists.key_row(item, head, cluster), lists.width(), begin, count,
               [&](std::int64_t t) {
                 p_for_v[t] = 0;
                 dp[t] = dmass[cluster];
               });
  };
  return hook;
}

template <class T>
RowGradients<T> centroid_rows(const AttentionCall& call, const CentroidTensors& tensors,
                              const CentroidGradients<T>& gradients, std::int64_t problem) {
  const std::int64_t first = problem * tensors.clusters();
  RowGradients<T> rows;
  rows.gradient = memory_rows(gradients.dout + first * call.Dv, call.Dv);
  rows.lse = static_cast<const T*>(tensors.lse.data) + first;
  rows.delta = gradients.delta + first;
  return rows;
}

}  // namespace

std::vector<RowTile> centroid_tiles(const AttentionCall& call, std::int64_t clusters) {
  return list_tiles({call.num_items(), call.H}, kQueryTile,
                    [=](std::int64_t, std::int64_t, std::int64_t) { return clusters; });
}

void group_queries(const AttentionCall& call, const TensorView& labels, const ClusterLists& lists) {
  fill_padding(lists.order, query_spans(call), -1);
  parallel_for(call.num_items() * call.H, [&](std::int64_t problem, int) {
    const std::int64_t item = problem / call.H, head = problem % call.H;
    const Span& span = call.item(item).q;
    group_rows(span_at<std::int32_t>(labels, span, head), span.length, lists.clusters(),
               span_at<std::int32_t>(lists.order, span, head),
               block_at<std::int32_t>(lists.offsets, item, head));
  });
}

template <class T>
void cluster_means(const AttentionCall& call, const ClusterLists& lists,
                   const TensorView& centroids, std::vector<Tiles<T>>& tiles) {
  T* means = static_cast<T*>(centroids.data);
  for_clusters(call, lists, tiles,
               [&](std::int64_t cluster, std::int64_t item, std::int64_t head, const Range& members,
                   Tiles<T>& own) {
                 const Span& span = call.item(item).q;
                 std::fill_n(means + cluster * call.Dk, call.Dk, T(0));
                 mean_rows(span_rows(call.inputs.q, span, head),
                           span_at<std::int32_t>(lists.order, span, head), members.begin,
                           members.end, own, means + cluster * call.Dk);
               });
}

template <class T>
Segment<T> centroid_segment(const AttentionCall& call, const ClusterLists& lists,
                            const TensorView& centroids, std::int64_t number, std::int64_t head) {
  const Item& item = call.item(number);
  Segment<T> segment;
  segment.q = memory_rows(block_at<T>(centroids, number, head), call.Dk);
  segment.k = span_rows(call.k, item.k, call.key_head(head));
  segment.v = span_rows(call.inputs.v, item.k, call.value_head(head));
  segment.num_queries = lists.clusters();
  segment.num_keys = item.k.length;
  segment.scale = static_cast<T>(call.scale);
  const std::int64_t keys = item.k.length;
  segment.dropout = cluster_dropout_of(call, number, head, {lists.clusters()}, {keys});
  segment.rule.ranges = [lists, number, head, keys](std::int64_t first, std::int64_t count,
                                                    Range* ranges) {
    for (std::int64_t r = 0; r < count; ++r) {
      const Range members = lists.members(number, head, first + r);
      ranges[r] = {0, members.begin < members.end ? keys : 0};
    }
  };
  return segment;
}

template <class T>
void centroid_forward(const AttentionCall& call, const CentroidTensors& tensors,
                      std::vector<Tiles<T>>& tiles) {
  const bool listed = tensors.mass.present();
  const std::vector<RowTile> row_list = centroid_tiles(call, tensors.clusters());
  for_tiles(row_list, tiles, [&](const RowTile& tile, Tiles<T>& own) {
    const TileHook<T> hook = forward_hook(tensors.lists, tile.item, tile.head, own);
    std::fill_n(own.delta, tile.count, T(0));
    forward_tile(centroid_segment<T>(call, tensors.lists, tensors.centroids, tile.item, tile.head),
                 tile.first, tile.count, own, listed ? &hook : nullptr);
    kernels<T>().store(memory_rows(block_at<T>(tensors.out, tile.item, tile.head), call.Dv),
                       tile.first, tile.count, T(1), own.o, own.value_row);
    std::copy_n(own.lse, tile.count, block_at<T>(tensors.lse, tile.item, tile.head) + tile.first);
    if (!listed) return;
    T* mass = block_at<T>(tensors.mass, tile.item, tile.head) + tile.first;
    for (std::int64_t r = 0; r < tile.count; ++r)
      mass[r] = own.sum[r] == T(0) ? T(0) : own.delta[r] / own.sum[r];
  });
}

template <class T>
CentroidGradients<T>::CentroidGradients(Arena& arena, const AttentionCall& call,
                                        std::int64_t clusters) {
  const std::int64_t rows = call.num_items() * call.H * clusters;
  dout = arena.take<T>(rows * call.Dv);
  dmass = arena.take<T>(rows);
  delta = arena.take<T>(rows);
  dmean = arena.take<T>(rows * call.Dk);
}

template <class T>
void centroid_output_gradients(const AttentionCall& call, const CentroidTensors& tensors,
                               const TensorView& grad_out, CentroidGradients<T>& gradients,
                               std::vector<Tiles<T>>& tiles) {
  const T* out = static_cast<const T*>(tensors.out.data);
  const T* mass = static_cast<const T*>(tensors.mass.data);
  for_clusters(call, tensors.lists, tiles,
               [&](std::int64_t cluster, std::int64_t item, std::int64_t head, const Range& members,
                   Tiles<T>& own) {
                 const Span& span = call.item(item).q;
                 sum_rows(span_rows(grad_out, span, head),
                          span_at<std::int32_t>(tensors.lists.order, span, head), members.begin,
                          members.end, own.g, own.value_row, own.o);
                 T dot = 0;
                 for (std::int64_t d = 0; d < call.Dv; ++d) {
                   gradients.dout[cluster * call.Dv + d] = own.o[d];
                   dot += own.o[d] * out[cluster * call.Dv + d];
                 }
                 if (mass) dot += mass[cluster] * gradients.dmass[cluster];
                 gradients.delta[cluster] = dot;
               });
}

template <class T>
void share_means(const AttentionCall& call, const ClusterLists& lists, T* dmean) {
  parallel_for(call.num_items() * call.H, [&](std::int64_t problem, int) {
    for (std::int64_t c = 0; c < lists.clusters(); ++c) {
      const Range members = lists.members(problem / call.H, problem % call.H, c);
      if (members.begin < members.end)
        kernels<T>().row_scale(dmean + (problem * lists.clusters() + c) * call.Dk, call.Dk,
                               T(1) / static_cast<T>(members.end - members.begin));
    }
  });
}

template <class T>
void centroid_backward_means(const AttentionCall& call, const CentroidTensors& tensors,
                             CentroidGradients<T>& gradients, std::vector<Tiles<T>>& tiles) {
  const bool listed = tensors.mass.present();
  const std::vector<RowTile> row_list = centroid_tiles(call, tensors.clusters());
  for_tiles(row_list, tiles, [&](const RowTile& tile, Tiles<T>& own) {
    const std::int64_t problem = tile.item * call.H + tile.head;
    const std::int64_t row = problem * tensors.clusters();
    const TileHook<T> hook =
        backward_hook(tensors.lists, tile.item, tile.head, gradients.dmass + row);
    backward_query_tile(
        centroid_segment<T>(call, tensors.lists, tensors.centroids, tile.item, tile.head),
        centroid_rows(call, tensors, gradients, problem), tile.first, tile.count, own,
        listed ? &hook : nullptr);
    kernels<T>().store(memory_rows(gradients.dmean + row * call.Dk, call.Dk), tile.first,
                       tile.count, T(1), own.dq, own.key_row);
  });
  share_means(call, tensors.lists, gradients.dmean);
}

template <class T>
void centroid_backward_keys(const AttentionCall& call, const CentroidTensors& tensors,
                            CentroidGradients<T>& gradients, const KeySlots<T>* slots, bool means,
                            const TensorView& dk, const TensorView& dv,
                            std::vector<Tiles<T>>& tiles) {
  const std::int64_t problems = call.num_items() * call.H, clusters = tensors.clusters();
  const std::int64_t tiles_per_head = (clusters + kQueryTile - 1) / kQueryTile;
  Turns turns(problems * tiles_per_head);
  if (means) std::fill_n(gradients.dmean, problems * clusters * call.Dk, T(0));
  const auto add_tile = [&](const RowTile& tile, std::int64_t head, Tiles<T>& own) {
    const std::int64_t problem = tile.item * call.H + head;
    const QuerySums sums = [&](std::int64_t first, std::int64_t count) {
      const Turns::Turn turn(turns, problem * tiles_per_head + first / kQueryTile,
                             tile.first / kKeyTile);
      add_to_queries(memory_rows(gradients.dmean + problem * clusters * call.Dk, call.Dk), first,
                     count, tile.count, own);
    };
    const TileHook<T> hook = backward_hook(tensors.lists, tile.item, head,
                                           gradients.dmass + problem * tensors.clusters());
    backward_key_tile(centroid_segment<T>(call, tensors.lists, tensors.centroids, tile.item, head),
                      centroid_rows(call, tensors, gradients, problem), tile.first, tile.count, own,
                      slots ? &hook : nullptr, means ? &sums : nullptr);
    if (slots) add_slots(call, tensors.lists, tile.item, head, tile.first, tile.count, *slots, own);
  };
  const auto add = [&](const RowTile& tile, std::int64_t head, Tiles<T>& own) {
    turns.run([&] { add_tile(tile, head, own); });
  };
  write_key_tiles<T>(call, {}, add, dk, dv, tiles);
  if (means) share_means(call, tensors.lists, gradients.dmean);
}

#define COTERIE_INSTANTIATE(T)                                                                 \
  template void cluster_means(const AttentionCall&, const ClusterLists&, const TensorView&,    \
                              std::vector<Tiles<T>>&);                                         \
  template Segment<T> centroid_segment(const AttentionCall&, const ClusterLists&,              \
                                       const TensorView&, std::int64_t, std::int64_t);         \
  template void centroid_forward(const AttentionCall&, const CentroidTensors&,                 \
                                 std::vector<Tiles<T>>&);                                      \
  template struct CentroidGradients<T>;                                                        \
  template void share_means(const AttentionCall&, const ClusterLists&, T*);                    \
  template void centroid_output_gradients(const AttentionCall&, const CentroidTensors&,        \
                                          const TensorView&, CentroidGradients<T>&,            \
                                          std::vector<Tiles<T>>&);                             \
  template void centroid_backward_means(const AttentionCall&, const CentroidTensors&,          \
                                        CentroidGradients<T>&, std::vector<Tiles<T>>&);        \
  template void centroid_backward_keys(                                                        \
      const AttentionCall&, const CentroidTensors&, CentroidGradients<T>&, const KeySlots<T>*, \
      bool, const TensorView&, const TensorView&, std::vector<Tiles<T>>&);
COTERIE_INSTANTIATE(float)
COTERIE_INSTANTIATE(double)
#undef COTERIE_INSTANTIATE

}  // namespace coterie::cpu
