// SPDX-License-Identifier: MIT
// Routing attention: rows are normalised, tokens near a centroid attend to each other. top and
// balanced: groups of members, whose outputs add up per token; nearest: runs of tokens sorted by
// cluster, strictly causal. Roy et al., "Efficient Content-Based Sparse Attention with Routing
// Transformers", 2021; balanced and nearest are ours.
#include <algorithm>

#include "cuda/attention.h"
#include "cuda/cluster.h"
#include "cuda/launch.h"
#include "cuda/refusal.h"
#include "cuda/routing.h"
#include "cuda/routing_tokens.h"
#include "cuda/slot_tokens.h"

namespace coterie::cuda {

namespace {

// The saved tensors by name; those of keys are those of queries where the two are shared.
struct RoutingSaved {
  TensorView q_members, k_members, member_lse;             // top, balanced
  TensorView q_order, q_offsets, k_order, k_offsets, lse;  // nearest
  TensorView q_labels, k_labels;
};

RoutingSaved saved_tensors(const RoutingParams& params, const std::vector<TensorView>& saved) {
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
    take_pair(at.q_labels, at.k_labels);
    take(at.member_lse);
  }
  return at;
}

std::int32_t* ints(const TensorView& tensor) { return static_cast<std::int32_t*>(tensor.data); }
float* floats(const TensorView& tensor) { return static_cast<float*>(tensor.data); }

class RoutingPass : public Pass {
 public:
  RoutingPass(const RoutingParams& params, const AttentionCall& call)
      : Pass(call),
        params_(params),
        strict_(params.membership == Membership::nearest),
        per_row_(strict_ ? std::min(params.queries_in, params.clusters) : 1) {}

  std::string refusal() const override {
    return refuse_more_than(kMaxClusters, "clusters", params_.clusters);
  }

  std::int64_t workspace_bytes() const override {
    Arena select, attend, backward;
    select_lists(take_rows(select), {}, select, nullptr);
    attend_lists(take_rows(attend), {}, attend, nullptr);
    Gradients all;
    all.wanted = {true, true, true};
    backward_lists(take_rows(backward), all, backward, nullptr);
    return std::max({select.used(), attend.used(), backward.used()});
  }

  void select(const std::vector<TensorView>& saved, const Workspace& workspace) const override {
    Arena arena = take_workspace(workspace);
    const NormalisedSides sides = take_rows(arena);
    if (!strict_) statistics(sides, stream_of(workspace));
    select_lists(sides, saved, arena, stream_of(workspace));
  }

  void attend(const AttentionResult& result, const Workspace& workspace) const override {
    Arena arena = take_workspace(workspace);
    const NormalisedSides sides = take_rows(arena);
    statistics(sides, stream_of(workspace));
    attend_lists(sides, result, arena, stream_of(workspace));
  }

  // One computation of the rows' statistics serves both.
  void forward(const AttentionResult& result, const Workspace& workspace) const override {
    Arena arena = take_workspace(workspace);
    const NormalisedSides sides = take_rows(arena);
    statistics(sides, stream_of(workspace));
    Arena scratch = arena;  // the selection's memory is free again afterwards
    select_lists(sides, result.saved, scratch, stream_of(workspace));
    attend_lists(sides, result, arena, stream_of(workspace));
  }

  void backward(const AttentionResult& result, const TensorView& grad_out,
                const AttentionGradients& gradients, const Workspace& workspace) const override {
    Arena arena = take_workspace(workspace);
    const NormalisedSides sides = take_rows(arena);
    statistics(sides, stream_of(workspace));
    const bool dq = gradients.dq.present();
    const Gradients pass{
        &result,
        grad_out,
        gradients,
        {dq || gradients.dlogit_scale.present(), gradients.dk.present() || (params_.share_qk && dq),
         gradients.dv.present()}};
    backward_lists(sides, pass, arena, stream_of(workspace));
  }

 private:
  struct NormalisedSides {
    RoutingSide q, k;
  };
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

  NormalisedSides take_rows(Arena& arena) const {
    NormalisedSides sides{query_side(call_, params_.clusters), key_side(call_, params_.clusters)};
    sides.q.stats = arena.take<RowStatistics>(sides.q.count());
    sides.k.stats = params_.share_qk ? sides.q.stats : arena.take<RowStatistics>(sides.k.count());
    return sides;
  }
  void statistics(const NormalisedSides& sides, cudaStream_t stream) const {
    row_statistics(call_, sides.q, params_.share_qk ? nullptr : &sides.k, stream);
  }

