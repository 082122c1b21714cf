// SPDX-License-Identifier: MIT
// The backward pass of CAST: the order of its stages. With warpgroups the mix, and if the plan is
// resident also the attention inside clusters, run on kernels for Hopper; otherwise they are lists.
#include <algorithm>
#include <vector>

#include "core/types.h"
#include "cuda/cast/stages.h"
#include "cuda/lists/slot_sum.h"

namespace coterie::cuda {
namespace {

CastBackward take_backward(const CastShape& shape, const CastPlan& plan, const AttentionCall& call,
                           Arena& arena) {
  const std::int64_t slots = shape.slots(), rows = call.B * call.H * call.N;
  const std::int64_t clusters = call.num_items() * call.H * shape.clusters;
  const std::int64_t tiles = (shape.width + 63) / 64;
  const std::int64_t each = call.inputs.q.dtype == DType::f32 ? 4 : 2;
  CastBackward pass{plan};
  for (float** scalars :
       {&pass.dots, &pass.excess, &pass.weights, &pass.weighted, &pass.query_factors,
        &pass.key_factors, &pass.summary_weights, &pass.dgate_slots, &pass.shifts})
    *scalars = arena.take<float>(slots);
  // mix_dq is no longer needed when slots get gradients.
  const std::int64_t slot_bytes = slots * call.Dk * each;
  auto* memory = arena.take<float4>(std::max(3 * slot_bytes, rows * call.Dk * 4) / 16 + 3);
  pass.mix_dq = reinterpret_cast<float*>(memory);
  for (void** gradients : {&pass.dq_slots, &pass.dk_slots, &pass.dv_slots}) {
    *gradients = memory;
    memory += (slot_bytes + 15) / 16;
  }
  pass.facts = arena.take<float4>(rows);
  pass.delta = arena.take<float>(rows);
  pass.dgate_rows = arena.take<float>(rows);
  pass.partials = arena.take<float>(
      std::max(plan.chunks.slots * call.H * shape.clusters, clusters * plan.mix_runs) * 2 *
      call.Dk);
  pass.member_parts = arena.take<float>(clusters * tiles * 2 * call.Dk);
  pass.key_parts = arena.take<float>(clusters * tiles * call.Dk);
  pass.dsummary = arena.take<float>(clusters * call.Dv);
  pass.summary_dots = arena.take<float>(clusters);
  return pass;
}

void backward_mix(const CastShape& shape, const AttentionCall& call, const CastBackward& pass,
                  Arena& arena, cudaStream_t stream) {
  if (pass.plan.warpgroups) {
    cast_facts(shape, pass, stream);
    cast_mix_backward_sm90a(shape, call, pass, stream);
    return cast_totals(shape, pass, stream);
  }
  const CastLists mix = cast_mix_lists(shape, pass.plan, call, pass.saved, arena, stream);
  ListGradients lists;
  lists.grad_out = pass.grad_out;
  lists.lse = {pass.saved.combine_lse, false};
  if (!arena.counting() && !shape.laplace)
    lists_delta(mix.call, mix.plan, lists, pass.delta, stream);
  if (!arena.counting()) cast_facts(shape, pass, stream);
  lists.delta = {pass.delta, false};
  lists.slot_dq = pass.mix_dq;
  lists.slot_dk = pass.partials;
  lists.slot_dv = pass.partials + static_cast<std::int64_t>(shape.items) * shape.H *
                                      shape.clusters * pass.plan.mix_runs * shape.D;
  lists_backward(mix.call, mix.plan, lists, arena, stream);
  if (arena.counting()) return;
  cast_mix_rows(shape, call, pass, stream);
  cast_totals(shape, pass, stream);
}

// The attention inside clusters as attention over lists.
void backward_lists(const CastShape& shape, const AttentionCall& call, const CastBackward& pass,
                    Arena& arena, cudaStream_t stream) {
  const CastLists inner = cast_inner_lists(shape, call, arena, stream);
  ListGradients lists;
  lists.grad_out = pass.grad_out;
  lists.lse = {pass.saved.member_lse, true};
  if (!arena.counting()) {
    lists_delta(inner.call, inner.plan, lists, pass.dots, stream);
    cast_members_backward(shape, call, pass, stream);
  }
  backward_mix(shape, call, pass, arena, stream);
  if (!arena.counting()) cast_summaries_backward(shape, call, pass, stream);
  lists.weight = {pass.weights, true};
  lists.delta = {pass.weighted, true};
  lists.slot_dq = pass.dq_slots;
  lists.slot_dk = pass.dk_slots;
  lists.slot_dv = pass.dv_slots;
  lists.slots_rounded = true;
  lists_backward(inner.call, inner.plan, lists, arena, stream);
  if (!arena.counting()) cast_complete_slots(shape, call, pass, stream);
}

}  // namespace

void cast_backward(const CastParams& params, const AttentionCall& call, const CastSaved& saved,
                   const TensorView& grad_out, const AttentionGradients& gradients, Arena& arena,
                   cudaStream_t stream) {
  const CastShape shape = cast_shape(params, call, saved.members);
  CastPlan plan(shape, call);
  if (!arena.counting()) plan.choose_backward(shape, call, grad_out, gradients);
  CastBackward pass = take_backward(shape, plan, call, arena);
  pass.saved = saved;
  pass.grad_out = grad_out;
  pass.gradients = gradients;
  cast_prepare(shape, call, pass, arena, stream);
  pass.slots = cast_token_slots(shape, call, arena, stream);
  if (plan.resident) {
    cast_inner_queries(shape, call, pass, stream);
    backward_mix(shape, call, pass, arena, stream);
    cast_inner_keys(shape, call, pass, stream);
  } else {
    backward_lists(shape, call, pass, arena, stream);
  }
  // If query heads of one key head have separate lists, their sums come first.
  const bool apart = shape.list_heads > 1 && shape.group > 1;
  TensorView dk = gradients.dk, dv = gradients.dv;
  if (apart && (arena.counting() || dk.present())) dk = cast_take_rows(call, arena, call.B, call.N);
  if (apart && (arena.counting() || dv.present())) dv = cast_take_rows(call, arena, call.B, call.N);
  if (arena.counting()) return;
  std::vector<SlotSum> sums;
  const auto add = [&](const void* slots, std::int64_t heads, const TensorView& to, bool added) {
    if (to.present()) sums.push_back({pass.slots, slots, heads, to, added});
  };
  add(pass.dq_slots, call.H, gradients.dq, true);
  add(pass.dk_slots, plan.key_slot_heads, dk, false);
  add(pass.dv_slots, plan.key_slot_heads, dv, false);
  const bool folds = cast_fold_heads(shape, call, pass, stream);
  sum_slots(call, sums, folds ? SlotSumStart::beside : SlotSumStart::behind, stream);
  if (apart && dk.present()) cast_map_heads(call, dk, gradients.dk, stream);
  if (apart && dv.present()) cast_map_heads(call, dv, gradients.dv, stream);
}

}  // namespace coterie::cuda
