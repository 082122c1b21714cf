// SPDX-License-Identifier: MIT
// The backward pass of CAST: the order of its stages.
#include <algorithm>
#include <vector>

#include "core/types.h"
#include "cuda/api/padding.h"
#include "cuda/cast/pass.h"
#include "cuda/launch/device.h"
#include "cuda/launch/launch.h"
#include "cuda/lists/slot_sum.h"

namespace coterie::cuda {
namespace {

CastBackward take_backward(const CastShape& shape, const AttentionCall& call, Arena& arena) {
  const std::int64_t slots = shape.slots(), rows = call.B * call.H * call.N;
  const std::int64_t clusters = call.num_items() * call.H * shape.clusters;
  CastBackward pass{};
  for (float** scalars :
       {&pass.dots, &pass.excess, &pass.weights, &pass.weighted, &pass.query_factors,
        &pass.key_factors, &pass.summary_weights, &pass.dgate_slots, &pass.shifts})
    *scalars = arena.take<float>(slots);
  pass.key_slot_heads = static_cast<int>(shape.list_heads > 1 ? call.H : call.value_heads);
  // Rows of 16 bits are by query head.
  const std::int64_t key_slots = std::max<std::int64_t>(pass.key_slot_heads, (call.H + 1) / 2);
  pass.dq_slots = arena.take<float>(slots * call.Dk);
  pass.dk_slots = arena.take<float>(slots / call.H * key_slots * call.Dk);
  pass.dv_slots = arena.take<float>(slots / call.H * key_slots * call.Dv);
  pass.facts = arena.take<float4>(rows);
  cast_cut_tokens(shape, call, pass);
  pass.delta = arena.take<float>(rows);
  pass.dgate_rows = arena.take<float>(rows);
  pass.partials = arena.take<float>(pass.chunks.slots * call.H * shape.clusters * 2 * call.Dk);
  pass.member_tiles = (shape.width + 63) / 64;
  pass.member_parts = arena.take<float>(clusters * pass.member_tiles * 2 * call.Dk);
  pass.key_parts = arena.take<float>(clusters * pass.member_tiles * call.Dk);
  pass.dsummary = arena.take<float>(clusters * call.Dv);
  pass.summary_dots = arena.take<float>(clusters);
  return pass;
}

// Whether the gradients of the mix, or also of the attention inside clusters, take warpgroups'
// kernels.
void choose_kernels(const CastShape& shape, const AttentionCall& call, CastBackward& pass) {
  const auto aligned = [](const TensorView& rows) {
    return !rows.present() || tensor4<const F16>(rows).aligned;
  };
  if (call.inputs.q.dtype == DType::f32 || shape.laplace) return;
  if (!pass.grad_out.present() || !on_hopper()) return;
  const AttentionGradients& to = pass.gradients;
  pass.hopper = aligned(call.inputs.q) && aligned(pass.grad_out) && aligned(to.dq);
  pass.resident = pass.hopper && shape.width <= kCastResident && shape.D <= 64 && aligned(call.k) &&
                  aligned(call.inputs.v) && aligned(to.dk) && aligned(to.dv);
  // Their loaders count bytes of rows in 32 bits.
  const auto near = [](const TensorView& rows) { return rows.stride(2) < std::int64_t{1} << 30; };
  pass.resident = pass.resident && near(call.inputs.q) && near(call.k) && near(call.inputs.v) &&
                  near(pass.grad_out);
  // Sums over slots of query heads with one list for all.
  pass.resident = pass.resident && (shape.group == 1 || shape.list_heads == 1);
  if (pass.resident) pass.key_slot_heads = shape.H;
}

// Of complete slots.
std::vector<SlotSum> slot_sums(const AttentionCall& call, const CastBackward& pass) {
  std::vector<SlotSum> sums;
  const auto add = [&](const void* slots, const TensorView& to, bool added) {
    if (to.present()) sums.push_back({pass.slots, slots, call.H, to, added});
  };
  add(pass.dq_slots, pass.gradients.dq, true);
  add(pass.dk_slots, pass.gradients.dk, false);
  add(pass.dv_slots, pass.gradients.dv, false);
  return sums;
}

void backward_mix(const CastShape& shape, const AttentionCall& call, const CastBackward& pass,
                  cudaStream_t stream) {
  cast_facts(shape, pass, stream);
  cast_tokens_backward(shape, call, pass, stream);
  cast_clusters_backward(shape, call, pass, stream);
  cast_totals(shape, pass, stream);
}

// The attention inside clusters as one of lists.
void backward_lists(const CastShape& shape, const AttentionCall& call, CastBackward& pass,
                    Arena& arena, cudaStream_t stream) {
  const CastInner inner = cast_inner_lists(shape, call, arena, stream);
  ListGradients lists;
  lists.grad_out = pass.grad_out;
  lists.lse = {pass.saved.member_lse, true};
  pass.member_tiles = 1;
  if (!arena.counting()) {
    lists_delta(inner.call, inner.plan, lists, pass.dots, stream);
    cast_members_backward(shape, call, pass, stream);
    backward_mix(shape, call, pass, stream);
    cast_summaries_backward(shape, call, pass, stream);
  }
  lists.weight = {pass.weights, true};
  lists.delta = {pass.weighted, true};
  lists.slot_dq = pass.dq_slots;
  lists.slot_dk = pass.dk_slots;
  lists.slot_dv = pass.dv_slots;
  lists_backward(inner.call, inner.plan, lists, arena, stream);
}

}  // namespace

void cast_backward(const CastParams& params, const AttentionCall& call,
                   const AttentionResult& result, const TensorView& grad_out,
                   const AttentionGradients& gradients, Arena& arena, cudaStream_t stream) {
  const CastSaved saved = cast_saved(params, result.saved);
  const CastShape shape = cast_shape(params, call, saved.members);
  CastBackward pass = take_backward(shape, call, arena);
  pass.saved = saved;
  pass.grad_out = grad_out;
  pass.gradients = gradients;
  choose_kernels(shape, call, pass);
  cast_prepare(shape, call, pass, arena, stream);
  pass.slots = cast_token_slots(shape, call, arena, stream);
  if (pass.resident) {
    cast_inner_queries(shape, call, pass, stream);
    backward_mix(shape, call, pass, stream);
    cast_inner_keys(shape, call, pass, stream);
  } else {
    backward_lists(shape, call, pass, arena, stream);
  }
  if (arena.counting()) return;
  const bool folds = cast_fold_heads(shape, call, pass, stream);
  if (pass.resident)
    return sum_slots(call, slot_sums(call, pass),
                     folds ? SlotSumStart::beside : SlotSumStart::behind, stream);
  cast_fold(shape, call, pass, stream);
  for (const TensorView* rows : {&gradients.dk, &gradients.dv})
    if (rows->present()) zero_padding(*rows, call.inputs.q_sequences, call.num_items(), stream);
}

}  // namespace coterie::cuda