  void select_lists(const NormalisedSides& sides, const std::vector<TensorView>& saved,
                    Arena& arena, cudaStream_t stream) const {
    const RoutingSaved at = saved_tensors(params_, saved);
    const CentredCentroids centroids(arena, call_, params_.clusters);
    const SelectCounters counters(arena, call_);
    if (centroids.rows) centre_centroids(call_, centroids, counters.words, stream);
    NearestClusters queries{ints(at.q_labels), nullptr, static_cast<int>(per_row_)};
    const NearestClusters keys{ints(at.k_labels), nullptr, 1};
    if (per_row_ > 1) queries.clusters = arena.take<std::int32_t>(sides.q.count() * per_row_);
    nearest(sides, centroids, counters, queries, keys, arena, stream);
    if (strict_) {
      SortSide q{sides.q,
                 per_row_ > 1 ? queries.clusters : queries.labels,
                 queries.per_row,
                 {ints(at.q_order), ints(at.q_offsets)},
                 {}};
      const SortSide k{sides.k, keys.labels, 1, {ints(at.k_order), ints(at.k_offsets)}, {}};
      const bool same = params_.share_qk && per_row_ == 1;
      if (same) q.copy = k.runs;
      sort_runs(q, same ? nullptr : &k, counters.arrivals, arena, stream);
    } else {
      select_members(sides, centroids, at, arena, stream);
    }
  }

  void select_members(const NormalisedSides& sides, const CentredCentroids& centroids,
                      const RoutingSaved& at, Arena& arena, cudaStream_t stream) const {
    const bool shared = params_.share_qk;
    if (params_.membership == Membership::balanced) {
      select_balanced(call_, sides.q, centroids, at.q_members, arena, stream);
      if (!shared) select_balanced(call_, sides.k, centroids, at.k_members, arena, stream);
      return;
    }
    const TopSide q{sides.q, width(call_.N), at.q_members};
    const TopSide k{sides.k, width(call_.S), at.k_members};
    select_top(call_, centroids, q, shared ? nullptr : &k, arena, stream);
  }

  void nearest(const NormalisedSides& sides, const CentredCentroids& centroids,
               const SelectCounters& counters, const NearestClusters& queries,
               const NearestClusters& keys, Arena& arena, cudaStream_t stream) const {
    const bool shared = params_.share_qk;
    if (sides.q.rows.dtype != DType::bf16 || per_row_ > 1) {
      nearest_exact(call_, sides.q, centroids, queries, arena, stream);
      if (!shared) nearest_exact(call_, sides.k, centroids, keys, arena, stream);
      return;
    }
    const ScanSide q{sides.q, queries.labels, counters.open_queries,
                     arena.take<std::int32_t>(sides.q.count())};
    const ScanSide k{sides.k, keys.labels, counters.open_keys,
                     shared ? nullptr : arena.take<std::int32_t>(sides.k.count())};
    if (!queries.labels) return;
    nearest_scan(call_, centroids, q, shared ? nullptr : &k, stream);
    nearest_open(call_, centroids, q, shared ? nullptr : &k, stream);
  }

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
  TokenSlots query_tokens(const RoutingSaved& at, Arena& arena) const {
    return make_token_slots(arena, call_.inputs.q_sequences, call_.B, call_.N, call_.H,
                            ints(strict_ ? at.q_order : at.q_members),
                            strict_ ? 0 : params_.clusters * width(call_.N),
                            strict_ ? per_row_ : 0);
  }
  TokenSlots key_tokens(const RoutingSaved& at, Arena& arena) const {
    return make_token_slots(arena, call_.inputs.k_sequences, call_.B, call_.S, call_.key_heads,
                            ints(strict_ ? at.k_order : at.k_members),
                            strict_ ? 0 : params_.clusters * width(call_.S), strict_ ? 1 : 0);
  }
  TokenSlots single_queries(const RoutingSaved& at) const {
    return make_single_slots(call_.inputs.q_sequences, call_.B, call_.N, call_.H, ints(at.q_order));
  }
  TokenSlots single_keys(const RoutingSaved& at) const {
    return make_single_slots(call_.inputs.k_sequences, call_.B, call_.S, call_.key_heads,
                             ints(at.k_order));
  }
  bool demotes() const { return params_.self == SelfAttention::demote; }
  // Whether outputs of slots are those of rows.
  bool slots_are_rows() const { return strict_ && per_row_ == 1 && !params_.include_self; }
  SlotWeight slot_weight() const {
    return {params_.membership == Membership::top, static_cast<float>(params_.count_eps)};
  }

  ListPlan make_plan(const NormalisedSides& sides, const float* head_scale) const {
    ListPlan plan;
    plan.lists = params_.clusters;
    plan.queries.index_heads = static_cast<int>(call_.H);
    plan.keys.index_heads = static_cast<int>(call_.key_heads);
    plan.scale = static_cast<float>(call_.scale);
    plan.head_scale = head_scale;
    plan.q_stats = sides.q.stats;
    plan.k_stats = sides.k.stats;
    return plan;
  }

