// SPDX-License-Identifier: MIT
#include "cpu/mechanisms/cast.h"

#include <algorithm>

#include "cpu/engine/tile_steps.h"

namespace coterie::cpu {

namespace {

std::int64_t list_width(const CastParams& params, const AttentionCall& call) {
  const std::int64_t fair = (call.N + params.clusters - 1) / params.clusters;
  const std::int64_t size =
      params.mode == CastMode::single ? std::max(params.size, fair) : params.size;
  return std::min(size, call.N);
}

template <class T>
TensorView take_rows(Arena& arena, const AttentionCall& call, std::int64_t heads) {
  return TensorView::contiguous(arena.take<T>(call.B * heads * call.N * call.Dk),
                                sizeof(T) == 8 ? DType::f64 : DType::f32,
                                {call.B, heads, call.N, call.Dk});
}

template <class T>
Rule<T> everything(std::int64_t keys) {
  Rule<T> rule;
  rule.ranges = [keys](std::int64_t, std::int64_t count, Range* ranges) {
    std::fill_n(ranges, count, Range{0, keys});
  };
  return rule;
}

}  // namespace

template <class T>
CastSaved<T>::CastSaved(const CastParams& params, const std::vector<TensorView>& saved)
    : members(saved[0]) {
  const auto data = [&](std::size_t t) { return static_cast<T*>(saved[t].data); };
  if (params.activation == CastActivation::laplace) {
    summary = data(1);
    return;
  }
  member_lse = data(1);
  summary = data(2);
  summary_lse = data(3);
  combine_lse = saved[4];
}

template <class T>
CastPass<T>::CastPass(Arena& arena, const CastParams& cast, const AttentionCall& attention)
    : params(cast),
      call(attention),
      clusters(params.clusters),
      width(list_width(params, call)),
      slots(call.num_items() * call.H * clusters * width),
      lists(arena, call),
      gated_q(params.gate_scale ? take_rows<T>(arena, call, call.H) : TensorView(call.inputs.q)),
      gated_k(params.gate_scale ? take_rows<T>(arena, call, call.key_heads) : call.k),
      index(arena, slots, call.H, call.B * call.N, call.num_items()) {}

template <class T>
void CastPass<T>::scale_rows(const TensorView& from, T sign, const TensorView& to) {
  const std::vector<RowTile> row_list = span_tiles(query_spans(call), from.size(1));
  for_tiles(row_list, lists.tiles, [&](const RowTile& tile, Tiles<T>& own) {
    const Span& span = call.item(tile.item).q;
    const T* gate = gate_at<T>(call, span) + tile.first;
    kernels<T>().load(span_rows(from, span, tile.head), tile.first, tile.count, T(1), own.q,
                      own.key_row);
    for (std::int64_t r = 0; r < tile.count; ++r)
      kernels<T>().row_scale(own.q + r * own.key_row, own.key_row, gate_factor(sign * gate[r]));
    kernels<T>().store(span_rows(to, span, tile.head), tile.first, tile.count, T(1), own.q,
                       own.key_row);
  });
}

template <class T>
void CastPass<T>::prepare(const CastSaved<T>& saved) {
  index.build(member_slots(saved.members, call.H), query_spans(call));
  if (!params.gate_scale) return;
  scale_rows(call.inputs.q, 1, gated_q);
  scale_rows(call.k, -1, gated_k);
}

template <class T>
RowList CastPass<T>::members(const CastSaved<T>& saved, std::int64_t item, std::int64_t head,
                             std::int64_t cluster) const {
  const std::int64_t list_head = params.share_heads ? 0 : head;
  const std::int32_t* list =
      block_at<std::int32_t>(saved.members, item, list_head) + cluster * width;
  return {std::find(list, list + width, -1) - list, list};
}

template <class T>
Segment<T> CastPass<T>::inner(std::int64_t item, std::int64_t head, const RowList& list) const {
  const Item& spans = call.item(item);
  Segment<T> segment;
  segment.q = list_rows(call.inputs.q, spans.q, head, list);
  segment.k = list_rows(call.k, spans.k, call.key_head(head), list);
  segment.v = list_rows(call.inputs.v, spans.k, call.value_head(head), list);
  segment.num_queries = segment.num_keys = list.count;
  segment.scale = static_cast<T>(call.scale);
  segment.weighting = weighting();
  segment.rule = everything<T>(list.count);
  segment.dropout = dropout_of(call, item, head, list, list);
  return segment;
}

template <class T>
Segment<T> CastPass<T>::outer(std::int64_t item, std::int64_t head, std::int64_t cluster,
                              const RowList& list) const {
  Segment<T> segment = inner(item, head, list);
  segment.q = surrogates<T>(call, head);
  segment.q.base = static_cast<T*>(segment.q.base) + cluster * call.Dk;
  segment.k = list_rows(gated_k, call.item(item).k, call.key_head(head), list);
  segment.num_queries = 1;
  segment.dropout = cluster_dropout_of(call, item, head, {1, nullptr, cluster}, list);
  return segment;
}

template <class T>
Segment<T> CastPass<T>::mix(const CastSaved<T>& saved, std::int64_t item, std::int64_t head) const {
  Segment<T> segment;
  segment.q = span_rows(gated_q, call.item(item).q, head);
  segment.k = surrogates<T>(call, head);
  segment.v = memory_rows(saved.summary + block(item, head) * clusters * call.Dv, call.Dv);
  segment.num_queries = call.item(item).q.length;
  segment.num_keys = clusters;
  segment.scale = static_cast<T>(call.scale);
  segment.weighting = weighting();
  segment.rule = everything<T>(clusters);
  const std::int32_t* first_members = members(saved, item, head, 0).index;
  segment.rule.filter = [first_members, stride = width](std::int64_t, std::int64_t begin,
                                                        std::int64_t count, T* scores) {
    for (std::int64_t t = 0; t < count; ++t)
      if (first_members[(begin + t) * stride] < 0) scores[t] = kNegInf<T>;  // an empty cluster
  };
  return segment;
}

#define COTERIE_INSTANTIATE(T)  \
  template struct CastSaved<T>; \
  template struct CastPass<T>;
COTERIE_INSTANTIATE(float)
COTERIE_INSTANTIATE(double)
#undef COTERIE_INSTANTIATE

}  // namespace coterie::cpu
