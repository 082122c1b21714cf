// SPDX-License-Identifier: MIT
// Routing attention: rows are normalised, and tokens near a centroid attend to each other. top and
// balanced use groups of members, whose outputs are summed per token (engine/members.h); nearest
// uses runs of tokens sorted by cluster, strictly causal (engine/banded.h). Roy et al., "Efficient
// Content-Based Sparse Attention with Routing Transformers", 2021; balanced and nearest are ours.
#include <algorithm>
#include <limits>

#include "core/dispatch.h"
#include "core/parallel.h"
#include "cpu/engine/banded.h"
#include "cpu/engine/members.h"
#include "cpu/mechanisms/attention.h"
#include "cpu/mechanisms/routing.h"

namespace coterie::cpu {

namespace {

// Numbers of slots in the query and key lists of top and balanced.
struct MemberCounts {
  std::int64_t queries, keys;

  MemberCounts(const RoutingParams& params, const AttentionCall& call) {
    const auto width = [&](std::int64_t rows) {
      if (params.membership == Membership::top) return std::min(params.window, rows);
      return (rows + params.clusters - 1) / params.clusters;
    };
    queries = call.num_items() * call.H * params.clusters * width(call.N);
    keys = call.num_items() * call.key_heads * params.clusters * width(call.S);
  }
};

template <class T>
struct MembersForward {
  SlotIndex query_slots;
  T* slot_out;  // (query slots, Dv)

  MembersForward(Arena& arena, const RoutingParams& params, const AttentionCall& call)
      : query_slots(arena, MemberCounts(params, call).queries, call.H, call.B * call.N,
                    call.num_items()),
        slot_out(arena.take<T>(MemberCounts(params, call).queries * call.Dv)) {}
};

template <class T>
struct MembersBackward {
  SlotIndex query_slots, key_slots;
  T *weight, *delta;  // query slots
  SlotGradients<T> slots;

