// SPDX-License-Identifier: MIT
#include "cpu/engine/attend.h"

#include <algorithm>

#include "core/dispatch.h"
#include "core/parallel.h"
#include "cpu/engine/banded.h"
#include "cpu/engine/delta.h"
#include "cpu/engine/fold.h"
#include "cpu/engine/members.h"
#include "cpu/engine/merge.h"
#include "cpu/engine/shared.h"

namespace coterie::cpu {

namespace {

BandedRuns runs_of(const BandedLists& lists) {
  return {lists.queries.order, lists.queries.offsets, lists.keys.order, lists.keys.offsets};
}

BandedParams params_of(const BandedLists& lists) {
  BandedParams params;
  params.window = lists.window;
  return params;
}

template <class T>
void write_gradients(const AttentionCall& call, const GradientSums<T>& sums,
                     const AttentionGradients& gradients, std::vector<Tiles<T>>& tiles) {
  if (gradients.dq.present()) write_sums(sums.dq, query_spans(call), gradients.dq, tiles);
  if (gradients.dk.present()) write_sums(sums.dk, key_spans(call), gradients.dk, tiles);
  if (gradients.dv.present()) write_sums(sums.dv, key_spans(call), gradients.dv, tiles);
}

ClusterLists clusters_of(const SharedLists& lists) {
  return {lists.queries.order, lists.queries.offsets, lists.keys};
}

template <class T>
struct SharedWorkspace {
  ListWorkspace<T> lists;
  KeySlots<T> slots;

  SharedWorkspace(Arena& arena, const AttentionCall& call, const ClusterLists& clusters)
      : lists(arena, call), slots(arena, call, clusters.clusters(), clusters.width()) {}
};

// The rows of a contiguous tensor, in order.
Rows dense_rows(const TensorView& tensor) {
  Rows rows;
  rows.base = tensor.data;
  rows.width = tensor.size(tensor.rank - 1);
  rows.stride_bytes = rows.width * dtype_bytes(tensor.dtype);
  rows.dtype = tensor.dtype;
  return rows;
}

template <class T>
struct MembersBackward {
  std::vector<Tiles<T>> tiles;
  SlotIndex query_slots, key_slots;
  T* delta;  // query slots
  SlotGradients<T> slots;

  MembersBackward(Arena& arena, const AttentionCall& call, const MemberLists& lists)
      : tiles(make_tiles<T>(arena, call.Dk, call.Dv)),
        query_slots(arena, lists.queries.count(), call.H, call.B * call.N, call.num_items()),
        key_slots(arena, lists.keys.count(), call.key_heads, call.B * call.S, call.num_items()),
        delta(arena.take<T>(lists.queries.count())) {
    slots.dq = arena.take<T>(lists.queries.count() * call.Dk);
    slots.dk = arena.take<T>(lists.keys.count() * call.Dk);
    slots.dv = arena.take<T>(lists.keys.count() * call.Dv);
  }
};

// delta = gradient . output of every slot.
template <class T>
void slot_deltas(const Rows& out, const Rows& gradient, std::int64_t slots, T* delta,
                 std::vector<Tiles<T>>& tiles) {
  const Kernels<T>& kernel = kernels<T>();
  parallel_for((slots + kQueryTile - 1) / kQueryTile, [&](std::int64_t number, int worker) {
    Tiles<T>& own = tiles[static_cast<std::size_t>(worker)];
    const std::int64_t first = number * kQueryTile, count = std::min(kQueryTile, slots - first);
    kernel.load(gradient, first, count, T(1), own.g, own.value_row);
    delta_of_outputs(out, first, count, own);
    std::copy_n(own.delta, count, delta + first);
  });
}

}  // namespace

std::int64_t banded_bytes(const AttentionCall& call, const BandedLists& lists) {
  return dispatch_accumulator(call.inputs.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    Arena forward, backward;
    for (Arena* arena : {&forward, &backward}) make_tiles<T>(*arena, call.Dk, call.Dv);
    BandedForward<T>(forward, params_of(lists), call);
    BandedBackward<T>(backward, params_of(lists), call);
    return std::max(forward.used(), backward.used());
  });
}

void attend_banded(const AttentionCall& call, const BandedLists& lists,
                   const AttentionResult& result, const Workspace& workspace) {
  Arena arena(call.op, workspace, banded_bytes(call, lists));
  dispatch_accumulator(call.inputs.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    auto tiles = make_tiles<T>(arena, call.Dk, call.Dv);
    BandedForward<T> forward(arena, params_of(lists), call);
    const BandedProblem<T> problem{call, params_of(lists), runs_of(lists), nullptr};
    banded_forward(problem, result.out, result.saved[0], forward, tiles);
  });
}

void attend_banded_backward(const AttentionCall& call, const BandedLists& lists,
                            const AttentionResult& result, const TensorView& grad_out,
                            const AttentionGradients& gradients, const Workspace& workspace) {
  Arena arena(call.op, workspace, banded_bytes(call, lists));
  dispatch_accumulator(call.inputs.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    auto tiles = make_tiles<T>(arena, call.Dk, call.Dv);
    BandedBackward<T> backward(arena, params_of(lists), call);
    const BandedProblem<T> problem{call, params_of(lists), runs_of(lists), nullptr};
    const GradientSums<T> sums = banded_backward(
        problem, {result.out, result.saved[0], grad_out},
        {gradients.dq.present(), gradients.dk.present(), gradients.dv.present()}, backward, tiles);
    write_gradients(call, sums, gradients, tiles);
  });
}

