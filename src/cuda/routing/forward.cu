// SPDX-License-Identifier: MIT
// Routing attention: rows are normalised, tokens near a centroid attend to each other. top and
// balanced: groups of members, whose outputs add up per token; nearest: runs of tokens sorted by
// cluster, strictly causal. Roy et al., "Efficient Content-Based Sparse Attention with Routing
// Transformers", 2021; balanced and nearest are ours.
#include "cuda/api/padding.h"
#include "cuda/routing/pass.h"

namespace coterie::cuda {

ListCall RoutingPass::list_plan(bool ends_there, const NormalisedSides& sides,
                                const RoutingSaved& at, const float* head_scale,
                                const TokenSlots* tokens, Arena& arena, cudaStream_t stream,
                                RunEnds& ends) const {
  ListCall plan = make_plan(sides, head_scale);
  if (strict_)
    plan_runs(ends_there, at, tokens, arena, stream, plan, ends);
  else
    find_member_ends(plan_members(ends_there, at, arena, plan), stream);
  return plan;
}

void RoutingPass::plan_runs(bool ends_there, const RoutingSaved& at, const TokenSlots* tokens,
                            Arena& arena, cudaStream_t stream, ListCall& plan,
                            RunEnds& ends) const {
  plan.queries.layout = plan.keys.layout = ListLayout::runs;
  plan.queries.index = ints(at.q_order);
  plan.queries.offsets = ints(at.q_offsets);
  plan.queries.per_row = static_cast<int>(per_row_);
  plan.keys.index = ints(at.k_order);
  plan.keys.offsets = ints(at.k_offsets);
  plan.ranges.window = std::min(params_.window, call_.N + call_.S);
  const bool ranks = params_.share_qk && per_row_ == 1;  // ends are ranks + 1
  plan.ranges.rule = ranks ? ListRule::sliding : ListRule::ends;
  plan.ranges.causal = true;
  plan.ranges.ends = ints(at.ends);
  ends = RunEnds(arena, params_, call_);
  if (demotes()) plan.filters.drop_own = ends.own_row;
  if (!ends_there) ends.ends = ints(at.ends);
  if (arena.counting() || (!ends.ends && !ends.own_row)) return;
  find_run_ends(params_, call_, {ints(at.q_order), ints(at.q_offsets)},
                {ints(at.k_order), ints(at.k_offsets)}, tokens, ends, stream);
}

MemberEnds RoutingPass::plan_members(bool ends_there, const RoutingSaved& at, Arena& arena,
                                     ListCall& plan) const {
  plan.queries.layout = plan.keys.layout = ListLayout::members;
  plan.queries.index = ints(at.q_members);
  plan.queries.width = width(call_.N);
  plan.keys.index = ints(at.k_members);
  plan.keys.width = width(call_.S);
  if (call_.causal) {
    plan.ranges.rule = params_.share_qk ? ListRule::causal : ListRule::ends;
    plan.ranges.window = call_.N + call_.S;
    plan.ranges.ends = ints(at.ends);
  }
  std::uint8_t* flags = nullptr;
  if (demotes()) {
    flags = arena.take<std::uint8_t>(query_slots());
    plan.filters.drop_own = flags;
    plan.filters.drop_by_slot = true;
  }
  if (arena.counting()) return {};
  return member_ends(call_, at.q_members, at.k_members, ends_there ? nullptr : ints(at.ends),
                     flags);
}

OwnKeys RoutingPass::own_keys(const NormalisedSides& sides, const RunEnds& ends,
                              const float* head_scale) const {
  OwnKeys own;
  if (!params_.include_self) return own;
  own.flags = ends.own_row;
  own.q_stats = sides.q.stats;
  own.k_stats = sides.k.stats;
  own.scale = static_cast<float>(call_.scale);
  own.head_scale = head_scale;
  return own;
}

// Slots without a token and rows of no item are -1 in what is saved. There are some where calls
// have lengths or packed sequences, and where clusters do not divide the rows.
void RoutingPass::clear_empty_slots(const RoutingSaved& at, cudaStream_t stream) const {
  const auto gaps = [&](const Sequences& sequences, std::int64_t rows) {
    return ragged(sequences) ||
           (params_.membership == Membership::balanced && rows % params_.clusters != 0);
  };
  if (!gaps(call_.inputs.q_sequences, call_.N) && !gaps(call_.inputs.k_sequences, call_.S)) return;
  const auto clear = [&](const TensorView& each) {
    if (each.count() > 0)
      COTERIE_CUDA(cudaMemsetAsync(each.data, 0xff, each.count() * sizeof(std::int32_t), stream));
  };
  clear(at.ends);
  const auto clear_slots = [&](const SavedSlots& side) {
    for (const TensorView* each : {&side.first, &side.count, &side.slots}) clear(*each);
  };
  clear_slots(at.q_slots);
  if (!params_.share_qk) clear_slots(at.k_slots);
}

void RoutingPass::attend_lists(const AttentionResult& result, bool ends_there, Arena& arena,
                               cudaStream_t stream) const {
  const RoutingSaved at = tensors_of(result.saved);
  const NormalisedSides sides = saved_sides(at);
  const float* head_scale = floats(call_.inputs.logit_scale);
  RunEnds ends;
  if (!arena.counting()) clear_empty_slots(at, stream);
  if (slots_are_rows()) {
    const ListCall plan =
        list_plan(ends_there, sides, at, head_scale, nullptr, arena, stream, ends);
    if (!arena.counting())
      lists_forward(call_, plan, {result.out, nullptr, floats(at.lse)}, stream);
    return;
  }
  const TokenSlots tokens = query_tokens(at, arena);
  const bool both = !strict_ && !params_.share_qk;  // those of keys are for the backward pass
  const TokenSlots keys = both ? key_tokens(at, arena) : tokens;
  ListCall plan = make_plan(sides, head_scale);
  MemberEnds member_ends{};
  if (!strict_) member_ends = plan_members(ends_there, at, arena, plan);
  find_token_slots(tokens, arena, stream, both ? &keys : nullptr);
  if (strict_)
    plan_runs(ends_there, at, &tokens, arena, stream, plan, ends);
  else
    find_member_ends(member_ends, stream);
  void* slot_out =
      arena.take<std::byte>(query_slots() * call_.Dv * dtype_bytes(call_.inputs.q.dtype));
  float* slot_lse = strict_ ? arena.take<float>(query_slots()) : floats(at.member_lse);
  if (arena.counting()) return;
  ListOutputs outputs;
  outputs.slot_rows = slot_out;
  outputs.lse = slot_lse;
  lists_forward(call_, plan, outputs, stream);
  if (strict_)
    merge_slots(call_, {tokens, slot_out}, slot_lse, own_keys(sides, ends, head_scale), result.out,
                floats(at.lse), stream);
  else
    combine_slots(call_, {tokens, slot_out}, slot_weight(), result.out, floats(at.weights), stream);
}

std::unique_ptr<Pass> make_pass(const RoutingParams& params, const AttentionCall& call) {
  return std::make_unique<RoutingPass>(params, call);
}

}  // namespace coterie::cuda