  MembersBackward(Arena& arena, const RoutingParams& params, const AttentionCall& call)
      : query_slots(arena, MemberCounts(params, call).queries, call.H, call.B * call.N,
                    call.num_items()),
        key_slots(arena, MemberCounts(params, call).keys, call.key_heads, call.B * call.S,
                  call.num_items()) {
    const MemberCounts count(params, call);
    weight = arena.take<T>(count.queries);
    delta = arena.take<T>(count.queries);
    slots.dq = arena.take<T>(count.queries * call.Dk);
    slots.dk = arena.take<T>(count.keys * call.Dk);
    slots.dv = arena.take<T>(count.keys * call.Dv);
  }
};

template <class T>
const T* head_scale_of(const AttentionCall& call) {
  return static_cast<const T*>(call.inputs.logit_scale.data);
}

// Factors of the logits for the backward pass, whose own gradient divides by them. A factor of 0 is
// replaced by a number so small that no weight changes.
template <class T>
std::vector<T> nonzero_scale(const AttentionCall& call) {
  const T* scale = head_scale_of<T>(call);
  if (!scale) return {};
  std::vector<T> nonzero(scale, scale + call.H);
  std::replace(nonzero.begin(), nonzero.end(), T(0), static_cast<T>(0x1p-60));
  return nonzero;
}

MemberLists member_lists(const RoutingParams& params, const std::vector<TensorView>& saved) {
  const RoutingSaved at = saved_positions(params);
  return {saved[at.q_members], saved[at.k_members]};
}

// The weight of each of a token's groups in its output.
template <class T>
T slot_weight(const RoutingParams& params, std::int64_t groups_of_token) {
  if (params.membership == Membership::balanced) return T(1);
  // The output of a token in no cluster is 0 for every count_eps.
  if (groups_of_token == 0) return T(0);
  return T(1) / static_cast<T>(static_cast<double>(groups_of_token) + params.count_eps);
}

template <class T>
void attend_groups(const RoutingParams& params, const AttentionCall& call,
                   const AttentionResult& result, MembersForward<T>& workspace,
                   RoutingRows<T>& rows) {
  const AttentionCall normalised = rows.normalise(call);
  GroupPlan<T> plan = member_plan<T>(normalised, member_lists(params, result.saved), params.self);
  plan.head_scale = head_scale_of<T>(call);
  groups_forward(normalised, plan, memory_rows(workspace.slot_out, call.Dv),
                 static_cast<T*>(result.saved[saved_positions(params).member_lse].data),
                 rows.tiles);
  const SlotIndex& index = workspace.query_slots;
  workspace.query_slots.build(plan.queries, query_spans(call));
  const RowSums<T> slots = slot_sums<T>({&index, workspace.slot_out, call.Dv, call.H});
  const RowSums<T> means = [&](const RowTile& tile, T* sums, std::int64_t sums_row) {
    slots(tile, sums, sums_row);
    for (std::int64_t r = 0; r < tile.count; ++r) {
      const TokenSlots own = index.slots_of(tile.item, tile.head, tile.first + r);
      kernels<T>().row_scale(sums + r * sums_row, sums_row, slot_weight<T>(params, own.count()));
    }
  };
  write_sums(means, query_spans(call), result.out, rows.tiles);
}

// weight[slot] of every query slot that is not empty.
template <class T>
void fill_weights(const RoutingParams& params, const SlotIndex& index, T* weight) {
  const SlotSide& side = index.side();
  parallel_for(static_cast<std::int64_t>(side.blocks.size()), [&](std::int64_t number, int) {
    const SlotBlock& block = side.blocks[static_cast<std::size_t>(number)];
    for (std::int64_t slot = 0; slot < block.count; ++slot) {
      if (block.tokens[slot] < 0) continue;
      const TokenSlots own =
          index.slots_of(number / side.heads, number % side.heads, block.tokens[slot]);
      weight[block.first + slot] = slot_weight<T>(params, own.count());
    }
  });
}

// The gradients of normalised rows that the requested gradients need.
WantedGradients wanted_gradients(const RoutingParams& params, const AttentionGradients& gradients) {
  return {gradients.dq.present() || gradients.dlogit_scale.present(),
          gradients.dk.present() || (params.shared() && gradients.dq.present()),
          gradients.dv.present()};
}

template <class T>
void backward_groups(const RoutingParams& params, const AttentionCall& call,
                     const AttentionResult& result, const TensorView& grad_out,
                     const AttentionGradients& gradients, MembersBackward<T>& workspace,
                     RoutingRows<T>& rows) {
  const AttentionCall normalised = rows.normalise(call);
  const std::vector<T> head_scale = nonzero_scale<T>(call);
  GroupPlan<T> plan = member_plan<T>(normalised, member_lists(params, result.saved), params.self);
  plan.head_scale = head_scale.empty() ? nullptr : head_scale.data();
  workspace.query_slots.build(plan.queries, query_spans(call));
  workspace.key_slots.build(plan.keys, key_spans(call));
  fill_weights(params, workspace.query_slots, workspace.weight);
  const auto* lse = static_cast<const T*>(result.saved[saved_positions(params).member_lse].data);
  const auto row_gradients = [&](const T* delta) {
    return token_gradients<T>(normalised, plan, grad_out, {workspace.weight, lse, delta});
  };
  groups_delta(normalised, plan, row_gradients(nullptr), workspace.delta, rows.tiles);
  const WantedGradients wanted = wanted_gradients(params, gradients);
  const SlotGradients<T>& slots = workspace.slots;
  groups_backward(normalised, plan, row_gradients(workspace.delta),
                  {wanted.dq ? slots.dq : nullptr, wanted.dk ? slots.dk : nullptr,
                   wanted.dv ? slots.dv : nullptr},
                  rows.tiles);
  const SlotIndex *queries = &workspace.query_slots, *keys = &workspace.key_slots;
  write_gradients<T>(call, rows,
                     {slot_sums<T>({queries, slots.dq, call.Dk, call.H}),
                      slot_sums<T>({keys, slots.dk, call.Dk, call.key_heads}),
                      slot_sums<T>({keys, slots.dv, call.Dv, call.value_heads})},
                     plan.head_scale, gradients);
}

BandedParams banded_params(const RoutingParams& params) {
  return {params.window, std::min(params.queries_in, params.clusters), params.self,
          params.include_self};
}

BandedRuns banded_runs(const RoutingParams& params, const std::vector<TensorView>& saved) {
  const RoutingSaved at = saved_positions(params);
  return {saved[at.q_order], saved[at.q_offsets], saved[at.k_order], saved[at.k_offsets]};
}

template <class T>
void attend_runs(const RoutingParams& params, const AttentionCall& call,
                 const AttentionResult& result, BandedForward<T>& workspace, RoutingRows<T>& rows) {
  const AttentionCall normalised = rows.normalise(call);
  const BandedProblem<T> problem{normalised, banded_params(params),
                                 banded_runs(params, result.saved), head_scale_of<T>(call)};
  banded_forward(problem, result.out, result.saved[saved_positions(params).lse], workspace,
                 rows.tiles);
}

template <class T>
void backward_runs(const RoutingParams& params, const AttentionCall& call,
                   const AttentionResult& result, const TensorView& grad_out,
                   const AttentionGradients& gradients, BandedBackward<T>& workspace,
                   RoutingRows<T>& rows) {
  const AttentionCall normalised = rows.normalise(call);
  const std::vector<T> head_scale = nonzero_scale<T>(call);
  const BandedProblem<T> problem{normalised, banded_params(params),
                                 banded_runs(params, result.saved),
                                 head_scale.empty() ? nullptr : head_scale.data()};
  const BandedResult forward{result.out, result.saved[saved_positions(params).lse], grad_out};
  const GradientSums<T> sums =
      banded_backward(problem, forward, wanted_gradients(params, gradients), workspace, rows.tiles);
  write_gradients(call, rows, sums, problem.head_scale, gradients);
}

bool strict(const RoutingParams& params) { return params.membership == Membership::nearest; }

template <class T>
std::int64_t needed_bytes(const RoutingParams& params, const AttentionCall& call) {
  Arena select, forward, backward;
  for (Arena* arena : {&select, &forward, &backward}) RoutingRows<T>(*arena, params, call);
  SelectBuffers<T>(select, params, call);
  if (strict(params)) {
    BandedForward<T>(forward, banded_params(params), call);
    BandedBackward<T>(backward, banded_params(params), call);
  } else {
    MembersForward<T>(forward, params, call);
    MembersBackward<T>(backward, params, call);
  }
  return std::max({select.used(), forward.used(), backward.used()});
}

}  // namespace

template <>
std::int64_t workspace_bytes(const RoutingParams& params, const AttentionCall& call) {
  return dispatch_accumulator(call.inputs.q.dtype, [&](auto tag) {
    return needed_bytes<typename decltype(tag)::type>(params, call);
  });
}

template <>
void select(const RoutingParams& params, const AttentionCall& call,
            const std::vector<TensorView>& saved, const Workspace& workspace) {
  Arena arena(call.op, workspace, workspace_bytes(params, call));
  dispatch_accumulator(call.inputs.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    RoutingRows<T> rows(arena, params, call);
    SelectBuffers<T> buffers(arena, params, call);
    routing_select(params, rows.normalise(call), saved, buffers, rows.tiles);
  });
}

