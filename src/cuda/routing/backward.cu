// SPDX-License-Identifier: MIT
// Routing: gradients, from those of lists.
#include "cuda/routing/pass.h"

namespace coterie::cuda {

void RoutingPass::backward(const AttentionResult& result, const TensorView& grad_out,
                           const AttentionGradients& gradients, const Workspace& workspace) const {
  Arena arena = take_workspace(workspace);
  const bool dq = gradients.dq.present();
  const Gradients pass{
      &result,
      grad_out,
      gradients,
      {dq || gradients.dlogit_scale.present(), gradients.dk.present() || (params_.share_qk && dq),
       gradients.dv.present()}};
  backward_lists(pass, arena, stream_of(workspace));
}

void RoutingPass::merge_parts(const RoutingSaved& at, const TokenSlots& tokens,
                              const ListCall& plan, const TensorView& grad_out, Arena& arena,
                              cudaStream_t stream, ListGradients& lists, OwnKeys& own) const {
  const std::int64_t rows = call_.B * call_.H * call_.N;
  auto* parts = arena.take<float>(query_slots());
  auto* delta = arena.take<float>(rows);
  if (params_.include_self) {
    own.weight = arena.take<float>(rows);
    own.dlogit = arena.take<float>(rows);
  }
  if (arena.counting()) return;
  lists_delta(call_, plan, lists, parts, stream);
  merge_deltas(call_, tokens, parts, floats(at.lse), grad_out, own, delta, stream);
  lists.delta = {delta, false};
}

void RoutingPass::backward_lists(const Gradients& pass, Arena& arena, cudaStream_t stream) const {
  const RoutingSaved at = tensors_of(pass.result ? pass.result->saved : std::vector<TensorView>{});
  const NormalisedSides sides = saved_sides(at);
  float* head_scale = nullptr;
  if (call_.inputs.logit_scale.present()) {
    head_scale = arena.take<float>(call_.H);
    if (!arena.counting()) nonzero_scale(call_, head_scale, stream);
  }
  const bool single = slots_are_rows(), value_rows = single && call_.key_heads == call_.value_heads;
  const TokenSlots queries = single ? single_queries(at) : query_tokens(at, arena);
  const TokenSlots keys = single ? single_keys(at) : key_tokens(at, arena);
  TokenSlots values = keys;
  if (single && !value_rows) values = key_tokens(at, arena);
  if (strict_ && !single)
    find_token_slots(queries, arena, stream, &values);
  else if (single && !value_rows)
    find_token_slots(values, arena, stream);
  RunEnds ends;
  const ListCall plan = list_plan(true, sides, at, head_scale, &queries, arena, stream, ends);
  OwnKeys own = own_keys(sides, ends, head_scale);

  ListGradients lists;
  lists.grad_out = pass.grad_out;
  if (strict_) {
    lists.lse = {floats(at.lse), false};
  } else {
    lists.weight = {floats(at.weights), false};
    lists.lse = {floats(at.member_lse), true};
  }
  if (strict_ && !slots_are_rows())
    merge_parts(at, queries, plan, pass.grad_out, arena, stream, lists, own);
  // The engine carries gradients of rows back through the normalisation; those of members slot by
  // slot, because it is linear, and then they may be rounded.
  const bool rows = single && !params_.share_qk && pass.gradients.dq.present();
  const bool rounded = !strict_ && !params_.share_qk && call_.key_heads == call_.value_heads &&
                       !call_.inputs.logit_scale.present();
  lists.normalise = rows || rounded;
  lists.slots_rounded = rounded;
  float* products = nullptr;
  if (call_.inputs.logit_scale.present()) products = arena.take<float>(call_.B * call_.H * call_.N);
  const auto take_slots = [&](std::int64_t count, std::int64_t width) -> void* {
    return arena.take<std::byte>(
        count * width *
        static_cast<std::int64_t>(rounded ? dtype_bytes(call_.inputs.q.dtype) : sizeof(float)));
  };
  if (rows) {
    lists.dq = pass.gradients.dq;
    lists.dk = pass.gradients.dk;
    lists.dq_products = pass.gradients.dlogit_scale.present() ? products : nullptr;
  } else {
    if (pass.wanted.dq) lists.slot_dq = take_slots(query_slots(), call_.Dk);
    if (pass.wanted.dk) lists.slot_dk = take_slots(key_slots(), call_.Dk);
  }
  if (value_rows)
    lists.dv = pass.gradients.dv;
  else if (pass.wanted.dv)
    lists.slot_dv = take_slots(key_slots(), call_.Dv);
  if (rounded && mostly_empty())
    lists.cleared = {pass.gradients.dq, pass.gradients.dk, pass.gradients.dv};
  const bool cleared = lists_backward(call_, plan, lists, arena, stream);
  if (arena.counting()) return;
  const SlotRows dq{queries, lists.slot_dq, cleared}, dk{keys, lists.slot_dk, cleared},
      dv{values, lists.slot_dv, cleared};
  write_gradients(sides, pass, rounded, dq, dk, dv, own, products, stream);
  if (pass.gradients.dlogit_scale.present())
    logit_scale_gradient(call_, products, head_scale, pass.gradients.dlogit_scale, stream);
}

void RoutingPass::write_gradients(const NormalisedSides& sides, const Gradients& pass, bool rounded,
                                  const SlotRows& dq, const SlotRows& dk, const SlotRows& dv,
                                  const OwnKeys& own, float* products, cudaStream_t stream) const {
  const AttentionGradients& gradients = pass.gradients;
  const ItemSpans spans = item_spans(call_.inputs);
  std::vector<TokenGradient> all;
  if (dq.values) {
    TokenGradient queries{dq, {}, call_.inputs.q, sides.q.stats, gradients.dq};
    if (params_.share_qk && gradients.dq.present()) queries.second = dk;
    queries.own_factor = own.dlogit;
    queries.own_rows = call_.k;
    queries.own_spans = spans.k;
    queries.own_stats = own.k_stats;
    if (gradients.dlogit_scale.present()) queries.products = products;
    all.push_back(queries);
  }
  if (dk.values && gradients.dk.present()) {
    TokenGradient keys{dk, {}, call_.k, sides.k.stats, gradients.dk};
    keys.own_factor = own.dlogit;
    keys.own_rows = call_.inputs.q;
    keys.own_spans = spans.q;
    keys.own_stats = own.q_stats;
    all.push_back(keys);
  }
  if (dv.values) {
    TokenGradient values{dv, {}, {}, nullptr, gradients.dv};
    values.own_factor = own.weight;
    values.own_rows = pass.grad_out;
    values.own_spans = spans.q;
    all.push_back(values);
  }
  token_gradients(call_, all, rounded, stream);
}

}  // namespace coterie::cuda