  // The lists of the call. Launches what ranges and filters need; `tokens` are the queries'.
  ListPlan list_plan(const NormalisedSides& sides, const RoutingSaved& at, const float* head_scale,
                     const TokenSlots* tokens, Arena& arena, cudaStream_t stream,
                     RunEnds& ends) const {
    ListPlan plan = make_plan(sides, head_scale);
    if (strict_)
      plan_runs(at, tokens, arena, stream, plan, ends);
    else
      plan_members(at, arena, stream, plan);
    return plan;
  }

  void plan_runs(const RoutingSaved& at, const TokenSlots* tokens, Arena& arena,
                 cudaStream_t stream, ListPlan& plan, RunEnds& ends) const {
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
    if (ranks && !demotes()) return;
    ends = RunEnds(arena, params_, call_);
    plan.ranges.ends = ends.ends;
    if (demotes()) plan.filters.drop_own = ends.own_row;
    if (!ends.ends) return;
    find_run_ends(params_, call_, {ints(at.q_order), ints(at.q_offsets)},
                  {ints(at.k_order), ints(at.k_offsets)}, tokens, ends, stream);
  }

  void plan_members(const RoutingSaved& at, Arena& arena, cudaStream_t stream,
                    ListPlan& plan) const {
    plan.queries.layout = plan.keys.layout = ListLayout::members;
    plan.queries.index = ints(at.q_members);
    plan.queries.width = width(call_.N);
    plan.keys.index = ints(at.k_members);
    plan.keys.width = width(call_.S);
    std::int32_t* ends = nullptr;
    std::uint8_t* flags = nullptr;
    if (call_.causal) {
      plan.ranges.rule = params_.share_qk ? ListRule::causal : ListRule::ends;
      if (!params_.share_qk) ends = arena.take<std::int32_t>(query_slots());
      plan.ranges.window = call_.N + call_.S;
      plan.ranges.ends = ends;
    }
    if (demotes()) {
      flags = arena.take<std::uint8_t>(query_slots());
      plan.filters.drop_own = flags;
      plan.filters.drop_by_slot = true;
    }
    find_member_ends(call_, at.q_members, at.k_members, ends, flags, stream);
  }

