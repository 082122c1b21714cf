// SPDX-License-Identifier: MIT
// Routing attention: rows are normalised, tokens near a centroid attend to each other. top and
// balanced: groups of members, whose outputs add up per token; nearest: runs of tokens sorted by
// cluster, strictly causal. Roy et al., "Efficient Content-Based Sparse Attention with Routing
// Transformers", 2021; balanced and nearest are ours.
//
// A pass is a sequence of stages, chosen by RoutingPlan:
//   select     centred centroids; then one of RoutingSelection
//   attend     slots of tokens and what queries see (ends.cu); lists_forward; slots to tokens
//   backward   lists_backward; slots to tokens, then through the normalisation (tokens.cu)
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "cuda/api/pass.h"
#include "cuda/api/refusal.h"
#include "cuda/cluster/clustering.h"
#include "cuda/launch/launch.h"
#include "cuda/lists/slot_sum.h"
#include "cuda/routing/plan.h"
#include "cuda/routing/stages.h"

namespace coterie::cuda {

namespace {

std::int32_t* ints(const TensorView& tensor) { return static_cast<std::int32_t*>(tensor.data); }
float* floats(const TensorView& tensor) { return static_cast<float*>(tensor.data); }

class RoutingPass : public Pass {
 public:
  RoutingPass(const RoutingParams& params, const AttentionCall& call)
      : Pass(call), params_(params), plan_(params, call) {}

  std::string refusal() const override {
    const std::int64_t heads = call_.H + call_.key_heads + call_.value_heads;
    for (const std::string& reason :
         {refuse_more_than(kMaxClusters, "clusters", params_.clusters), refuse_batches(call_.B),
          refuse_more_than(kMaxBlocks, "heads of q, k and v together", heads),
          refuse_lists(call_.num_items() * (call_.H + call_.key_heads) * params_.clusters),
          refuse_slots(plan_.strict ? call_.N * plan_.per_row
                                    : params_.clusters * std::max(plan_.q_width, plan_.k_width))})
      if (!reason.empty()) return reason;
    return "";
  }

  std::int64_t workspace_bytes() const override {
    const RoutingSaved at(plan_, {});
    Arena selecting, attending, going_back;
    select_lists(own_sides(at, selecting), {}, selecting, nullptr);
    attend_lists(at, {}, false, attending, nullptr);
    backward_lists(at, {}, {}, {true, true, true}, going_back, nullptr);
    return std::max({selecting.used(), attending.used(), going_back.used()});
  }

  void select(const std::vector<TensorView>& saved, const Workspace& workspace) const override {
    const RoutingSaved at(plan_, saved);
    Arena arena = take_workspace(workspace);
    select_lists(own_sides(at, arena), at.ends, arena, stream_of(workspace));
  }

  void attend(const AttentionResult& result, const Workspace& workspace) const override {
    const RoutingSaved at(plan_, result.saved);
    Arena arena = take_workspace(workspace);
    const Sides sides = sides_of(at);
    row_statistics(call_, sides.q, keys_of(sides), stream_of(workspace));
    attend_lists(at, result.out, false, arena, stream_of(workspace));
  }

  // Selection and attention share one computation of the row statistics.
  void forward(const AttentionResult& result, const Workspace& workspace) const override {
    const RoutingSaved at(plan_, result.saved);
    Arena arena = take_workspace(workspace);
    Arena scratch = arena;  // the selection's memory is free again afterwards
    select_lists(sides_of(at), at.ends, scratch, stream_of(workspace));
    attend_lists(at, result.out, plan_.scan_ends(), arena, stream_of(workspace));
  }

  void backward(const AttentionResult& result, const TensorView& grad_out,
                const AttentionGradients& gradients, const Workspace& workspace) const override {
    const bool dq = gradients.dq.present();
    Arena arena = take_workspace(workspace);
    backward_lists(RoutingSaved(plan_, result.saved), grad_out, gradients,
                   {dq || gradients.dlogit_scale.present(),
                    gradients.dk.present() || (plan_.shared && dq), gradients.dv.present()},
                   arena, stream_of(workspace));
  }

 private:
  struct Sides {
    RoutingSide q, k;
  };
  const RoutingSide* keys_of(const Sides& sides) const { return plan_.shared ? nullptr : &sides.k; }

