// SPDX-License-Identifier: MIT
// Attention over index lists: checks, then the back end.
#include "coterie/attend.h"

#include "core/check.h"
#include "cpu/attend_lists.h"
#include "cpu/rows.h"
#include "ops/call.h"

namespace coterie {

namespace {

DType accumulator_of(const AttentionCall& call) { return accumulator_dtype(call.inputs.q.dtype); }

// Number of clusters; order (B, heads, rows) and offsets (items, heads, C+1).
std::int64_t check_groups(const AttentionCall& call, const std::string& side, const Groups& groups,
                          std::int64_t heads, std::int64_t rows) {
  ops::check_dense(call.op, ("the order of the " + side).c_str(), groups.order, DType::i32,
                   {call.B, heads, rows});
  COTERIE_CHECK(groups.offsets.rank == 3 && groups.offsets.size(2) >= 2, call.op,
                "expected the offsets of the ", side,
                " to have shape (items, heads, clusters + 1); got ", groups.offsets.describe());
  const std::int64_t clusters = groups.offsets.size(2) - 1;
  ops::check_dense(call.op, ("the offsets of the " + side).c_str(), groups.offsets, DType::i32,
                   {call.num_items(), heads, clusters + 1});
  return clusters;
}

// Offsets ascend from 0 to the number of tokens, and every run ascends.
void check_runs(const AttentionCall& call, const char* side, const Groups& groups,
                const std::vector<Span>& spans) {
  const std::int64_t heads = groups.order.size(1), clusters = groups.offsets.size(2) - 1;
  for (std::size_t item = 0; item < spans.size(); ++item)
    for (std::int64_t head = 0; head < heads; ++head) {
      const auto* order = cpu::span_at<const std::int32_t>(groups.order, spans[item], head);
      const auto* offsets =
          cpu::block_at<const std::int32_t>(groups.offsets, static_cast<std::int64_t>(item), head);
      const std::int64_t length = spans[item].length;
      COTERIE_CHECK(offsets[0] == 0 && offsets[clusters] == length, call.op,
                    "expected the offsets of the ", side, " to go from 0 to the ", length,
                    " tokens of item ", item, "; got ", offsets[0], " to ", offsets[clusters]);
      for (std::int64_t c = 0; c < clusters; ++c) {
        COTERIE_CHECK(offsets[c] <= offsets[c + 1], call.op, "expected ascending offsets of the ",
                      side, "; got ", offsets[c], " then ", offsets[c + 1]);
        for (std::int64_t slot = offsets[c]; slot < offsets[c + 1]; ++slot)
          COTERIE_CHECK(order[slot] >= 0 && order[slot] < length &&
                            (slot == offsets[c] || order[slot - 1] < order[slot]),
                        call.op, "expected ", side, " of a cluster to ascend within [0, ", length,
                        "); got ", order[slot], " in slot ", slot, " of item ", item);
      }
    }
}

AttentionCall check_banded(const AttentionInputs& inputs, const BandedLists& lists) {
  AttentionCall call = ops::make_list_call("attend_banded", inputs);
  call.causal = true;  // the lists are, whatever the inputs say
  for (const Item& item : call.items)
    COTERIE_CHECK(item.q.length == item.k.length, call.op,
                  "expected as many keys as queries in every sequence; got ", item.q.length,
                  " queries and ", item.k.length, " keys");
  COTERIE_CHECK(lists.window >= 1, call.op, "expected a window of 1 or more; got ", lists.window);
  const std::int64_t clusters = check_groups(call, "queries", lists.queries, call.H, call.N);
  const std::int64_t others = check_groups(call, "keys", lists.keys, call.key_heads, call.S);
  COTERIE_CHECK(clusters == others, call.op,
                "expected as many clusters of keys as of queries; got ", others, " and ", clusters);
  return call;
}

void check_banded_runs(const AttentionCall& call, const BandedLists& lists) {
  check_runs(call, "queries", lists.queries, cpu::query_spans(call));
  check_runs(call, "keys", lists.keys, cpu::key_spans(call));
}

void check_token_result(const AttentionCall& call, const AttentionResult& result) {
  ops::check_rows(call.op, "out", result.out, 4);
  ops::check_dtype(call.op, "out", result.out, call.inputs.q.dtype);
  ops::check_shape(call.op, "out", result.out, {call.B, call.H, call.N, call.Dv});
  COTERIE_CHECK(!result.saved.empty(), call.op, "expected lse as the first saved tensor; got none");
  ops::check_dense(call.op, "lse", result.saved[0], accumulator_of(call), {call.B, call.H, call.N});
}

AttentionCall check_members(const AttentionInputs& inputs, const MemberLists& lists) {
  AttentionCall call = ops::make_list_call("attend_members", inputs);
  const auto check = [&](const char* name, const TensorView& list, std::int64_t heads) {
    COTERIE_CHECK(list.rank == 4, call.op, "expected ", name,
                  " of shape (items, heads, groups, size); got ", list.describe());
    ops::check_dense(call.op, name, list, DType::i32,
                     {call.num_items(), heads, list.size(2), list.size(3)});
  };
  check("queries", lists.queries, call.H);
  check("keys", lists.keys, call.key_heads);
  COTERIE_CHECK(lists.queries.size(2) == lists.keys.size(2), call.op,
                "expected as many groups of keys as of queries; got ", lists.keys.size(2), " and ",
                lists.queries.size(2));
  return call;
}

// Every list ascends within the item and ends with -1.
void check_list_values(const AttentionCall& call, const char* name, const TensorView& lists,
                       const std::vector<Span>& spans) {
  const std::int64_t width = lists.size(3), rows = lists.size(1) * lists.size(2);
  for (std::size_t item = 0; item < spans.size(); ++item)
    for (std::int64_t row = 0; row < rows; ++row) {
      const auto* list =
          cpu::block_at<const std::int32_t>(lists, static_cast<std::int64_t>(item), 0) +
          row * width;
      for (std::int64_t t = 0; t < width; ++t) {
        const bool fits =
            list[t] == -1 || (list[t] >= 0 && list[t] < spans[item].length &&
                              (t == 0 || list[t - 1] < list[t]) && (t == 0 || list[t - 1] >= 0));
        COTERIE_CHECK(fits, call.op, "expected lists of ", name, " that ascend within [0, ",
                      spans[item].length, ") and end with -1; got ", list[t], " in slot ", t,
                      " of item ", item);
      }
    }
}

void check_member_values(const AttentionCall& call, const MemberLists& lists) {
  check_list_values(call, "queries", lists.queries, cpu::query_spans(call));
  check_list_values(call, "keys", lists.keys, cpu::key_spans(call));
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
  COTERIE_CHECK(!result.saved.empty(), call.op, "expected lse as the first saved tensor; got none");
  ops::check_dense(call.op, "lse", result.saved[0], accumulator_of(call),
                   {call.num_items(), call.H, lists.queries.size(2), lists.queries.size(3)});
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
    COTERIE_CHECK(!other->present(), call.op, "expected no gradients but dq, dk and dv; got ",
                  other->describe());
}

}  // namespace

std::int64_t attend_banded_workspace_bytes(const AttentionInputs& inputs,
                                           const BandedLists& lists) {
  return cpu::banded_bytes(check_banded(inputs, lists), lists);
}

void attend_banded(const AttentionInputs& inputs, const BandedLists& lists, const TensorView& out,
                   const TensorView& lse, const Workspace& workspace) {
  const AttentionCall call = check_banded(inputs, lists);
  const AttentionResult result{out, {lse}};
  check_token_result(call, result);
  check_banded_runs(call, lists);
  cpu::attend_banded(call, lists, result, workspace);
}

void attend_banded_backward(const AttentionInputs& inputs, const BandedLists& lists,
                            const AttentionResult& result, const TensorView& grad_out,
                            const AttentionGradients& gradients, const Workspace& workspace) {
  const AttentionCall call = check_banded(inputs, lists);
  check_token_result(call, result);
  check_banded_runs(call, lists);
  ops::check_rows(call.op, "grad_out", grad_out, 4);
  ops::check_dtype(call.op, "grad_out", grad_out, inputs.q.dtype);
  ops::check_shape(call.op, "grad_out", grad_out, {call.B, call.H, call.N, call.Dv});
  check_token_gradients(call, gradients);
  cpu::attend_banded_backward(call, lists, result, grad_out, gradients, workspace);
}

std::int64_t attend_members_workspace_bytes(const AttentionInputs& inputs,
                                            const MemberLists& lists) {
  return cpu::members_bytes(check_members(inputs, lists), lists);
}

void attend_members(const AttentionInputs& inputs, const MemberLists& lists, const TensorView& out,
                    const TensorView& lse, const Workspace& workspace) {
  const AttentionCall call = check_members(inputs, lists);
  const AttentionResult result{out, {lse}};
  check_slot_result(call, lists, result);
  check_member_values(call, lists);
  cpu::attend_members(call, lists, result, workspace);
}

void attend_members_backward(const AttentionInputs& inputs, const MemberLists& lists,
                             const AttentionResult& result, const TensorView& grad_out,
                             const AttentionGradients& gradients, const Workspace& workspace) {
  const AttentionCall call = check_members(inputs, lists);
  check_slot_result(call, lists, result);
  check_member_values(call, lists);
  check_slots(call, "grad_out", grad_out, lists);
  check_token_gradients(call, gradients);
  cpu::attend_members_backward(call, lists, result, grad_out, gradients, workspace);
}

void merge_partials(const TensorView& parts, const TensorView& part_lse, const TensorView& out,
                    const TensorView& lse, const Workspace&) {
  const char* op = "merge_partials";
  COTERIE_CHECK(parts.rank == 3, op, "expected parts of shape (parts, rows, width); got ",
                parts.describe());
  COTERIE_CHECK(parts.dtype == DType::f32 || parts.dtype == DType::f64, op,
                "expected parts of type f32 or f64; got ", parts.describe());
  const std::int64_t rows = parts.size(1), width = parts.size(2);
  ops::check_dense(op, "parts", parts, parts.dtype, {parts.size(0), rows, width});
  ops::check_dense(op, "part_lse", part_lse, parts.dtype, {parts.size(0), rows});
  ops::check_dense(op, "out", out, parts.dtype, {rows, width});
  ops::check_dense(op, "lse", lse, parts.dtype, {rows});
  cpu::merge_partials(parts, part_lse, out, lse);
}

}  // namespace coterie
