// SPDX-License-Identifier: MIT
#include <algorithm>

#include "core/check.h"
#include "core/dispatch.h"
#include "coterie/attend.h"
#include "cpu/shared.h"
#include "ops/call.h"

namespace coterie {

namespace {

constexpr const char* kOp = "attend_shared";

struct Checked {
  AttentionCall call;
  cpu::ClusterLists lists;

  Checked(const AttentionInputs& inputs, const SharedLists& asked)
      : call(ops::make_list_call(kOp, inputs)),
        lists{asked.queries.order, asked.queries.offsets, asked.keys} {
    COTERIE_CHECK(lists.offsets.rank == 3 && lists.offsets.size(2) >= 2, kOp,
                  "expected offsets of shape (items, heads, clusters + 1); got ",
                  lists.offsets.describe());
    COTERIE_CHECK(lists.keys.rank == 4, kOp, "expected keys with 4 dimensions; got ",
                  lists.keys.describe());
    const std::int64_t clusters = lists.clusters();
    ops::check_dense(kOp, "order", lists.order, DType::i32, {call.B, call.H, call.N});
    ops::check_dense(kOp, "offsets", lists.offsets, DType::i32,
                     {call.num_items(), call.H, clusters + 1});
    ops::check_dense(kOp, "keys", lists.keys, DType::i32,
                     {call.num_items(), call.H, clusters, lists.width()});
    check_contents();
  }

  // Kernels trust their lists.
  void check_contents() const {
    for (std::int64_t item = 0; item < call.num_items(); ++item)
      for (std::int64_t head = 0; head < call.H; ++head) {
        ops::check_groups(kOp, cpu::span_at<std::int32_t>(lists.order, call.item(item).q, head),
                          call.item(item).q.length,
                          cpu::block_at<std::int32_t>(lists.offsets, item, head),
                          lists.clusters());
        for (std::int64_t c = 0; c < lists.clusters(); ++c)
          ops::check_ascending(kOp, "keys", lists.key_row(item, head, c), lists.width(),
                               call.item(item).k.length);
      }
  }
};

template <class T>
struct SharedWorkspace {
  cpu::ListWorkspace<T> lists;
  cpu::KeySlots<T> slots;

  SharedWorkspace(Arena& arena, const Checked& checked)
      : lists(arena, checked.call),
        slots(arena, checked.call, checked.lists.clusters(), checked.lists.width()) {}
};

std::int64_t bytes(const Checked& checked) {
  Arena arena;
  dispatch_accumulator(checked.call.inputs.q.dtype, [&](auto tag) {
    SharedWorkspace<typename decltype(tag)::type>(arena, checked);
  });
  return arena.used();
}

}  // namespace

std::int64_t attend_shared_workspace_bytes(const AttentionInputs& inputs,
                                           const SharedLists& lists) {
  return bytes(Checked(inputs, lists));
}

void attend_shared(const AttentionInputs& inputs, const SharedLists& lists, const TensorView& out,
                   const TensorView& lse, const Workspace& workspace) {
  const Checked checked(inputs, lists);
  ops::check_list_outputs(checked.call, out, lse);
  Arena arena(kOp, workspace, bytes(checked));
  dispatch_accumulator(inputs.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    SharedWorkspace<T> ws(arena, checked);
    cpu::lists_forward(checked.call, cpu::shared_plan<T>(checked.call, checked.lists), out, lse,
                       ws.lists);
  });
}

void attend_shared_backward(const AttentionInputs& inputs, const SharedLists& lists,
                            const AttentionResult& result, const TensorView& grad_out,
                            const AttentionGradients& gradients, const Workspace& workspace) {
  const Checked checked(inputs, lists);
  COTERIE_CHECK(result.saved.size() == 1, kOp, "expected lse as the one saved tensor; got ",
                result.saved.size());
  ops::check_list_outputs(checked.call, result.out, result.saved[0]);
  ops::check_gradients(FullParams{}, checked.call, grad_out, gradients);
  Arena arena(kOp, workspace, bytes(checked));
  dispatch_accumulator(inputs.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    SharedWorkspace<T> ws(arena, checked);
    cpu::shared_backward(checked.call, cpu::shared_plan<T>(checked.call, checked.lists),
                         checked.lists,
                         {result.out, result.saved[0], grad_out, gradients.dq, gradients.dk,
                          gradients.dv},
                         ws.slots, ws.lists);
  });
}

}  // namespace coterie
