// SPDX-License-Identifier: MIT
#include "cpu/engine/partition.h"

#include <algorithm>
#include <limits>

namespace coterie::cpu {

template <class T>
std::vector<RowTile> list_query_tiles(const AttentionCall& call, const ListCall<T>& plan) {
  return list_tiles({call.num_items(), call.H, plan.lists}, kQueryTile,
                    [&](std::int64_t item, std::int64_t head, std::int64_t list) {
                      return plan.pair(item, head, list).queries.count;
                    });
}

template <class T>
Segment<T> make_segment(const AttentionCall& call, const ListCall<T>& plan, std::int64_t number,
                        std::int64_t head, const ListPair<T>& pair) {
  const Item& item = call.item(number);
  Segment<T> segment;
  segment.q = list_rows(call.inputs.q, item.q, head, pair.queries);
  segment.k = list_rows(call.k, item.k, call.key_head(head), pair.keys);
  segment.v = list_rows(call.inputs.v, item.k, call.value_head(head), pair.keys);
  segment.num_queries = pair.queries.count;
  segment.num_keys = pair.keys.count;
  segment.scale = plan.head_scale ? plan.scale * plan.head_scale[head] : plan.scale;
  segment.rule = pair.rule;
  segment.dropout = dropout_of(call, number, head, pair.queries, pair.keys);
  return segment;
}

template <class T>
RowGradients<T> list_row_gradients(const AttentionCall& call, const ListCall<T>& plan,
                                   const ListGradients& gradients, const T* delta,
                                   std::int64_t item, std::int64_t head, const RowList& list) {
  const Span& span = call.item(item).q;
  const std::int64_t first = (span.batch * call.H + head) * call.N + span.begin + list.first;
  RowGradients<T> rows;
  rows.gradient = list_rows(gradients.grad_out, span, head, list);
  rows.weight = plan.weight ? plan.weight + first : nullptr;
  rows.lse = static_cast<const T*>(gradients.lse.data) + first;
  rows.delta = delta ? delta + first : nullptr;
  rows.index = list.index;
  rows.step = list.step;
  return rows;
}

template <class T>
ListWorkspace<T>::ListWorkspace(Arena& arena, const AttentionCall& call)
    : tiles(make_tiles<T>(arena, call.Dk, call.Dv)),
      delta(arena.take<T>(call.B * call.H * call.N)) {}

template <class T>
void lists_forward(const AttentionCall& call, const ListCall<T>& plan, const TensorView& out,
                   const TensorView& lse, ListWorkspace<T>& workspace) {
  fill_padding(out, query_spans(call), 0);
  fill_padding(lse, query_spans(call), -std::numeric_limits<double>::infinity());
  const std::vector<RowTile> row_list = list_query_tiles(call, plan);
  for_tiles(row_list, workspace.tiles, [&](const RowTile& tile, Tiles<T>& tiles) {
    const ListPair<T> pair = plan.pair(tile.item, tile.head, tile.list);
    Segment<T> segment = make_segment(call, plan, tile.item, tile.head, pair);
    segment.round_weights = out.dtype == DType::bf16;
    forward_tile(segment, tile.first, tile.count, tiles);
    if (plan.finish) plan.finish(tile, tiles);
    const Span& span = call.item(tile.item).q;
    kernels<T>().store(list_rows(out, span, tile.head, pair.queries), tile.first, tile.count, T(1),
                       tiles.o, tiles.value_row);
    T* lse_rows = span_at<T>(lse, span, tile.head);
    for (std::int64_t r = 0; r < tile.count; ++r)
      lse_rows[pair.queries.row(tile.first + r)] = tiles.lse[r];
  });
}

template <class T>
static void recompute_deltas(const AttentionCall& call, const ListCall<T>& plan,
                             const ListGradients& gradients, ListWorkspace<T>& workspace) {
  const std::vector<RowTile> row_list = list_query_tiles(call, plan);
  for_tiles(row_list, workspace.tiles, [&](const RowTile& tile, Tiles<T>& tiles) {
    const ListPair<T> pair = plan.pair(tile.item, tile.head, tile.list);
    delta_tile(
        make_segment(call, plan, tile.item, tile.head, pair),
        list_row_gradients<T>(call, plan, gradients, nullptr, tile.item, tile.head, pair.queries),
        tile.first, tile.count, tiles);
    const Span& span = call.item(tile.item).q;
    T* delta = workspace.delta + (span.batch * call.H + tile.head) * call.N + span.begin;
    for (std::int64_t r = 0; r < tile.count; ++r)
      delta[pair.queries.row(tile.first + r)] = tiles.delta[r];
  });
}

template <class T>
void lists_deltas(const AttentionCall& call, const ListCall<T>& plan,
                  const ListGradients& gradients, ListWorkspace<T>& workspace) {
  if (dtype_bytes(gradients.out.dtype) == 2)
    return recompute_deltas(call, plan, gradients, workspace);
  const Kernels<T>& kernel = kernels<T>();
  const std::vector<RowTile> row_list = span_tiles(query_spans(call), call.H);
  for_tiles(row_list, workspace.tiles, [&](const RowTile& tile, Tiles<T>& tiles) {
    const Span& span = call.item(tile.item).q;
    kernel.load(span_rows(gradients.grad_out, span, tile.head), tile.first, tile.count, T(1),
                tiles.g, tiles.value_row);
    kernel.load(span_rows(gradients.out, span, tile.head), tile.first, tile.count, T(1), tiles.o,
                tiles.value_row);
    T* delta = workspace.delta + (span.batch * call.H + tile.head) * call.N + span.begin;
    for (std::int64_t r = 0; r < tile.count; ++r)
      delta[tile.first + r] = kernel.row_dot(tiles.g + r * tiles.value_row,
                                             tiles.o + r * tiles.value_row, tiles.value_row);
  });
}

template <class T>
void lists_backward_queries(const AttentionCall& call, const ListCall<T>& plan,
                            const ListGradients& gradients, ListWorkspace<T>& workspace) {
  fill_padding(gradients.dq, query_spans(call), 0);
  const std::vector<RowTile> row_list = list_query_tiles(call, plan);
  for_tiles(row_list, workspace.tiles, [&](const RowTile& tile, Tiles<T>& tiles) {
    const ListPair<T> pair = plan.pair(tile.item, tile.head, tile.list);
    backward_query_tile(make_segment(call, plan, tile.item, tile.head, pair),
                        list_row_gradients(call, plan, gradients, workspace.delta, tile.item,
                                           tile.head, pair.queries),
                        tile.first, tile.count, tiles);
    if (plan.finish_backward) plan.finish_backward(tile, tiles);
    kernels<T>().store(list_rows(gradients.dq, call.item(tile.item).q, tile.head, pair.queries),
                       tile.first, tile.count, T(1), tiles.dq, tiles.key_row);
  });
}

template <class T>
void write_key_tiles(const AttentionCall& call, const KeyLists& keys, const AddKeyTile<T>& add,
                     const TensorView& dk, const TensorView& dv, std::vector<Tiles<T>>& tiles) {
  const Kernels<T>& kernel = kernels<T>();
  for (const TensorView& d : {dk, dv})
    if (d.present()) fill_padding(d, key_spans(call), 0);
  const std::int64_t sharing = call.H / call.value_heads;
  const auto list_of = [&](std::int64_t item, std::int64_t head, std::int64_t list) {
    return keys.list ? keys.list(item, head, list) : RowList{call.item(item).k.length};
  };
  const auto length = [&](std::int64_t item, std::int64_t head, std::int64_t list) {
    return list_of(item, head, list).count;
  };
  std::vector<RowTile> row_list =
      list_tiles({call.num_items(), call.value_heads, keys.lists}, kKeyTile, length);
  std::stable_sort(row_list.begin(), row_list.end(),
                   [](const RowTile& a, const RowTile& b) { return a.first < b.first; });
  for_tiles(row_list, tiles, [&](const RowTile& tile, Tiles<T>& own) {
    std::fill_n(own.dk, tile.count * own.key_row, T(0));
    std::fill_n(own.dv, tile.count * own.value_row, T(0));
    for (std::int64_t h = 0; h < sharing; ++h) add(tile, tile.head * sharing + h, own);
    const Span& span = call.item(tile.item).k;
    const RowList list = list_of(tile.item, tile.head, tile.list);
    if (dk.present())
      kernel.store(list_rows(dk, span, tile.head, list), tile.first, tile.count, T(1), own.dk,
                   own.key_row);
    if (dv.present())
      kernel.store(list_rows(dv, span, tile.head, list), tile.first, tile.count, T(1), own.dv,
                   own.value_row);
  });
}

template <class T>
KeyLists key_lists(const AttentionCall& call, const ListCall<T>& plan) {
  const std::int64_t sharing = call.H / call.value_heads;
  return {plan.lists, [&plan, sharing](std::int64_t item, std::int64_t head, std::int64_t list) {
            return plan.pair(item, head * sharing, list).keys;
          }};
}

template <class T>
void lists_backward_keys(const AttentionCall& call, const ListCall<T>& plan,
                         const ListGradients& gradients, ListWorkspace<T>& workspace) {
  const auto add = [&](const RowTile& tile, std::int64_t head, Tiles<T>& tiles) {
    const ListPair<T> pair = plan.pair(tile.item, head, tile.list);
    backward_key_tile(
        make_segment(call, plan, tile.item, head, pair),
        list_row_gradients(call, plan, gradients, workspace.delta, tile.item, head, pair.queries),
        tile.first, tile.count, tiles);
  };
  write_key_tiles<T>(call, key_lists(call, plan), add, gradients.dk, gradients.dv, workspace.tiles);
}

template <class T>
void lists_backward(const AttentionCall& call, const ListCall<T>& plan,
                    const ListGradients& gradients, ListWorkspace<T>& workspace) {
  lists_deltas(call, plan, gradients, workspace);
  const bool keys = gradients.dk.present() || gradients.dv.present();
  if (keys && gradients.dq.present() && !plan.finish_backward &&
      dtype_bytes(gradients.dq.dtype) == sizeof(T))
    return lists_backward_together(call, plan, gradients, workspace);
  if (gradients.dq.present()) lists_backward_queries(call, plan, gradients, workspace);
  if (keys) lists_backward_keys(call, plan, gradients, workspace);
}

#define COTERIE_INSTANTIATE(T)                                                                 \
  template Segment<T> make_segment(const AttentionCall&, const ListCall<T>&, std::int64_t,     \
                                   std::int64_t, const ListPair<T>&);                          \
  template RowGradients<T> list_row_gradients(const AttentionCall&, const ListCall<T>&,        \
                                              const ListGradients&, const T*, std::int64_t,    \
                                              std::int64_t, const RowList&);                   \
  template std::vector<RowTile> list_query_tiles(const AttentionCall&, const ListCall<T>&);    \
  template KeyLists key_lists(const AttentionCall&, const ListCall<T>&);                       \
  template void write_key_tiles(const AttentionCall&, const KeyLists&, const AddKeyTile<T>&,   \
                                const TensorView&, const TensorView&, std::vector<Tiles<T>>&); \
  template struct ListWorkspace<T>;                                                            \
  template void lists_forward(const AttentionCall&, const ListCall<T>&, const TensorView&,     \
                              const TensorView&, ListWorkspace<T>&);                           \
  template void lists_deltas(const AttentionCall&, const ListCall<T>&, const ListGradients&,   \
                             ListWorkspace<T>&);                                               \
  template void lists_backward_queries(const AttentionCall&, const ListCall<T>&,               \
                                       const ListGradients&, ListWorkspace<T>&);               \
  template void lists_backward_keys(const AttentionCall&, const ListCall<T>&,                  \
                                    const ListGradients&, ListWorkspace<T>&);                  \
  template void lists_backward(const AttentionCall&, const ListCall<T>&, const ListGradients&, \
                               ListWorkspace<T>&);
COTERIE_INSTANTIATE(float)
COTERIE_INSTANTIATE(double)
#undef COTERIE_INSTANTIATE

}  // namespace coterie::cpu