template <>
void attend(const RoutingParams& params, const AttentionCall& call, const AttentionResult& result,
            const Workspace& workspace) {
  Arena arena(call.op, workspace, workspace_bytes(params, call));
  dispatch_accumulator(call.inputs.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    RoutingRows<T> rows(arena, params, call);
    if (strict(params)) {
      BandedForward<T> banded(arena, banded_params(params), call);
      attend_runs(params, call, result, banded, rows);
    } else {
      MembersForward<T> members(arena, params, call);
      attend_groups(params, call, result, members, rows);
    }
  });
}

template <>
void backward(const RoutingParams& params, const AttentionCall& call, const AttentionResult& result,
              const TensorView& grad_out, const AttentionGradients& gradients,
              const Workspace& workspace) {
  Arena arena(call.op, workspace, workspace_bytes(params, call));
  dispatch_accumulator(call.inputs.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    RoutingRows<T> rows(arena, params, call);
    if (strict(params)) {
      BandedBackward<T> banded(arena, banded_params(params), call);
      backward_runs(params, call, result, grad_out, gradients, banded, rows);
    } else {
      MembersBackward<T> members(arena, params, call);
      backward_groups(params, call, result, grad_out, gradients, members, rows);
    }
  });
}

}  // namespace coterie::cpu
