// SPDX-License-Identifier: MIT
#include "cpu/lists.h"

#include <algorithm>
#include <limits>

#include "core/parallel.h"

namespace coterie::cpu {

namespace {

// Calls body(task, tiles) for every task, in parallel.
template <class T, class Body>
void run_tiles(const std::vector<TileTask>& tasks, ListWorkspace<T>& workspace, Body body) {
  parallel_for(static_cast<std::int64_t>(tasks.size()), [&](std::int64_t number, int worker) {
    body(tasks[static_cast<std::size_t>(number)],
         workspace.tiles[static_cast<std::size_t>(worker)]);
  });
}

template <class T>
std::vector<TileTask> query_tasks(const AttentionCall& call, const ListPlan<T>& plan) {
  return make_tile_tasks(call, call.H, plan.lists, kQueryTile,
                         [&](std::int64_t item, std::int64_t head, std::int64_t list) {
                           return plan.pair(item, head, list).queries.count;
                         });
}

}  // namespace

std::vector<TileTask> make_tile_tasks(
    const AttentionCall& call, std::int64_t heads, std::int64_t lists, std::int64_t size,
    const std::function<std::int64_t(std::int64_t, std::int64_t, std::int64_t)>& length) {
  std::vector<TileTask> tasks;
  for (std::int64_t item = 0; item < call.num_items(); ++item)
    for (std::int64_t head = 0; head < heads; ++head)
      for (std::int64_t list = 0; list < lists; ++list) {
        const std::int64_t rows = length(item, head, list);
        for (std::int64_t first = 0; first < rows; first += size)
          tasks.push_back({item, head, list, first, std::min(size, rows - first)});
      }
  return tasks;
}

template <class T>
Segment<T> make_segment(const AttentionCall& call, const ListPlan<T>& plan, std::int64_t number,
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
  return segment;
}

template <class T>
RowGradients<T> list_row_gradients(const AttentionCall& call, const ListPlan<T>& plan,
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
void lists_forward(const AttentionCall& call, const ListPlan<T>& plan, const TensorView& out,
                   const TensorView& lse, ListWorkspace<T>& workspace) {
  fill_padding(out, query_spans(call), 0);
  fill_padding(lse, query_spans(call), -std::numeric_limits<double>::infinity());
  run_tiles(query_tasks(call, plan), workspace, [&](const TileTask& task, Tiles<T>& tiles) {
    const ListPair<T> pair = plan.pair(task.item, task.head, task.list);
    forward_tile(make_segment(call, plan, task.item, task.head, pair), task.first, task.count,
                 tiles);
    if (plan.finish) plan.finish(task, tiles);
    const Span& span = call.item(task.item).q;
    kernels<T>().store(list_rows(out, span, task.head, pair.queries), task.first, task.count, T(1),
                       tiles.o, tiles.value_row);
    T* lse_rows = span_at<T>(lse, span, task.head);
    for (std::int64_t r = 0; r < task.count; ++r)
      lse_rows[pair.queries.row(task.first + r)] = tiles.lse[r];
  });
}

template <class T>
static void recompute_deltas(const AttentionCall& call, const ListPlan<T>& plan,
                             const ListGradients& gradients, ListWorkspace<T>& workspace) {
  run_tiles(query_tasks(call, plan), workspace, [&](const TileTask& task, Tiles<T>& tiles) {
    const ListPair<T> pair = plan.pair(task.item, task.head, task.list);
    delta_tile(make_segment(call, plan, task.item, task.head, pair),
               list_row_gradients<T>(call, plan, gradients, nullptr, task.item, task.head,
                                     pair.queries),
               task.first, task.count, tiles);
    const Span& span = call.item(task.item).q;
    T* delta = workspace.delta + (span.batch * call.H + task.head) * call.N + span.begin;
    for (std::int64_t r = 0; r < task.count; ++r)
      delta[pair.queries.row(task.first + r)] = tiles.delta[r];
  });
}

template <class T>
void lists_deltas(const AttentionCall& call, const ListPlan<T>& plan,
                  const ListGradients& gradients, ListWorkspace<T>& workspace) {
  if (dtype_bytes(gradients.out.dtype) == 2)
    return recompute_deltas(call, plan, gradients, workspace);
  const Kernels<T>& kernel = kernels<T>();
  const auto tasks = make_tile_tasks(
      call, call.H, 1, kQueryTile,
      [&](std::int64_t item, std::int64_t, std::int64_t) { return call.item(item).q.length; });
  run_tiles(tasks, workspace, [&](const TileTask& task, Tiles<T>& tiles) {
    const Span& span = call.item(task.item).q;
    kernel.load(span_rows(gradients.grad_out, span, task.head), task.first, task.count, T(1),
                tiles.g, tiles.value_row);
    kernel.load(span_rows(gradients.out, span, task.head), task.first, task.count, T(1), tiles.o,
                tiles.value_row);
    T* delta = workspace.delta + (span.batch * call.H + task.head) * call.N + span.begin;
    for (std::int64_t r = 0; r < task.count; ++r)
      delta[task.first + r] = kernel.row_dot(tiles.g + r * tiles.value_row,
                                             tiles.o + r * tiles.value_row, tiles.value_row);
  });
}

template <class T>
void lists_backward_queries(const AttentionCall& call, const ListPlan<T>& plan,
                            const ListGradients& gradients, ListWorkspace<T>& workspace) {
  fill_padding(gradients.dq, query_spans(call), 0);
  run_tiles(query_tasks(call, plan), workspace, [&](const TileTask& task, Tiles<T>& tiles) {
    const ListPair<T> pair = plan.pair(task.item, task.head, task.list);
    backward_query_tile(make_segment(call, plan, task.item, task.head, pair),
                        list_row_gradients(call, plan, gradients, workspace.delta, task.item,
                                           task.head, pair.queries),
                        task.first, task.count, tiles);
    if (plan.finish_backward) plan.finish_backward(task, tiles);
    kernels<T>().store(list_rows(gradients.dq, call.item(task.item).q, task.head, pair.queries),
                       task.first, task.count, T(1), tiles.dq, tiles.key_row);
  });
}

template <class T>
void store_key_tile(const AttentionCall& call, const TileTask& task, const TensorView& dk,
                    const TensorView& dv, const Tiles<T>& tiles, const RowList* keys) {
  const Span& span = call.item(task.item).k;
  const RowList list = keys ? *keys : RowList{span.length};
  if (dk.present())
    kernels<T>().store(list_rows(dk, span, task.head, list), task.first, task.count, T(1), tiles.dk,
                       tiles.key_row);
  if (dv.present())
    kernels<T>().store(list_rows(dv, span, task.head, list), task.first, task.count, T(1), tiles.dv,
                       tiles.value_row);
}

template <class T>
void lists_backward_keys(const AttentionCall& call, const ListPlan<T>& plan,
                         const ListGradients& gradients, ListWorkspace<T>& workspace) {
  const TensorView &dk = gradients.dk, &dv = gradients.dv;
  for (const TensorView& d : {dk, dv})
    if (d.present()) fill_padding(d, key_spans(call), 0);
  const std::int64_t group = call.H / call.value_heads;
  const auto tasks = make_tile_tasks(call, call.value_heads, plan.lists, kKeyTile,
                                     [&](std::int64_t item, std::int64_t head, std::int64_t list) {
                                       return plan.pair(item, head * group, list).keys.count;
                                     });
  run_tiles(tasks, workspace, [&](const TileTask& task, Tiles<T>& tiles) {
    std::fill_n(tiles.dk, kKeyTile * tiles.key_row, T(0));
    std::fill_n(tiles.dv, kKeyTile * tiles.value_row, T(0));
    RowList keys;
    for (std::int64_t head = task.head * group; head < (task.head + 1) * group; ++head) {
      const ListPair<T> pair = plan.pair(task.item, head, task.list);
      keys = pair.keys;
      backward_key_tile(make_segment(call, plan, task.item, head, pair),
                        list_row_gradients(call, plan, gradients, workspace.delta, task.item, head,
                                           pair.queries),
                        task.first, task.count, tiles);
    }
    store_key_tile(call, task, dk, dv, tiles, &keys);
  });
}

template <class T>
void lists_backward(const AttentionCall& call, const ListPlan<T>& plan,
                    const ListGradients& gradients, ListWorkspace<T>& workspace) {
  lists_deltas(call, plan, gradients, workspace);
  if (gradients.dq.present()) lists_backward_queries(call, plan, gradients, workspace);
  if (gradients.dk.present() || gradients.dv.present())
    lists_backward_keys(call, plan, gradients, workspace);
}

#define COTERIE_INSTANTIATE(T)                                                                     \
  template Segment<T> make_segment(const AttentionCall&, const ListPlan<T>&, std::int64_t,         \
                                   std::int64_t, const ListPair<T>&);                              \
  template RowGradients<T> list_row_gradients(const AttentionCall&, const ListPlan<T>&,            \
                                              const ListGradients&, const T*, std::int64_t,        \
                                              std::int64_t, const RowList&);                       \
  template struct ListWorkspace<T>;                                                                \
  template void lists_forward(const AttentionCall&, const ListPlan<T>&, const TensorView&,         \
                              const TensorView&, ListWorkspace<T>&);                               \
  template void lists_deltas(const AttentionCall&, const ListPlan<T>&, const ListGradients&,       \
                             ListWorkspace<T>&);                                                   \
  template void lists_backward_queries(const AttentionCall&, const ListPlan<T>&,                   \
                                       const ListGradients&, ListWorkspace<T>&);                   \
  template void lists_backward_keys(const AttentionCall&, const ListPlan<T>&,                      \
                                    const ListGradients&, ListWorkspace<T>&);                      \
  template void store_key_tile(const AttentionCall&, const TileTask&, const TensorView&,           \
                               const TensorView&, const Tiles<T>&, const RowList*);                \
  template void lists_backward(const AttentionCall&, const ListPlan<T>&, const ListGradients&,     \
                               ListWorkspace<T>&);
COTERIE_INSTANTIATE(float)
COTERIE_INSTANTIATE(double)
#undef COTERIE_INSTANTIATE

}  // namespace coterie::cpu
