// SPDX-License-Identifier: MIT
// Routing attention as a pass: what its files attend_routing*.cu share.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "cuda/api/pass.h"
#include "cuda/api/refusal.h"
#include "cuda/cluster/clustering.h"
#include "cuda/launch/device.h"
#include "cuda/launch/launch.h"
#include "cuda/routing/run_tokens.h"
#include "cuda/routing/slot_tokens.h"
#include "cuda/routing/stages.h"

namespace coterie::cuda {

// The slots of every token, see TokenSlots.
struct SavedSlots {
  TensorView first, count, slots;
};

// The saved tensors by name; those of keys are those of queries where the two are shared. Of a
// selection alone there are only members, or labels, order and offsets.
struct RoutingSaved {
  TensorView q_members, k_members, member_lse;                                 // top, balanced
  TensorView q_labels, k_labels, q_order, q_offsets, k_order, k_offsets, lse;  // nearest
  TensorView q_statistics, k_statistics, ends;
  SavedSlots q_slots, k_slots;  // top, balanced
  TensorView weights;
};

inline RoutingSaved saved_tensors(const RoutingParams& params, bool with_ends,
                                  const std::vector<TensorView>& saved) {
  RoutingSaved at;
  std::size_t next = 0;
  const auto take = [&](TensorView& tensor) {
    if (next < saved.size()) tensor = saved[next++];
  };
  const auto take_pair = [&](TensorView& queries, TensorView& keys) {
    take(queries);
    if (params.share_qk)
      keys = queries;
    else
      take(keys);
  };
  if (params.membership == Membership::nearest) {
    take_pair(at.q_labels, at.k_labels);
    for (TensorView* each : {&at.q_order, &at.q_offsets, &at.k_order, &at.k_offsets, &at.lse})
      take(*each);
  } else {
    take_pair(at.q_members, at.k_members);
    take(at.member_lse);
  }
  take_pair(at.q_statistics, at.k_statistics);
  if (with_ends) take(at.ends);
  if (params.membership == Membership::nearest) return at;
  const auto take_slots = [&](SavedSlots& own) {
    for (TensorView* each : {&own.first, &own.count, &own.slots}) take(*each);
  };
  take_slots(at.q_slots);
  if (params.share_qk)
    at.k_slots = at.q_slots;
  else
    take_slots(at.k_slots);
  take(at.weights);
  return at;
}

inline std::int32_t* ints(const TensorView& tensor) {
  return static_cast<std::int32_t*>(tensor.data);
}
inline float* floats(const TensorView& tensor) { return static_cast<float*>(tensor.data); }

class RoutingPass : public Pass {
 public:
  RoutingPass(const RoutingParams& params, const AttentionCall& call)
      : Pass(call),
        params_(params),
        strict_(params.membership == Membership::nearest),
        per_row_(strict_ ? std::min(params.queries_in, params.clusters) : 1) {}

  std::string refusal() const override {
    const std::int64_t heads = call_.H + call_.key_heads + call_.value_heads;
    for (const std::string& reason :
         {refuse_more_than(kMaxClusters, "clusters", params_.clusters), refuse_batches(call_.B),
          refuse_more_than(kMaxBlocks, "heads of q, k and v together", heads),
          refuse_lists(call_.num_items() * (call_.H + call_.key_heads) * params_.clusters),
          refuse_slots(strict_ ? call_.N * per_row_
                               : params_.clusters * width(std::max(call_.N, call_.S)))})
      if (!reason.empty()) return reason;
    return "";
  }

  std::int64_t workspace_bytes() const override {
    Arena select, attend, backward;
    select_lists(own_sides(select), {}, select, nullptr);
    attend_lists({}, false, attend, nullptr);
    Gradients all;
    all.wanted = {true, true, true};
    backward_lists(all, backward, nullptr);
    return std::max({select.used(), attend.used(), backward.used()});
  }

  void select(const std::vector<TensorView>& saved, const Workspace& workspace) const override {
    Arena arena = take_workspace(workspace);
    const NormalisedSides sides = own_sides(arena);
    select_lists(sides, saved, arena, stream_of(workspace));
  }

  void attend(const AttentionResult& result, const Workspace& workspace) const override {
    statistics(saved_sides(tensors_of(result.saved)), stream_of(workspace));
    Arena arena = take_workspace(workspace);
    attend_lists(result, false, arena, stream_of(workspace));
  }