  RoutingSide side_of(const TensorView& rows, const Sequences& sequences, const TensorView& labels,
                      const SortedRuns& runs, const TensorView& members, std::int64_t width,
                      const TensorView& statistics) const {
    RoutingSide side(call_, rows, sequences, params_.clusters);
    side.labels = ints(labels);
    side.runs = runs;
    side.members = ints(members);
    side.width = static_cast<int>(width);
    if (reinterpret_cast<std::uintptr_t>(statistics.data) % sizeof(RowStatistics) != 0)
      fail_alignment(call_.op, "saved statistics", sizeof(RowStatistics));
    side.stats = static_cast<RowStatistics*>(statistics.data);
    return side;
  }
  Sides sides_of(const RoutingSaved& at) const {
    const SortedRuns queries{ints(at.q_order), ints(at.q_offsets)};
    const SortedRuns keys{ints(at.k_order), ints(at.k_offsets)};
    Sides sides{side_of(call_.inputs.q, call_.inputs.q_sequences, at.q_labels, queries,
                        at.q_members, plan_.q_width, at.q_statistics),
                side_of(call_.k, call_.inputs.k_sequences, at.k_labels, keys, at.k_members,
                        plan_.k_width, at.k_statistics)};
    if (plan_.same_runs) sides.q.copy = keys;
    return sides;
  }
  // For a selection alone: statistics are in the workspace if it needs them.
  Sides own_sides(const RoutingSaved& at, Arena& arena) const {
    Sides sides = sides_of(at);
    sides.q.stats = sides.k.stats = nullptr;
    if (plan_.strict) return sides;
    sides.q.stats = arena.take<RowStatistics>(sides.q.count());
    sides.k.stats = plan_.shared ? sides.q.stats : arena.take<RowStatistics>(sides.k.count());
    return sides;
  }

  // Labels and runs, or members, and the statistics of the sides that have memory for them.
  void select_lists(const Sides& sides, const TensorView& ends, Arena& arena,
                    cudaStream_t stream) const {
    const RoutingSide* keys = keys_of(sides);
    const CentredCentroids centroids(arena, call_, params_.clusters, params_.membership);
    const std::int64_t problems = call_.num_items() * (call_.H + call_.key_heads);
    const ZeroedWords counters{arena.take<unsigned>(problems), problems};  // for teams
    const bool launches = !arena.counting();
    const RoutingSelection selection = plan_.selection();
    if (selection == RoutingSelection::scan)
      return nearest_scan(call_, centroids, sides.q, keys, plan_.scan_ends() ? ints(ends) : nullptr,
                          counters.data, arena, stream);
    if (launches) centre_centroids(call_, centroids, counters, stream);
    if (selection == RoutingSelection::top)
      return select_top(call_, centroids, sides.q, keys, counters.data, arena, stream);
    if (launches && sides.q.stats) row_statistics(call_, sides.q, keys, stream);
    if (selection == RoutingSelection::balanced) {
      select_balanced(call_, sides.q, centroids, arena, stream);
      if (keys) select_balanced(call_, sides.k, centroids, arena, stream);
      return;
    }
    std::int32_t* clusters = sides.q.labels;
    if (plan_.per_row > 1) clusters = arena.take<std::int32_t>(plan_.q_slots);
    nearest_exact(call_, sides.q, centroids, plan_.per_row, clusters, arena, stream);
    if (keys) nearest_exact(call_, sides.k, centroids, 1, sides.k.labels, arena, stream);
    const SortSide k{sides.k.shape, sides.k.labels, 1, sides.k.runs, {}};
    sort_by_cluster({sides.q.shape, clusters, plan_.per_row, sides.q.runs, sides.q.copy},
                    plan_.same_runs ? nullptr : &k, arena, stream);
  }

  // Slots without a token and rows in no item are saved as -1.
  void clear_empty_slots(const RoutingSaved& at, cudaStream_t stream) const {
    if (!plan_.has_gaps) return;
    for (const TensorView* each :
         {&at.ends, &at.q_slots.first, &at.q_slots.count, &at.q_slots.slots, &at.k_slots.first,
          &at.k_slots.count, &at.k_slots.slots})
      if (each->count() > 0)
        COTERIE_CUDA(
            cudaMemsetAsync(each->data, 0xff, each->count() * sizeof(std::int32_t), stream));
  }

