// SPDX-License-Identifier: MIT
#include "cpu/assign.h"

#include "core/parallel.h"
#include "cpu/nearest.h"
#include "cpu/rows.h"
#include "cpu/visit.h"

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
  visit_rows(spans, heads, [&](const RowTile& tile, int worker) {
    const Span& span = spans[static_cast<std::size_t>(tile.item)];
    const T* bias =
        view.bias.present() ? own_block<T>(view.bias, tile.item, tile.head, heads) : nullptr;
    nearest_tile(span_rows(x, span, tile.head), tile.first, tile.count,
                 centroid_rows<T>(view, tile.item, tile.head, heads), view.clusters(), bias,
                 tiles[static_cast<std::size_t>(worker)],
                 span_at<std::int32_t>(labels, span, tile.head) + tile.first);
  });
}

template <class T>
void assign_balanced(const TensorView& x, const std::vector<Span>& spans, const CentroidView& view,
                     std::int64_t capacity, const TensorView& labels, std::vector<Tiles<T>>& tiles,
                     std::vector<BalancedBuffer<T>>& buffers) {
  const std::int64_t heads = x.size(1), items = static_cast<std::int64_t>(spans.size());
  fill_padding(labels, spans, -1);
  parallel_for(items * heads, [&](std::int64_t task, int worker) {
    const std::int64_t item = task / heads, head = task % heads;
    const Span& span = spans[static_cast<std::size_t>(item)];
    const std::int64_t even = (span.length + view.clusters() - 1) / view.clusters();
    balanced_rows(
        span_rows(x, span, head), span.length, centroid_rows<T>(view, item, head, heads),
        view.clusters(), capacity == 0 ? even : capacity, tiles[static_cast<std::size_t>(worker)],
        buffers[static_cast<std::size_t>(worker)], span_at<std::int32_t>(labels, span, head));
  });
}

#define COTERIE_INSTANTIATE(T)                                                                    \
  template Rows centroid_rows<T>(const CentroidView&, std::int64_t, std::int64_t, std::int64_t);  \
  template void assign_nearest(const TensorView&, const std::vector<Span>&, const CentroidView&,  \
                               const TensorView&, std::vector<Tiles<T>>&);                        \
  template void assign_balanced(const TensorView&, const std::vector<Span>&, const CentroidView&, \
                                std::int64_t, const TensorView&, std::vector<Tiles<T>>&,          \
                                std::vector<BalancedBuffer<T>>&);
COTERIE_INSTANTIATE(float)
COTERIE_INSTANTIATE(double)
#undef COTERIE_INSTANTIATE

}  // namespace coterie::cpu
