// SPDX-License-Identifier: MIT
// The selection of routing: the best tokens of each centroid, a balanced partition, or the nearest
// centroids.
#include <algorithm>

#include "core/parallel.h"
#include "cpu/cluster/assign.h"
#include "cpu/cluster/group.h"
#include "cpu/engine/row_tiles.h"
#include "cpu/mechanisms/routing.h"

namespace coterie::cpu {

namespace {

std::int64_t clusters_per_query(const RoutingParams& params) {
  return std::min(params.queries_in, params.clusters);
}

template <class T>
std::vector<TopBuffer<T>> top_buffers(Arena& arena, const RoutingParams& params,
                                      const AttentionCall& call) {
  if (params.membership == Membership::top)
    return make_top_buffers<T>(arena, std::min(params.window, std::max(call.N, call.S)));
  if (params.membership == Membership::nearest && clusters_per_query(params) > 1)
    return make_top_buffers<T>(arena, clusters_per_query(params));
  return {};
}

// Centroids (Hkv, C, Dk) as a view that all items share.
CentroidView centroids_of(const AttentionCall& call) {
  const TensorView& own = call.inputs.centroids;
  return {TensorView::contiguous(own.data, own.dtype, {1, own.size(0), own.size(1), own.size(2)}),
          {}};
}

// A segment in which every query sees every key.
template <class T>
Segment<T> all_pairs(const Rows& q, std::int64_t num_queries, const Rows& k,
                     std::int64_t num_keys) {
  Segment<T> segment;
  segment.q = q;
  segment.k = k;
  segment.num_queries = num_queries;
  segment.num_keys = num_keys;
  segment.rule.ranges = [=](std::int64_t, std::int64_t count, Range* ranges) {
    std::fill_n(ranges, count, Range{0, num_keys});
  };
  return segment;
}

// members (items, heads, C, w): centroids are the queries, tokens the keys.
template <class T>
void select_best(const AttentionCall& call, const RoutingSide& side, const TensorView& members,
                 SelectBuffers<T>& buffers, std::vector<Tiles<T>>& tiles) {
  const CentroidView centroids = centroids_of(call);
  const std::int64_t clusters = members.size(2), width = members.size(3);
  const std::int64_t items = static_cast<std::int64_t>(side.spans.size());
  const auto length = [&](std::int64_t, std::int64_t, std::int64_t) { return clusters; };
  const std::vector<RowTile> row_list = list_tiles({items, side.heads}, kQueryTile, length);
  for_tiles(row_list, [&](const RowTile& tile, int worker) {
    const Span& span = side.spans[static_cast<std::size_t>(tile.item)];
    TopBuffer<T> buffer = buffers.top[static_cast<std::size_t>(worker)];
    buffer.count = width;
    select_tile(all_pairs<T>(centroid_rows<T>(centroids, tile.item, tile.head, side.heads),
                             clusters, span_rows(side.rows, span, tile.head), span.length),
                tile.first, tile.count, tiles[static_cast<std::size_t>(worker)], buffer,
                block_at<std::int32_t>(members, tile.item, tile.head) + tile.first * width);
  });
}

template <class T>
void select_partition(const AttentionCall& call, const RoutingSide& side, const TensorView& members,
                      SelectBuffers<T>& buffers, std::vector<Tiles<T>>& tiles) {
  const TensorView labels = TensorView::contiguous(
      buffers.labels, DType::i32, {side.rows.size(0), side.heads, side.rows.size(2)});
  list_members(assign_balanced(side.rows, side.spans, centroids_of(call), 0, labels, tiles,
                               *buffers.balanced),
               members.size(2), members.size(3), static_cast<std::int32_t*>(members.data));
}

// select_tile skips scores of -inf; such clusters are the last choice here, lower index first.
void complete_row(std::int32_t* row, std::int64_t count) {
  if (row[count - 1] >= 0) return;
  std::int32_t* end = std::find(row, row + count, -1);
  for (std::int32_t c = 0; end != row + count; ++c)
    if (std::find(row, end, c) == end) *end++ = c;
}

// clusters (B, H, N, m): the m nearest clusters of each query.
template <class T>
void select_clusters(const AttentionCall& call, std::int64_t m, SelectBuffers<T>& buffers,
                     std::vector<Tiles<T>>& tiles) {
  const RoutingSide side = query_side(call);
  const CentroidView centroids = centroids_of(call);
  for_tiles(span_tiles(side.spans, side.heads), [&](const RowTile& tile, int worker) {
    const Span& span = side.spans[static_cast<std::size_t>(tile.item)];
    std::int32_t* rows = buffers.clusters +
                         ((span.batch * call.H + tile.head) * call.N + span.begin + tile.first) * m;
    select_tile(all_pairs<T>(span_rows(side.rows, span, tile.head), span.length,
                             centroid_rows<T>(centroids, tile.item, tile.head, side.heads),
                             centroids.clusters()),
                tile.first, tile.count, tiles[static_cast<std::size_t>(worker)],
                buffers.top[static_cast<std::size_t>(worker)], rows);
    for (std::int64_t r = 0; r < tile.count; ++r) complete_row(rows + r * m, m);
  });
}

// Sorts (token, cluster) pairs, m per token, of every item and head.
void sort_runs(const RoutingSide& side, const std::int32_t* clusters, std::int64_t m,
               const TensorView& order, const TensorView& offsets) {
  std::vector<Span> pairs = side.spans;
  for (Span& span : pairs) span = {span.batch, span.begin * m, span.length * m};
  fill_padding(order, pairs, -1);
  const std::int64_t items = static_cast<std::int64_t>(pairs.size());
  parallel_for(items * side.heads, [&](std::int64_t task, int) {
    const std::int64_t item = task / side.heads, head = task % side.heads;
    const Span& span = pairs[static_cast<std::size_t>(item)];
    std::int32_t* own = span_at<std::int32_t>(order, span, head);
    const std::int64_t first = own - static_cast<std::int32_t*>(order.data);
    group_rows(clusters + first, span.length, offsets.size(2) - 1, own,
               block_at<std::int32_t>(offsets, item, head));
    for (std::int64_t p = 0; p < span.length; ++p) own[p] /= static_cast<std::int32_t>(m);
  });
}

template <class T>
void select_runs(const RoutingParams& params, const AttentionCall& call,
                 const std::vector<TensorView>& saved, SelectBuffers<T>& buffers,
                 std::vector<Tiles<T>>& tiles) {
  const RoutingSaved at = saved_positions(params);
  const CentroidView centroids = centroids_of(call);
  const RoutingSide queries = query_side(call), keys = key_side(call);
  assign_nearest(queries.rows, queries.spans, centroids, saved[at.q_labels], tiles);
  if (!params.shared()) assign_nearest(keys.rows, keys.spans, centroids, saved[at.k_labels], tiles);
  const std::int64_t m = clusters_per_query(params);
  if (m > 1) select_clusters(call, m, buffers, tiles);
  const auto* q_labels = static_cast<const std::int32_t*>(saved[at.q_labels].data);
  const auto* k_labels = static_cast<const std::int32_t*>(saved[at.k_labels].data);
  sort_runs(queries, m > 1 ? buffers.clusters : q_labels, m, saved[at.q_order],
            saved[at.q_offsets]);
  sort_runs(keys, k_labels, 1, saved[at.k_order], saved[at.k_offsets]);
}

}  // namespace

template <class T>
SelectBuffers<T>::SelectBuffers(Arena& arena, const RoutingParams& params,
                                const AttentionCall& call)
    : top(top_buffers<T>(arena, params, call)) {
  const std::int64_t m = clusters_per_query(params);
  if (params.membership == Membership::nearest && m > 1)
    clusters = arena.take<std::int32_t>(call.B * call.H * call.N * m);
  if (params.membership == Membership::balanced) {
    const std::int64_t tokens = call.B * call.H * std::max(call.N, call.S);
    balanced.emplace(arena, call.num_items() * call.H, tokens, params.clusters);
    labels = arena.take<std::int32_t>(tokens);
  }
}

template <class T>
void routing_select(const RoutingParams& params, const AttentionCall& normalised,
                    const std::vector<TensorView>& saved, SelectBuffers<T>& buffers,
                    std::vector<Tiles<T>>& tiles) {
  if (params.membership == Membership::nearest)
    return select_runs(params, normalised, saved, buffers, tiles);
  const RoutingSaved at = saved_positions(params);
  const auto select_members =
      params.membership == Membership::top ? select_best<T> : select_partition<T>;
  select_members(normalised, query_side(normalised), saved[at.q_members], buffers, tiles);
  if (!params.shared())
    select_members(normalised, key_side(normalised), saved[at.k_members], buffers, tiles);
}

#define COTERIE_INSTANTIATE(T)                                                    \
  template struct SelectBuffers<T>;                                               \
  template void routing_select(const RoutingParams&, const AttentionCall&,        \
                               const std::vector<TensorView>&, SelectBuffers<T>&, \
                               std::vector<Tiles<T>>&);
COTERIE_INSTANTIATE(float)
COTERIE_INSTANTIATE(double)
#undef COTERIE_INSTANTIATE

}  // namespace coterie::cpu