  // Slots of members are saved; if a query is in several runs, they are found in each pass. With
  // `direct`, every token has one slot, given by the index.
  TokenSlots slots_of(bool keys, bool direct, const RoutingSaved& at, Arena& arena) const {
    const Sequences& sequences = keys ? call_.inputs.k_sequences : call_.inputs.q_sequences;
    const std::int64_t rows = keys ? call_.S : call_.N, heads = keys ? call_.key_heads : call_.H;
    const TensorView& order = keys ? at.k_order : at.q_order;
    if (plan_.strict && !direct)
      return make_token_slots(arena, sequences, call_.B, rows, heads, ints(order), 0,
                              keys ? 1 : plan_.per_row, params_.clusters,
                              ints(keys ? at.k_offsets : at.q_offsets));
    const TensorView& members = keys ? at.k_members : at.q_members;
    TokenSlots tokens =
        make_single_slots(sequences, call_.B, rows, heads, ints(plan_.strict ? order : members));
    if (plan_.strict) return tokens;
    const SavedSlots& saved = keys ? at.k_slots : at.q_slots;
    tokens.per_row = 0;
    tokens.block = params_.clusters * (keys ? plan_.k_width : plan_.q_width);
    tokens.lists = static_cast<int>(params_.clusters);
    tokens.first = ints(saved.first);
    tokens.count = ints(saved.count);
    tokens.slots = ints(saved.slots);
    return tokens;
  }

  ListCall list_call(const Sides& sides, const float* head_scale) const {
    ListCall lists;
    lists.lists = params_.clusters;
    lists.queries.index_heads = static_cast<int>(call_.H);
    lists.keys.index_heads = static_cast<int>(call_.key_heads);
    lists.scale = static_cast<float>(call_.scale);
    lists.head_scale = head_scale;
    lists.q_stats = sides.q.stats;
    lists.k_stats = sides.k.stats;
    if (plan_.strict) {
      lists.queries.layout = lists.keys.layout = ListLayout::runs;
      lists.queries.index = sides.q.runs.order;
      lists.queries.offsets = sides.q.runs.offsets;
      lists.queries.per_row = plan_.per_row;
      lists.keys.index = sides.k.runs.order;
      lists.keys.offsets = sides.k.runs.offsets;
    } else {
      lists.queries.layout = lists.keys.layout = ListLayout::members;
      lists.queries.index = sides.q.members;
      lists.queries.width = plan_.q_width;
      lists.keys.index = sides.k.members;
      lists.keys.width = plan_.k_width;
    }
    return lists;
  }

  // Strict: what queries see of the runs. `ends` may be available already; `tokens` are the
  // queries' if they have several slots.
  RunEnds see_runs(const RoutingSaved& at, const Sides& sides, const TokenSlots& tokens,
                   bool ends_there, Arena& arena, cudaStream_t stream, ListCall& lists) const {
    lists.ranges.window = std::min(params_.window, call_.N + call_.S);
    lists.ranges.causal = true;
    if (plan_.same_runs) {  // the own key is the last of a window
      const bool others = plan_.demotes && lists.ranges.window > 1;
      lists.ranges.rule = others ? ListRule::earlier : ListRule::sliding;
      return {};
    }
    lists.ranges.rule = ListRule::ends;
    lists.ranges.ends = ints(at.ends);
    RunEnds ends(arena, params_, call_);
    if (plan_.demotes) lists.filters.drop_own = ends.own_row;
    if (!ends_there) ends.ends = ints(at.ends);
    if (!arena.counting() && (ends.ends || ends.own_row))
      find_run_ends(params_, call_, sides.q.runs, sides.k.runs, tokens, ends, stream);
    return ends;
  }
  // The same for members.
  void see_members(const RoutingSaved& at, const Sides& sides, bool ends_there, bool beside_slots,
                   Arena& arena, cudaStream_t stream, ListCall& lists) const {
    if (call_.causal) {
      lists.ranges.rule = plan_.shared ? ListRule::causal : ListRule::ends;
      lists.ranges.window = call_.N + call_.S;
      lists.ranges.ends = ints(at.ends);
    }
    std::uint8_t* flags = nullptr;
    if (plan_.demotes) {
      flags = arena.take<std::uint8_t>(plan_.q_slots);
      lists.filters.drop_own = flags;
      lists.filters.drop_by_slot = true;
    }
    if (!arena.counting())
      find_member_ends(call_, sides.q, sides.k, ends_there ? nullptr : ints(at.ends), flags,
                       beside_slots, stream);
  }

  OwnKeys own_keys(const Sides& sides, const RunEnds& ends, const float* head_scale) const {
    if (!params_.include_self) return {};
    return {ends.own_row,  nullptr,       nullptr,
            sides.q.stats, sides.k.stats, static_cast<float>(call_.scale),
            head_scale,    call_.dropout};
  }