  // One computation of the rows' statistics serves both.
  void forward(const AttentionResult& result, const Workspace& workspace) const override {
    Arena arena = take_workspace(workspace);
    Arena scratch = arena;  // the selection's memory is free again afterwards
    select_lists(saved_sides(tensors_of(result.saved)), result.saved, scratch,
                 stream_of(workspace));
    attend_lists(result, scan_has_ends(), arena, stream_of(workspace));
  }

  void backward(const AttentionResult& result, const TensorView& grad_out,
                const AttentionGradients& gradients, const Workspace& workspace) const override;

 private:
  struct NormalisedSides {
    RoutingSide q, k;
  };
  RoutingSaved tensors_of(const std::vector<TensorView>& saved) const {
    const bool shared = params_.share_qk && per_row_ == 1;
    return saved_tensors(params_, !shared && (strict_ || call_.causal), saved);
  }
  // Which gradients of normalised rows and values the wanted gradients are made of.
  struct Wanted {
    bool dq, dk, dv;
  };
  struct Gradients {
    const AttentionResult* result = nullptr;
    TensorView grad_out;
    AttentionGradients gradients;
    Wanted wanted;
  };

  // For a selection alone: with statistics in the workspace where it needs them.
  NormalisedSides own_sides(Arena& arena) const {
    NormalisedSides sides{query_side(call_, params_.clusters), key_side(call_, params_.clusters)};
    if (strict_) return sides;
    sides.q.stats = arena.take<RowStatistics>(sides.q.count());
    sides.k.stats = params_.share_qk ? sides.q.stats : arena.take<RowStatistics>(sides.k.count());
    return sides;
  }
  NormalisedSides saved_sides(const RoutingSaved& at) const {
    NormalisedSides sides{query_side(call_, params_.clusters), key_side(call_, params_.clusters)};
    sides.q.stats = statistics_of(at.q_statistics);
    sides.k.stats = statistics_of(at.k_statistics);
    return sides;
  }
  RowStatistics* statistics_of(const TensorView& saved) const {
    if (reinterpret_cast<std::uintptr_t>(saved.data) % sizeof(RowStatistics) != 0)
      fail_alignment(call_.op, "saved statistics", sizeof(RowStatistics));
    return static_cast<RowStatistics*>(saved.data);
  }
  void statistics(const NormalisedSides& sides, cudaStream_t stream) const {
    row_statistics(call_, sides.q, params_.share_qk ? nullptr : &sides.k, stream);
  }

  // Whether the nearest clusters are found by tensor cores.
  bool scans() const {
    return call_.inputs.q.dtype == DType::bf16 && per_row_ == 1 && on_hopper() && call_.N > 0 &&
           scan_fits(call_, params_.clusters);
  }
  // Whether a forward pass has its ends from there.
  bool scan_has_ends() const {
    return strict_ && scans() && !params_.share_qk && !params_.include_self && !demotes() &&
           scan_finds_ends(call_);
  }
  // Also the statistics of the sides, if they have room for them.
  void select_lists(const NormalisedSides& sides, const std::vector<TensorView>& saved,
                    Arena& arena, cudaStream_t stream) const;
  void scan(const NormalisedSides& sides, const CentredCentroids& centroids, const RoutingSaved& at,
            unsigned* arrivals, Arena& arena, cudaStream_t stream) const;
  void sum_and_sort(const NormalisedSides& sides, const CentredCentroids& centroids,
                    const RoutingSaved& at, unsigned* arrivals, Arena& arena,
                    cudaStream_t stream) const;
  void select_members(const NormalisedSides& sides, const CentredCentroids& centroids,
                      const RoutingSaved& at, unsigned* arrivals, Arena& arena,
                      cudaStream_t stream) const;

