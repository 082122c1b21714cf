// SPDX-License-Identifier: MIT
#include "cpu/cluster/assign.h"

#include "cpu/cluster/nearest.h"
#include "cpu/engine/row_tiles.h"
#include "cpu/engine/rows.h"

namespace coterie::cpu {

namespace {

// First element for (item, head) of a tensor (items|1, Hc, ...).
template <class T>
T* own_block(const TensorView& tensor, std::int64_t item, std::int64_t head, std::int64_t heads) {
  return block_at<T>(tensor, tensor.size(0) == 1 ? 0 : item, head / (heads / tensor.size(1)));
}

}  // namespace

template <class T>
Rows centroid_rows(const CentroidView& view, std::int64_t item, std::int64_t head,
                   std::int64_t heads) {
  return memory_rows(own_block<T>(view.centroids, item, head, heads), view.centroids.size(3));
}

template <class T>
void assign_nearest(const TensorView& x, const std::vector<Span>& spans, const CentroidView& view,
                    const TensorView& labels, std::vector<Tiles<T>>& tiles) {
  const std::int64_t heads = x.size(1);
  fill_padding(labels, spans, -1);
  for_tiles(span_tiles(spans, heads), tiles, [&](const RowTile& tile, Tiles<T>& own) {
    const Span& span = spans[static_cast<std::size_t>(tile.item)];
    const T* bias =
        view.bias.present() ? own_block<T>(view.bias, tile.item, tile.head, heads) : nullptr;
    nearest_tile(span_rows(x, span, tile.head), tile.first, tile.count,
                 centroid_rows<T>(view, tile.item, tile.head, heads), view.clusters(), bias, own,
                 span_at<std::int32_t>(labels, span, tile.head) + tile.first);
  });
}

template <class T>
std::vector<BalancedProblem> assign_balanced(const TensorView& x, const std::vector<Span>& spans,
                                             const CentroidView& view, std::int64_t capacity,
                                             const TensorView& labels, std::vector<Tiles<T>>& tiles,
                                             BalancedWorkspace<T>& workspace) {
  const std::int64_t heads = x.size(1), num_clusters = view.clusters();
  fill_padding(labels, spans, -1);
  std::vector<BalancedProblem> problems;
  for (const Span& span : spans)
    for (std::int64_t head = 0; head < heads; ++head) {
      const std::int64_t even = (span.length + num_clusters - 1) / num_clusters;
      problems.push_back({span.length, capacity == 0 ? even : capacity,
                          span_at<std::int32_t>(labels, span, head)});
    }
  const auto scores = [&](std::int64_t problem, const RowList& list, const Range& tokens,
                          const Range& clusters, Tiles<T>& own) {
    const Kernels<T>& kernel = kernels<T>();
    const std::int64_t item = problem / heads, head = problem % heads;
    const std::int64_t count = tokens.end - tokens.begin, columns = clusters.end - clusters.begin;
    const Rows rows = list_rows(x, spans[static_cast<std::size_t>(item)], head, list);
    kernel.load(rows, tokens.begin, count, T(1), own.q, own.key_row);
    kernel.load_transposed(centroid_rows<T>(view, item, head, heads), clusters.begin, columns, T(1),
                           own.k_columns, padded(columns));
    kernel.multiply({count, padded(columns), rows.width, own.q, own.key_row, 1, own.k_columns,
                     padded(columns), own.s, kKeyTile, false});
  };
  match_balanced<T>(problems, num_clusters, scores, tiles, workspace);
  return problems;
}

#define COTERIE_INSTANTIATE(T)                                                                   \
  template Rows centroid_rows<T>(const CentroidView&, std::int64_t, std::int64_t, std::int64_t); \
  template void assign_nearest(const TensorView&, const std::vector<Span>&, const CentroidView&, \
                               const TensorView&, std::vector<Tiles<T>>&);                       \
  template std::vector<BalancedProblem> assign_balanced(                                         \
      const TensorView&, const std::vector<Span>&, const CentroidView&, std::int64_t,            \
      const TensorView&, std::vector<Tiles<T>>&, BalancedWorkspace<T>&);
COTERIE_INSTANTIATE(float)
COTERIE_INSTANTIATE(double)
#undef COTERIE_INSTANTIATE

}  // namespace coterie::cpu
