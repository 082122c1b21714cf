// SPDX-License-Identifier: MIT
// Attention over index lists: checks, then the back end.
#include "coterie/attend.h"

#include "core/check.h"
#include "core/parallel.h"
#include "cpu/engine/attend.h"
#include "cpu/engine/rows.h"
#include "ops/call.h"
#include "ops/lists.h"

namespace coterie {

namespace {

AttentionCall check_banded(const AttentionInputs& inputs, const BandedLists& lists) {
  AttentionCall call = ops::make_list_call("attend_banded", inputs);
  call.causal = true;  // the lists are, whatever the inputs say
  for (const Item& item : call.items)
    COTERIE_CHECK(item.q.length == item.k.length, call.op,
                  "expected as many keys as queries in every sequence; got ", item.q.length,
                  " queries and ", item.k.length, " keys");
  COTERIE_CHECK(lists.window >= 1, call.op, "expected a window of 1 or more; got ", lists.window);
  const std::int64_t clusters =
      ops::check_group_shapes(call, "queries", lists.queries, call.H, call.N);
  const std::int64_t others =
      ops::check_group_shapes(call, "keys", lists.keys, call.key_heads, call.S);
  COTERIE_CHECK(clusters == others, call.op,
                "expected as many clusters of keys as of queries; got ", others, " and ", clusters);
  return call;
}

void check_contents(const AttentionCall& call, const BandedLists& lists) {
  ops::check_groups(call, "queries", lists.queries, cpu::query_spans(call), true);
  ops::check_groups(call, "keys", lists.keys, cpu::key_spans(call), true);
}

AttentionCall check_shared(const AttentionInputs& inputs, const SharedLists& lists) {
  AttentionCall call = ops::make_list_call("attend_shared", inputs);
  const std::int64_t clusters =
      ops::check_group_shapes(call, "queries", lists.queries, call.H, call.N);
  const std::int64_t others = ops::check_list_shape(call, "keys", lists.keys, call.H);
  COTERIE_CHECK(clusters == others, call.op,
                "expected as many lists of keys as clusters of queries; got ", others, " and ",
                clusters);
  return call;
}

void check_contents(const AttentionCall& call, const SharedLists& lists) {
  ops::check_groups(call, "queries", lists.queries, cpu::query_spans(call), false);
  ops::check_lists(call, "keys", lists.keys, cpu::key_spans(call));
}

AttentionCall check_members(const AttentionInputs& inputs, const MemberLists& lists) {
  AttentionCall call = ops::make_list_call("attend_members", inputs);
  const std::int64_t groups = ops::check_list_shape(call, "queries", lists.queries, call.H);
  const std::int64_t others = ops::check_list_shape(call, "keys", lists.keys, call.key_heads);
  COTERIE_CHECK(groups == others, call.op, "expected as many lists of keys as of queries; got ",
                others, " and ", groups);
  return call;
}

void check_contents(const AttentionCall& call, const MemberLists& lists) {
  ops::check_lists(call, "queries", lists.queries, cpu::query_spans(call));
  ops::check_lists(call, "keys", lists.keys, cpu::key_spans(call));
}

void check_lse(const AttentionCall& call, const AttentionResult& result,
               const std::vector<std::int64_t>& sizes) {
  COTERIE_CHECK(result.saved.size() == 1, call.op, "expected exactly one saved tensor, lse; got ",
                result.saved.size());
  ops::check_dense(call.op, "lse", result.saved[0], accumulator_dtype(call.inputs.q.dtype), sizes);
}

// Rows of queries: out and its gradient.
void check_token_rows(const AttentionCall& call, const char* name, const TensorView& tensor) {
  ops::check_rows(call.op, name, tensor, 4);
  ops::check_dtype(call.op, name, tensor, call.inputs.q.dtype);
  ops::check_shape(call.op, name, tensor, {call.B, call.H, call.N, call.Dv});
}

void check_token_result(const AttentionCall& call, const AttentionResult& result) {
  check_token_rows(call, "out", result.out);
  check_lse(call, result, {call.B, call.H, call.N});
}

void check_slots(const AttentionCall& call, const char* name, const TensorView& slots,
                 const MemberLists& lists) {
  ops::check_dense(
      call.op, name, slots, call.inputs.q.dtype,
      {call.num_items(), call.H, lists.queries.size(2), lists.queries.size(3), call.Dv});
}

void check_slot_result(const AttentionCall& call, const MemberLists& lists,
                       const AttentionResult& result) {
  check_slots(call, "out", result.out, lists);
  check_lse(call, result, {call.num_items(), call.H, lists.queries.size(2), lists.queries.size(3)});
}

// Gradients of q, k and v, and of nothing else.
void check_token_gradients(const AttentionCall& call, const AttentionGradients& gradients) {
  const auto check = [&](const char* name, const TensorView& tensor, std::int64_t heads,
                         std::int64_t rows, std::int64_t width) {
    if (!tensor.present()) return;
    ops::check_rows(call.op, name, tensor, 4);
    ops::check_dtype(call.op, name, tensor, call.inputs.q.dtype);
    ops::check_shape(call.op, name, tensor, {call.B, heads, rows, width});
  };
  check("dq", gradients.dq, call.H, call.N, call.Dk);
  check("dk", gradients.dk, call.key_heads, call.S, call.Dk);
  check("dv", gradients.dv, call.value_heads, call.S, call.Dv);
  for (const TensorView* other : {&gradients.dcentroids, &gradients.dgate, &gradients.dlogit_scale})
    COTERIE_CHECK(!other->present(), call.op,
                  "only dq, dk and dv are supported by this operation; got another gradient, ",
                  describe(*other));
}

}  // namespace

std::int64_t attend_banded_workspace_bytes(const AttentionInputs& inputs,
                                           const BandedLists& lists) {
  const CallThreads threads;
  return cpu::banded_bytes(check_banded(inputs, lists), lists);
}

void attend_banded(const AttentionInputs& inputs, const BandedLists& lists, const TensorView& out,
                   const TensorView& lse, const Workspace& workspace) {
  const AttentionCall call = check_banded(inputs, lists);
  const AttentionResult result{out, {lse}};
  check_token_result(call, result);
  check_contents(call, lists);
  const CallThreads threads(workspace.bytes, [&] { return cpu::banded_bytes(call, lists); });
  cpu::attend_banded(call, lists, result, workspace);
}

void attend_banded_backward(const AttentionInputs& inputs, const BandedLists& lists,
                            const AttentionResult& result, const TensorView& grad_out,
                            const AttentionGradients& gradients, const Workspace& workspace) {
  const AttentionCall call = check_banded(inputs, lists);
  check_token_result(call, result);
  check_contents(call, lists);
  check_token_rows(call, "grad_out", grad_out);
  check_token_gradients(call, gradients);
  const CallThreads threads(workspace.bytes, [&] { return cpu::banded_bytes(call, lists); });
  cpu::attend_banded_backward(call, lists, result, grad_out, gradients, workspace);
}

std::int64_t attend_shared_workspace_bytes(const AttentionInputs& inputs,
                                           const SharedLists& lists) {
  const CallThreads threads;
  return cpu::shared_bytes(check_shared(inputs, lists), lists);
}

void attend_shared(const AttentionInputs& inputs, const SharedLists& lists, const TensorView& out,
                   const TensorView& lse, const Workspace& workspace) {
  const AttentionCall call = check_shared(inputs, lists);
  const AttentionResult result{out, {lse}};
  check_token_result(call, result);
  check_contents(call, lists);
  const CallThreads threads(workspace.bytes, [&] { return cpu::shared_bytes(call, lists); });
  cpu::attend_shared(call, lists, result, workspace);
}

void attend_shared_backward(const AttentionInputs& inputs, const SharedLists& lists,
                            const AttentionResult& result, const TensorView& grad_out,
                            const AttentionGradients& gradients, const Workspace& workspace) {
  const AttentionCall call = check_shared(inputs, lists);
  check_token_result(call, result);
  check_contents(call, lists);
  check_token_rows(call, "grad_out", grad_out);
  check_token_gradients(call, gradients);
  const CallThreads threads(workspace.bytes, [&] { return cpu::shared_bytes(call, lists); });
  cpu::attend_shared_backward(call, lists, result, grad_out, gradients, workspace);
}

std::int64_t attend_members_workspace_bytes(const AttentionInputs& inputs,
                                            const MemberLists& lists) {
  const CallThreads threads;
  return cpu::members_bytes(check_members(inputs, lists), lists);
}

void attend_members(const AttentionInputs& inputs, const MemberLists& lists, const TensorView& out,
                    const TensorView& lse, const Workspace& workspace) {
  const AttentionCall call = check_members(inputs, lists);
  const AttentionResult result{out, {lse}};
  check_slot_result(call, lists, result);
  check_contents(call, lists);
  const CallThreads threads(workspace.bytes, [&] { return cpu::members_bytes(call, lists); });
  cpu::attend_members(call, lists, result, workspace);
}

void attend_members_backward(const AttentionInputs& inputs, const MemberLists& lists,
                             const AttentionResult& result, const TensorView& grad_out,
                             const AttentionGradients& gradients, const Workspace& workspace) {
  const AttentionCall call = check_members(inputs, lists);
  check_slot_result(call, lists, result);
  check_contents(call, lists);
  check_slots(call, "grad_out", grad_out, lists);
  check_token_gradients(call, gradients);
  const CallThreads threads(workspace.bytes, [&] { return cpu::members_bytes(call, lists); });
  cpu::attend_members_backward(call, lists, result, grad_out, gradients, workspace);
}

void merge_partials(const TensorView& parts, const TensorView& part_lse, const TensorView& out,
                    const TensorView& lse, const Workspace&) {
  const char* op = "merge_partials";
  COTERIE_CHECK(parts.rank == 3, op, "expected parts of shape (parts, rows, width); got ",
                describe(parts));
  COTERIE_CHECK(parts.dtype == DType::f32 || parts.dtype == DType::f64, op,
                "expected parts of type f32 or f64; got ", describe(parts));
  const std::int64_t rows = parts.size(1), width = parts.size(2);
  ops::check_dense(op, "parts", parts, parts.dtype, {parts.size(0), rows, width});
  ops::check_dense(op, "part_lse", part_lse, parts.dtype, {parts.size(0), rows});
  ops::check_dense(op, "out", out, parts.dtype, {rows, width});
  ops::check_dense(op, "lse", lse, parts.dtype, {rows});
  cpu::merge_partials(parts, part_lse, out, lse);
}

}  // namespace coterie