  // Rows of a side's lists: members of a list, as attention_saved says.
  std::int64_t width(std::int64_t rows) const {
    return params_.membership == Membership::top ? std::min(params_.window, rows)
                                                 : (rows + params_.clusters - 1) / params_.clusters;
  }
  std::int64_t query_slots() const {
    return strict_ ? call_.B * call_.H * call_.N * per_row_
                   : call_.num_items() * call_.H * params_.clusters * width(call_.N);
  }
  std::int64_t key_slots() const {
    return strict_ ? call_.B * call_.key_heads * call_.S
                   : call_.num_items() * call_.key_heads * params_.clusters * width(call_.S);
  }
  // Members have their slots saved; those of several runs a query are found in each pass.
  TokenSlots query_tokens(const RoutingSaved& at, Arena& arena) const {
    if (strict_)
      return make_token_slots(arena, call_.inputs.q_sequences, call_.B, call_.N, call_.H,
                              ints(at.q_order), 0, per_row_, params_.clusters, ints(at.q_offsets));
    return member_tokens(call_.inputs.q_sequences, call_.N, call_.H, at.q_members, at.q_slots);
  }
  TokenSlots key_tokens(const RoutingSaved& at, Arena& arena) const {
    if (strict_)
      return make_token_slots(arena, call_.inputs.k_sequences, call_.B, call_.S, call_.key_heads,
                              ints(at.k_order), 0, 1, params_.clusters, ints(at.k_offsets));
    return member_tokens(call_.inputs.k_sequences, call_.S, call_.key_heads, at.k_members,
                         at.k_slots);
  }
  TokenSlots member_tokens(const Sequences& sequences, std::int64_t rows, std::int64_t heads,
                           const TensorView& members, const SavedSlots& saved) const {
    TokenSlots tokens = make_single_slots(sequences, call_.B, rows, heads, ints(members));
    tokens.per_row = 0;
    tokens.block = params_.clusters * width(rows);
    tokens.lists = static_cast<int>(params_.clusters);
    tokens.first = ints(saved.first);
    tokens.count = ints(saved.count);
    tokens.slots = ints(saved.slots);
    return tokens;
  }
  TokenSlots single_queries(const RoutingSaved& at) const {
    return make_single_slots(call_.inputs.q_sequences, call_.B, call_.N, call_.H, ints(at.q_order));
  }
  TokenSlots single_keys(const RoutingSaved& at) const {
    return make_single_slots(call_.inputs.k_sequences, call_.B, call_.S, call_.key_heads,
                             ints(at.k_order));
  }
  // Top: with many clusters most tokens are in none, as a rule.
  bool mostly_empty() const {
    return params_.membership == Membership::top && params_.clusters >= 32;
  }
  bool demotes() const { return params_.self == SelfAttention::demote; }
  // Whether outputs of slots are those of rows.
  bool slots_are_rows() const { return strict_ && per_row_ == 1 && !params_.include_self; }
  SlotWeight slot_weight() const {
    return {params_.membership == Membership::top, static_cast<float>(params_.count_eps)};
  }

  ListCall make_plan(const NormalisedSides& sides, const float* head_scale) const {
    ListCall plan;
    plan.lists = params_.clusters;
    plan.queries.index_heads = static_cast<int>(call_.H);
    plan.keys.index_heads = static_cast<int>(call_.key_heads);
    plan.scale = static_cast<float>(call_.scale);
    plan.head_scale = head_scale;
    plan.q_stats = sides.q.stats;
    plan.k_stats = sides.k.stats;
    return plan;
  }

  void clear_empty_slots(const RoutingSaved& at, cudaStream_t stream) const;
  // The lists of the call. Launches what ranges and filters need; ends may be there already.
  // `tokens` are the queries'.
  ListCall list_plan(bool ends_there, const NormalisedSides& sides, const RoutingSaved& at,
                     const float* head_scale, const TokenSlots* tokens, Arena& arena,
                     cudaStream_t stream, RunEnds& ends) const;
  void plan_runs(bool ends_there, const RoutingSaved& at, const TokenSlots* tokens, Arena& arena,
                 cudaStream_t stream, ListCall& plan, RunEnds& ends) const;
  // Returns what is to be found yet.
  MemberEnds plan_members(bool ends_there, const RoutingSaved& at, Arena& arena,
                          ListCall& plan) const;
  OwnKeys own_keys(const NormalisedSides& sides, const RunEnds& ends,
                   const float* head_scale) const;
  void attend_lists(const AttentionResult& result, bool ends_there, Arena& arena,
                    cudaStream_t stream) const;
  // Deltas and the weights of own keys, where queries have several parts.
  void merge_parts(const RoutingSaved& at, const TokenSlots& tokens, const ListCall& plan,
                   const TensorView& grad_out, Arena& arena, cudaStream_t stream,
                   ListGradients& lists, OwnKeys& own) const;
  void backward_lists(const Gradients& pass, Arena& arena, cudaStream_t stream) const;
  // From slots, see token_gradients; those without values are in place already.
  void write_gradients(const NormalisedSides& sides, const Gradients& pass, bool rounded,
                       const SlotRows& dq, const SlotRows& dk, const SlotRows& dv,
                       const OwnKeys& own, float* products, cudaStream_t stream) const;

  const RoutingParams& params_;
  const bool strict_;
  const std::int64_t per_row_;
};

}  // namespace coterie::cuda