std::int64_t shared_bytes(const AttentionCall& call, const SharedLists& lists) {
  Arena arena;
  dispatch_accumulator(call.inputs.q.dtype, [&](auto tag) {
    SharedWorkspace<typename decltype(tag)::type>(arena, call, clusters_of(lists));
  });
  return arena.used();
}

void attend_shared(const AttentionCall& call, const SharedLists& lists,
                   const AttentionResult& result, const Workspace& workspace) {
  Arena arena(call.op, workspace, shared_bytes(call, lists));
  const ClusterLists clusters = clusters_of(lists);
  dispatch_accumulator(call.inputs.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    SharedWorkspace<T> own(arena, call, clusters);
    lists_forward(call, shared_plan<T>(call, clusters), result.out, result.saved[0], own.lists);
  });
}

void attend_shared_backward(const AttentionCall& call, const SharedLists& lists,
                            const AttentionResult& result, const TensorView& grad_out,
                            const AttentionGradients& gradients, const Workspace& workspace) {
  Arena arena(call.op, workspace, shared_bytes(call, lists));
  const ClusterLists clusters = clusters_of(lists);
  dispatch_accumulator(call.inputs.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    SharedWorkspace<T> own(arena, call, clusters);
    shared_backward(
        call, shared_plan<T>(call, clusters), clusters,
        {result.out, result.saved[0], grad_out, gradients.dq, gradients.dk, gradients.dv},
        own.slots, own.lists);
  });
}

std::int64_t members_bytes(const AttentionCall& call, const MemberLists& lists) {
  Arena arena;
  dispatch_accumulator(call.inputs.q.dtype, [&](auto tag) {
    MembersBackward<typename decltype(tag)::type>(arena, call, lists);
  });
  return arena.used();
}

void attend_members(const AttentionCall& call, const MemberLists& lists,
                    const AttentionResult& result, const Workspace& workspace) {
  Arena arena(call.op, workspace, members_bytes(call, lists));
  dispatch_accumulator(call.inputs.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    auto tiles = make_tiles<T>(arena, call.Dk, call.Dv);
    groups_forward(call, member_plan<T>(call, lists, SelfAttention::keep), dense_rows(result.out),
                   static_cast<T*>(result.saved[0].data), tiles);
  });
}

void attend_members_backward(const AttentionCall& call, const MemberLists& lists,
                             const AttentionResult& result, const TensorView& grad_out,
                             const AttentionGradients& gradients, const Workspace& workspace) {
  Arena arena(call.op, workspace, members_bytes(call, lists));
  dispatch_accumulator(call.inputs.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    MembersBackward<T> own(arena, call, lists);
    const GroupPlan<T> plan = member_plan<T>(call, lists, SelfAttention::keep);
    own.query_slots.build(plan.queries, query_spans(call));
    own.key_slots.build(plan.keys, key_spans(call));
    slot_deltas(dense_rows(result.out), dense_rows(grad_out), lists.queries.count(), own.delta,
                own.tiles);
    const auto* lse = static_cast<const T*>(result.saved[0].data);
    const SlotGradients<T> wanted{gradients.dq.present() ? own.slots.dq : nullptr,
                                  gradients.dk.present() ? own.slots.dk : nullptr,
                                  gradients.dv.present() ? own.slots.dv : nullptr};
    groups_backward(call, plan,
                    slot_gradients<T>(plan, dense_rows(grad_out), {nullptr, lse, own.delta}),
                    wanted, own.tiles);
    write_gradients<T>(call,
                       {slot_sums<T>({&own.query_slots, own.slots.dq, call.Dk, call.H}),
                        slot_sums<T>({&own.key_slots, own.slots.dk, call.Dk, call.key_heads}),
                        slot_sums<T>({&own.key_slots, own.slots.dv, call.Dv, call.value_heads})},
                       gradients, own.tiles);
  });
}

void merge_partials(const TensorView& parts, const TensorView& part_lse, const TensorView& out,
                    const TensorView& lse) {
  const std::int64_t num_parts = parts.size(0), rows = parts.size(1), width = parts.size(2);
  dispatch_accumulator(parts.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T *part_out = static_cast<const T*>(parts.data),
            *masses = static_cast<const T*>(part_lse.data);
    parallel_for((rows + kQueryTile - 1) / kQueryTile, [&](std::int64_t number, int) {
      std::vector<Partial<T>> row(static_cast<std::size_t>(num_parts));
      const std::int64_t first = number * kQueryTile, end = std::min(rows, first + kQueryTile);
      for (std::int64_t r = first; r < end; ++r) {
        for (std::int64_t p = 0; p < num_parts; ++p)
          row[static_cast<std::size_t>(p)] = {part_out + (p * rows + r) * width,
                                              masses[p * rows + r]};
        static_cast<T*>(lse.data)[r] = merge_row(row, width, static_cast<T*>(out.data) + r * width);
      }
    });
  });
}

}  // namespace coterie::cpu