  OwnKeys own_keys(const NormalisedSides& sides, const RunEnds& ends,
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

  void attend_lists(const NormalisedSides& sides, const AttentionResult& result, Arena& arena,
                    cudaStream_t stream) const {
    const RoutingSaved at = saved_tensors(params_, result.saved);
    const bool counting = !sides.q.stats;
    const float* head_scale = floats(call_.inputs.logit_scale);
    RunEnds ends;
    if (slots_are_rows()) {
      const ListPlan plan = list_plan(sides, at, head_scale, nullptr, arena, stream, ends);
      if (!counting) lists_forward(call_, plan, {result.out, nullptr, floats(at.lse)}, stream);
      return;
    }
    const TokenSlots tokens = query_tokens(at, arena);
    find_token_slots(tokens, call_.B, arena, stream);
    const ListPlan plan = list_plan(sides, at, head_scale, &tokens, arena, stream, ends);
    auto* slot_out = arena.take<float>(query_slots() * call_.Dv);
    float* slot_lse = strict_ ? arena.take<float>(query_slots()) : floats(at.member_lse);
    if (counting) return;
    lists_forward(call_, plan, {{}, slot_out, slot_lse}, stream);
    if (strict_)
      merge_slots(call_, {tokens, slot_out}, slot_lse, own_keys(sides, ends, head_scale),
                  result.out, floats(at.lse), stream);
    else
      combine_slots(call_, {tokens, slot_out}, slot_weight(), result.out, stream);
  }

  // Deltas and the weights of own keys, where queries have several parts.
  void merge_parts(const RoutingSaved& at, const TokenSlots& tokens, const ListPlan& plan,
                   const TensorView& grad_out, Arena& arena, cudaStream_t stream,
                   ListGradients& lists, OwnKeys& own) const {
    const std::int64_t rows = call_.B * call_.H * call_.N;
    auto* parts = arena.take<float>(query_slots());
    auto* delta = arena.take<float>(rows);
    if (params_.include_self) {
      own.weight = arena.take<float>(rows);
      own.dlogit = arena.take<float>(rows);
    }
    if (!parts) return;
    lists_delta(call_, plan, lists, parts, stream);
    merge_deltas(call_, tokens, parts, floats(at.lse), grad_out, own, delta, stream);
    lists.delta = {delta, false};
  }

  void backward_lists(const NormalisedSides& sides, const Gradients& pass, Arena& arena,
                      cudaStream_t stream) const {
    const bool counting = !sides.q.stats;
    const RoutingSaved at =
        saved_tensors(params_, pass.result ? pass.result->saved : std::vector<TensorView>{});
    float* head_scale = nullptr;
    if (call_.inputs.logit_scale.present()) {
      head_scale = arena.take<float>(call_.H);
      if (!counting) nonzero_scale(call_, head_scale, stream);
    }
    const bool single = slots_are_rows(),
               value_rows = single && call_.key_heads == call_.value_heads;
    const TokenSlots queries = single ? single_queries(at) : query_tokens(at, arena);
    const TokenSlots keys = single ? single_keys(at) : key_tokens(at, arena);
    TokenSlots values = keys;
    if (single && !value_rows) values = key_tokens(at, arena);
    if (!single) find_token_slots(queries, call_.B, arena, stream);
    if (!value_rows) find_token_slots(values, call_.B, arena, stream);
    RunEnds ends;
    const ListPlan plan = list_plan(sides, at, head_scale, &queries, arena, stream, ends);
    OwnKeys own = own_keys(sides, ends, head_scale);

    ListGradients lists;
    lists.grad_out = pass.grad_out;
    if (strict_) {
      lists.lse = {floats(at.lse), false};
    } else {
      auto* weights = arena.take<float>(call_.B * call_.H * call_.N);
      if (weights) slot_weights(call_, queries, slot_weight(), weights, stream);
      lists.weight = {weights, false};
      lists.lse = {floats(at.member_lse), true};
    }
    if (strict_ && !slots_are_rows())
      merge_parts(at, queries, plan, pass.grad_out, arena, stream, lists, own);
    // The engine carries gradients of rows back through the normalisation.
    const bool rows = single && !params_.share_qk && pass.gradients.dq.present();
    float* products = nullptr;
    if (call_.inputs.logit_scale.present())
      products = arena.take<float>(call_.B * call_.H * call_.N);
    if (rows) {
      lists.normalise = true;
      lists.dq = pass.gradients.dq;
      lists.dk = pass.gradients.dk;
      lists.dq_products = pass.gradients.dlogit_scale.present() ? products : nullptr;
    } else {
      if (pass.wanted.dq) lists.slot_dq = arena.take<float>(query_slots() * call_.Dk);
      if (pass.wanted.dk) lists.slot_dk = arena.take<float>(key_slots() * call_.Dk);
    }
    if (value_rows)
      lists.dv = pass.gradients.dv;
    else if (pass.wanted.dv)
      lists.slot_dv = arena.take<float>(key_slots() * call_.Dv);
    lists_backward(call_, plan, lists, arena, stream);
    if (counting) return;
    write_gradients(sides, pass, {queries, lists.slot_dq}, {keys, lists.slot_dk},
                    {values, lists.slot_dv}, own, products, stream);
    if (pass.gradients.dlogit_scale.present())
      logit_scale_gradient(call_, products, head_scale, pass.gradients.dlogit_scale, stream);
  }

  // From slots; those without values are in place already.
  void write_gradients(const NormalisedSides& sides, const Gradients& pass, const SlotRows& dq,
                       const SlotRows& dk, const SlotRows& dv, const OwnKeys& own, float* products,
                       cudaStream_t stream) const {
    const AttentionGradients& gradients = pass.gradients;
    const ItemSpans spans = item_spans(call_.inputs);
    if (dq.values) {
      TokenGradient queries{dq, {}, call_.inputs.q, sides.q.stats, gradients.dq};
      if (params_.share_qk && gradients.dq.present()) queries.second = dk;
      queries.own_factor = own.dlogit;
      queries.own_rows = call_.k;
      queries.own_spans = spans.k;
      queries.own_stats = own.k_stats;
      if (gradients.dlogit_scale.present()) queries.products = products;
      token_gradients(call_, queries, stream);
    }
    if (dk.values && gradients.dk.present()) {
      TokenGradient keys{dk, {}, call_.k, sides.k.stats, gradients.dk};
      keys.own_factor = own.dlogit;
      keys.own_rows = call_.inputs.q;
      keys.own_spans = spans.q;
      keys.own_stats = own.q_stats;
      token_gradients(call_, keys, stream);
    }
    if (dv.values) {
      TokenGradient values{dv, {}, {}, nullptr, gradients.dv};
      values.own_factor = own.weight;
      values.own_rows = pass.grad_out;
      values.own_spans = spans.q;
      token_gradients(call_, values, stream);
    }
  }

  const RoutingParams& params_;
  const bool strict_;
  const std::int64_t per_row_;
};

}  // namespace

std::unique_ptr<Pass> make_pass(const RoutingParams& params, const AttentionCall& call) {
  return std::make_unique<RoutingPass>(params, call);
}

}  // namespace coterie::cuda