  void attend_lists(const RoutingSaved& at, const TensorView& out, bool ends_there, Arena& arena,
                    cudaStream_t stream) const {
    const Sides sides = sides_of(at);
    const float* head_scale = floats(call_.inputs.logit_scale);
    const bool launches = !arena.counting();
    ListCall lists = list_call(sides, head_scale);
    if (launches) clear_empty_slots(at, stream);
    const TokenSlots tokens = slots_of(false, plan_.rows_direct, at, arena);
    if (plan_.rows_direct) {
      see_runs(at, sides, tokens, ends_there, arena, stream, lists);
      if (launches) lists_forward(call_, lists, {out, nullptr, floats(at.lse)}, stream);
      return;
    }
    RunEnds ends;
    if (plan_.strict) {
      find_token_slots(tokens, arena, stream);
      ends = see_runs(at, sides, tokens, ends_there, arena, stream, lists);
    } else {  // with the slots of keys for the backward pass
      const TokenSlots keys = slots_of(true, false, at, arena);
      find_token_slots(tokens, arena, stream, plan_.shared ? nullptr : &keys, false);
      see_members(at, sides, ends_there, true, arena, stream, lists);
    }
    ListOutputs outputs;
    outputs.slot_rows =
        arena.take<std::byte>(plan_.q_slots * call_.Dv * dtype_bytes(call_.inputs.q.dtype));
    outputs.lse = plan_.strict ? arena.take<float>(plan_.q_slots) : floats(at.member_lse);
    if (!launches) return;
    lists_forward(call_, lists, outputs, stream);
    if (plan_.strict)
      return merge_slots(call_, {tokens, outputs.slot_rows}, outputs.lse,
                         own_keys(sides, ends, head_scale), out, floats(at.lse), stream);
    SlotSum sum{tokens, outputs.slot_rows, call_.H, out};
    sum.mean = params_.membership == Membership::top;
    sum.eps = static_cast<float>(params_.count_eps);
    sum.weights = floats(at.weights);
    sum_slots(call_, {sum}, SlotSumStart::slots_ready, stream);
  }

  // Which gradients of normalised rows and values the requested gradients need.
  struct Wanted {
    bool dq, dk, dv;
  };

  // Deltas and the weights of own keys, if queries have several parts.
  void merge_parts(const RoutingSaved& at, const TokenSlots& tokens, const ListCall& lists,
                   Arena& arena, cudaStream_t stream, ListGradients& gradients,
                   OwnKeys& own) const {
    const std::int64_t rows = call_.B * call_.H * call_.N;
    auto* parts = arena.take<float>(plan_.q_slots);
    auto* delta = arena.take<float>(rows);
    if (params_.include_self) {
      own.weight = arena.take<float>(rows);
      own.dlogit = arena.take<float>(rows);
    }
    if (arena.counting()) return;
    lists_delta(call_, lists, gradients, parts, stream);
    merge_deltas(call_, tokens, parts, floats(at.lse), gradients.grad_out, own, delta, stream);
    gradients.delta = {delta, false};
  }

  void backward_lists(const RoutingSaved& at, const TensorView& grad_out,
                      const AttentionGradients& wanted, const Wanted& parts, Arena& arena,
                      cudaStream_t stream) const {
    const Sides sides = sides_of(at);
    float *head_scale = nullptr, *products = nullptr;
    if (call_.inputs.logit_scale.present()) {
      head_scale = arena.take<float>(call_.H);
      products = arena.take<float>(call_.B * call_.H * call_.N);
      if (!arena.counting()) nonzero_scale(call_, head_scale, stream);
    }
    const TokenSlots queries = slots_of(false, plan_.rows_direct, at, arena);
    const TokenSlots keys = slots_of(true, plan_.rows_direct, at, arena);
    TokenSlots values = keys;
    if (plan_.rows_direct && !plan_.value_rows) {
      values = slots_of(true, false, at, arena);
      find_token_slots(values, arena, stream);
    } else if (plan_.strict && !plan_.rows_direct) {
      find_token_slots(queries, arena, stream, &values);
    }
    ListCall lists = list_call(sides, head_scale);
    RunEnds ends;
    if (plan_.strict)
      ends = see_runs(at, sides, queries, true, arena, stream, lists);
    else
      see_members(at, sides, true, false, arena, stream, lists);
    OwnKeys own = own_keys(sides, ends, head_scale);

    ListGradients gradients;
    gradients.grad_out = grad_out;
    gradients.lse = {floats(plan_.strict ? at.lse : at.member_lse), !plan_.strict};
    if (!plan_.strict) gradients.weight = {floats(at.weights), false};
    if (plan_.strict && !plan_.rows_direct)
      merge_parts(at, queries, lists, arena, stream, gradients, own);
    const bool by_row = plan_.normalises && wanted.dq.present();
    gradients.normalise = by_row || plan_.rounded;
    gradients.slots_rounded = plan_.rounded;
    const auto take_slots = [&](std::int64_t count, std::int64_t width) -> void* {
      const std::size_t bytes = plan_.rounded ? dtype_bytes(call_.inputs.q.dtype) : sizeof(float);
      return arena.take<std::byte>(count * width * static_cast<std::int64_t>(bytes));
    };
    if (by_row) {
      gradients.dq = wanted.dq;
      gradients.dk = wanted.dk;
      gradients.dq_products = wanted.dlogit_scale.present() ? products : nullptr;
    } else {
      if (parts.dq) gradients.slot_dq = take_slots(plan_.q_slots, call_.Dk);
      if (parts.dk) gradients.slot_dk = take_slots(plan_.k_slots, call_.Dk);
    }
    if (plan_.value_rows)
      gradients.dv = wanted.dv;
    else if (parts.dv)
      gradients.slot_dv = take_slots(plan_.k_slots, call_.Dv);
    if (plan_.rounded && plan_.sparse) gradients.cleared = {wanted.dq, wanted.dk, wanted.dv};
    const bool cleared = lists_backward(call_, lists, gradients, arena, stream);
    if (arena.counting()) return;
    if (plan_.rounded)
      sum_gradients(queries, keys, gradients, wanted, cleared, stream);
    else
      write_gradients(sides, {queries, gradients.slot_dq}, {keys, gradients.slot_dk},
                      {values, gradients.slot_dv}, grad_out, wanted, own, products, stream);
    if (wanted.dlogit_scale.present())
      logit_scale_gradient(call_, products, head_scale, wanted.dlogit_scale, stream);
  }

