// SPDX-License-Identifier: MIT
// Which tensors each mechanism keeps between its passes. Indices are int32 and count from the start
// of the item; -1 marks empty slots and padding.
#include <algorithm>

#include "ops/call.h"

namespace coterie::ops {

namespace {

class Builder {
 public:
  explicit Builder(const AttentionCall& call)
      : call_(call), accumulator_(accumulator_dtype(call.inputs.q.dtype)) {}

  void index(const char* name, std::vector<std::int64_t> sizes) {
    layout.tensors.push_back({name, DType::i32, std::move(sizes)});
    ++layout.selection_count;
  }
  void value(const char* name, std::vector<std::int64_t> sizes) {
    layout.tensors.push_back({name, accumulator_, std::move(sizes)});
  }
  // Whole numbers that are no selection.
  void counts(const char* name, std::vector<std::int64_t> sizes) {
    layout.tensors.push_back({name, DType::i32, std::move(sizes)});
  }
  // One number per query row.
  void rows(const char* name) { value(name, {call_.B, call_.H, call_.N}); }

  SavedLayout layout;

 private:
  const AttentionCall& call_;
  DType accumulator_;
};

template <class Params>
void describe(const Params&, const AttentionCall&, Builder& builder) {
  builder.rows("lse");
}

void describe(const OracleTopParams& params, const AttentionCall& call, Builder& builder) {
  builder.index("top_keys", {call.B, call.H, call.N, std::min(params.topk, call.S)});
  builder.rows("lse");
}

void describe_groups(std::int64_t clusters, const AttentionCall& call, Builder& builder) {
  builder.index("labels", {call.B, call.H, call.N});
  builder.index("order", {call.B, call.H, call.N});
  builder.index("offsets", {call.num_items(), call.H, clusters + 1});
}

void describe_centroids(std::int64_t clusters, const AttentionCall& call, Builder& builder) {
  builder.value("centroids", {call.num_items(), call.H, clusters, call.Dk});
  builder.value("centroid_lse", {call.num_items(), call.H, clusters});
}

void describe(const ClusteredParams& params, const AttentionCall& call, Builder& builder) {
  const std::int64_t clusters = params.clustering.clusters;
  describe_groups(clusters, call, builder);
  describe_centroids(clusters, call, builder);
  builder.value("centroid_out", {call.num_items(), call.H, clusters, call.Dv});
}

void describe(const ImprovedClusteredParams& params, const AttentionCall& call, Builder& builder) {
  const std::int64_t clusters = params.clustering.clusters, items = call.num_items();
  describe_groups(clusters, call, builder);
  builder.index("top_keys", {items, call.H, clusters, std::min(params.topk, call.S)});
  if (params.causal == Causality::none) {
    describe_centroids(clusters, call, builder);
    builder.value("mass", {items, call.H, clusters});
    builder.value("bottom", {items, call.H, clusters, call.Dv});
  }
  builder.rows("lse");
}

void describe(const LshParams& params, const AttentionCall& call, Builder& builder) {
  builder.index("order", {call.B, call.H, params.rounds, call.N});
  if (params.combine == LshCombine::lse)
    builder.rows("lse");
  else
    builder.value("round_lse", {call.B, call.H, params.rounds, call.N});
}

// What kernels find out about rows and lists once for both passes: mean and 1 / sigma of every row;
// how many keys of its list a query slot sees; the slots of every token in member lists, and its
// weight. The CPU makes these anew.
void describe_facts(const RoutingParams& params, const AttentionCall& call,
                    std::vector<std::int64_t> slots, bool ends, Builder& builder) {
  if (call.device != Device::cuda) return;
  builder.value("q_statistics", {call.B, call.H, call.N, 2});
  if (!params.share_qk) builder.value("k_statistics", {call.B, call.key_heads, call.S, 2});
  if (ends) builder.counts("ends", std::move(slots));
}

void describe_slots(const RoutingParams& params, const AttentionCall& call,
                    const std::vector<std::int64_t>& q_slots,
                    const std::vector<std::int64_t>& k_slots, Builder& builder) {
  if (call.device != Device::cuda) return;
  builder.counts("q_first", {call.B, call.H, call.N});
  builder.counts("q_count", {call.B, call.H, call.N});
  builder.counts("q_slots", q_slots);
  if (!params.share_qk) {
    builder.counts("k_first", {call.B, call.key_heads, call.S});
    builder.counts("k_count", {call.B, call.key_heads, call.S});
    builder.counts("k_slots", k_slots);
  }
  builder.rows("weights");
}

void describe_strict(const RoutingParams& params, const AttentionCall& call, Builder& builder) {
  const std::int64_t clusters = params.clusters, in = std::min(params.queries_in, clusters);
  builder.index("q_labels", {call.B, call.H, call.N});
  if (!params.share_qk) builder.index("k_labels", {call.B, call.key_heads, call.S});
  builder.index("q_order", {call.B, call.H, call.N * in});
  builder.index("q_offsets", {call.num_items(), call.H, clusters + 1});
  builder.index("k_order", {call.B, call.key_heads, call.S});
  builder.index("k_offsets", {call.num_items(), call.key_heads, clusters + 1});
  builder.rows("lse");
  describe_facts(params, call, {call.B, call.H, call.N * in}, !params.share_qk || in > 1, builder);
}

void describe(const RoutingParams& params, const AttentionCall& call, Builder& builder) {
  if (params.membership == Membership::nearest) return describe_strict(params, call, builder);
  const std::int64_t clusters = params.clusters, items = call.num_items();
  const auto width = [&](std::int64_t rows) {
    const bool balanced = params.membership == Membership::balanced;
    return balanced ? (rows + clusters - 1) / clusters : std::min(params.window, rows);
  };
  const std::vector<std::int64_t> q_slots{items, call.H, clusters, width(call.N)},
      k_slots{items, call.key_heads, clusters, width(call.S)};
  builder.index("q_members", q_slots);
  if (!params.share_qk) builder.index("k_members", k_slots);
  builder.value("member_lse", q_slots);
  describe_facts(params, call, q_slots, call.causal && !params.share_qk, builder);
  describe_slots(params, call, q_slots, k_slots, builder);
}

void describe(const CastParams& params, const AttentionCall& call, Builder& builder) {
  const std::int64_t clusters = params.clusters, items = call.num_items();
  // With `single` every token needs a place, so clusters are at least ceil(N / C) large.
  const std::int64_t fair = (call.N + clusters - 1) / clusters;
  const std::int64_t size =
      std::min(params.mode == CastMode::single ? std::max(params.size, fair) : params.size, call.N);
  builder.index("members", {items, params.share_heads ? 1 : call.H, clusters, size});
  const bool softmax = params.activation == CastActivation::softmax;
  if (softmax) builder.value("member_lse", {items, call.H, clusters, size});
  builder.value("summary", {items, call.H, clusters, call.Dv});
  if (softmax) {
    builder.value("summary_lse", {items, call.H, clusters});
    builder.rows("combine_lse");
  }
}

}  // namespace

SavedLayout saved_layout(const Mechanism& mechanism, const AttentionCall& call) {
  Builder builder(call);
  std::visit([&](const auto& params) { describe(params, call, builder); }, mechanism);
  return builder.layout;
}

}  // namespace coterie::ops