  // From rounded slots, which are already denormalised.
  void sum_gradients(const TokenSlots& queries, const TokenSlots& keys,
                     const ListGradients& gradients, const AttentionGradients& wanted, bool cleared,
                     cudaStream_t stream) const {
    std::vector<SlotSum> sums;
    const auto add = [&](const TokenSlots& tokens, const void* values, const TensorView& to) {
      if (!values) return;
      sums.push_back({tokens, values, to.size(1), to});
      sums.back().zeroed = cleared;
    };
    add(queries, gradients.slot_dq, wanted.dq);
    if (!plan_.shared) add(keys, gradients.slot_dk, wanted.dk);
    add(keys, gradients.slot_dv, wanted.dv);
    sum_slots(call_, sums, SlotSumStart::slots_ready, stream);
    if (!plan_.shared || !gradients.slot_dk) return;
    SlotSum second{keys, gradients.slot_dk, wanted.dq.size(1), wanted.dq};
    second.added = true;
    sum_slots(call_, {second}, SlotSumStart::behind, stream);
  }

  // From slots of floats, through the normalisation. Gradients without values are already in place.
  void write_gradients(const Sides& sides, const SlotRows& dq, const SlotRows& dk,
                       const SlotRows& dv, const TensorView& grad_out,
                       const AttentionGradients& wanted, const OwnKeys& own, float* products,
                       cudaStream_t stream) const {
    const ItemSpans spans = item_spans(call_.inputs);
    std::vector<TokenGradient> all;
    const auto add = [&](const SlotRows& slots, const RoutingSide* side, const TensorView& to) {
      TokenGradient gradient{slots, {}, {}, nullptr, to};
      if (side) gradient.rows = side->rows;
      if (side) gradient.stats = side->stats;
      all.push_back(gradient);
    };
    const auto add_own = [&](const float* factor, const TensorView& rows,
                             const SequenceSpans& rows_spans, const RowStatistics* stats) {
      all.back().own_factor = factor;
      all.back().own_rows = rows;
      all.back().own_spans = rows_spans;
      all.back().own_stats = stats;
    };
    if (dq.values) {
      add(dq, &sides.q, wanted.dq);
      add_own(own.dlogit, call_.k, spans.k, own.k_stats);
      if (plan_.shared && wanted.dq.present()) all.back().second = dk;
      if (wanted.dlogit_scale.present()) all.back().products = products;
    }
    if (dk.values && wanted.dk.present()) {
      add(dk, &sides.k, wanted.dk);
      add_own(own.dlogit, call_.inputs.q, spans.q, own.q_stats);
    }
    if (dv.values) {
      add(dv, nullptr, wanted.dv);
      add_own(own.weight, grad_out, spans.q, nullptr);
    }
    token_gradients(call_, all, stream);
  }

  const RoutingParams& params_;
  const RoutingPlan plan_;
};

}  // namespace

std::unique_ptr<Pass> make_pass(const RoutingParams& params, const AttentionCall& call) {
  return std::make_unique<RoutingPass>(params, call);
}

}  // namespace coterie::cuda
