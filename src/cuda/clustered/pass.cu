// SPDX-License-Identifier: MIT
// Clustered and improved clustered attention: the order of their stages. Host code only;
// clustered.h says which file has which stage.
#include <algorithm>
#include <cstddef>
#include <optional>

#include "cuda/api/pass.h"
#include "cuda/api/refusal.h"
#include "cuda/cluster/clustering.h"
#include "cuda/cluster/means.h"
#include "cuda/clustered/clustered.h"
#include "cuda/launch/dispatch.h"

namespace coterie::cuda {

ClusteredTensors clustered_tensors(const TensorView* saved, std::size_t count, bool top,
                                   bool causal) {
  ClusteredTensors tensors;
  std::size_t next = 0;
  const auto take = [&](TensorView& to, bool kept) {
    if (kept && next < count) to = saved[next++];
  };
  take(tensors.labels, true);
  take(tensors.order, true);
  take(tensors.offsets, true);
  take(tensors.top_keys, top);
  take(tensors.centroids, !causal);
  take(tensors.centroid_lse, !causal);
  take(tensors.mass, top && !causal);
  take(tensors.out, !causal);
  take(tensors.lse, top);
  return tensors;
}

namespace {

// Stages one after the other, each in all memory behind what they share. Counts the most.
struct Stages {
  Arena shared;
  cudaStream_t stream = nullptr;
  std::int64_t most = 0;

  template <class Stage>
  void operator()(const Stage& stage) {
    Arena arena = shared;
    stage(arena);
    most = std::max(most, arena.used());
  }
};

// Both mechanisms; the plain one has no top keys.
template <class Params>
class ClusteredPass : public Pass {
 public:
  ClusteredPass(const Params& params, const AttentionCall& call) : Pass(call), params_(params) {}

  std::string refusal() const override {
    // Clusters, their tiles of 64 rows, and hash planes of a key head, in all heads.
    const std::int64_t clusters = params_.clustering.clusters, items = call_.num_items();
    const std::int64_t lists = items * (clusters + 1) + call_.B * (call_.N / 64);
    const std::int64_t planes = items * params_.clustering.bits;
    std::int64_t topk = 0;
    if constexpr (kImproved) topk = params_.topk;
    for (const std::string& reason :
         {refuse_more_than(kMaxTopKeys, "top keys", topk),
          refuse_more_than(kMaxClusters, "clusters", clusters), refuse_batches(call_.B),
          refuse_lists(std::max(lists, planes) * call_.H)})
      if (!reason.empty()) return reason;
    return "";
  }

  std::int64_t workspace_bytes() const override {
    Stages counted;
    select_stages(counted, {});
    attend_stages(counted, {});
    if (!call_.causal) forward_stages(counted, {});
    counted([&](Arena& arena) { clustered_backward({plan()}, arena); });
    return counted.most;
  }

  void select(const std::vector<TensorView>& saved, const Workspace& workspace) const override {
    Stages stages{take_workspace(workspace), stream_of(workspace)};
    select_stages(stages, saved);
  }
  void attend(const AttentionResult& result, const Workspace& workspace) const override {
    Stages stages{take_workspace(workspace), stream_of(workspace)};
    attend_stages(stages, result);
  }
  void forward(const AttentionResult& result, const Workspace& workspace) const override {
    if (call_.causal) return Pass::forward(result, workspace);  // the means are not kept
    Stages stages{take_workspace(workspace), stream_of(workspace)};
    forward_stages(stages, result);
  }
  void backward(const AttentionResult& result, const TensorView& grad_out,
                const AttentionGradients& gradients, const Workspace& workspace) const override {
    Arena arena = take_workspace(workspace);
    clustered_backward({plan(), named(result.saved), grad_out, gradients, stream_of(workspace)},
                       arena);
  }

 private:
  static constexpr bool kImproved = std::is_same_v<Params, ImprovedClusteredParams>;

  // Decided when it is first asked for: a call that is refused has none.
  const ClusteredPlan& plan() const {
    if (plan_) return *plan_;
    if constexpr (kImproved)
      plan_.emplace(clustered_plan(call_, params_.clustering, params_.topk, params_.mass_grad));
    else
      plan_.emplace(clustered_plan(call_, params_.clustering, 0, true));
    return *plan_;
  }

  ClusteredTensors named(const std::vector<TensorView>& saved) const {
    bool causal = false;
    if constexpr (kImproved) causal = params_.causal == Causality::leaking;
    return clustered_tensors(saved.data(), saved.size(), kImproved, causal);
  }

  void select_stages(Stages& stages, const std::vector<TensorView>& saved) const {
    ClusteredForward pass = begin(stages, saved);
    if (!kImproved) return cluster(stages, pass, {});
    const std::int64_t items = call_.num_items(), clusters = plan().clusters;
    pass.tensors.centroids =
        TensorView::contiguous(stages.shared.template take<float>(plan().num_means() * call_.Dk),
                               DType::f32, {items, call_.H, clusters, call_.Dk}, Device::cuda);
    cluster_means(stages, pass, select_top_keys);
  }

  void attend_stages(Stages& stages, const AttentionResult& result) const {
    ClusteredForward pass = begin(stages, result.saved);
    pass.out = result.out;
    if (!call_.causal)
      stages([&](Arena& arena) {
        means(pass, arena);
        attend_means(pass, arena);
      });
    outputs(stages, pass);
  }

  // One computation of the means serves selection and outputs.
  void forward_stages(Stages& stages, const AttentionResult& result) const {
    ClusteredForward pass = begin(stages, result.saved);
    pass.out = result.out;
    pass.selection_attends = plan().selection_attends;
    cluster_means(stages, pass, [](const ClusteredForward& own, Arena& arena) {
      if (kImproved) select_top_keys(own, arena);
    });
    if (!pass.selection_attends) stages([&](Arena& arena) { attend_means(pass, arena); });
    outputs(stages, pass);
  }

  ClusteredForward begin(Stages& stages, const std::vector<TensorView>& saved) const {
    ClusteredForward pass{plan(), named(saved)};
    pass.counters = stages.shared.template take<unsigned>(plan().counters());
    pass.stream = stages.stream;
    return pass;
  }

  void cluster(Stages& stages, const ClusteredForward& pass, const ClusterExtra& extra) const {
    const ClusteredTensors& tensors = pass.tensors;
    stages([&](Arena& arena) {
      void* memory = arena.take<std::byte>(cluster_workspace_bytes(params_.clustering, call_));
      if (!arena.counting())
        cluster_queries(params_.clustering, call_, tensors.labels, tensors.order, tensors.offsets,
                        memory, pass.stream, extra);
    });
  }
  // Clusters, their means, and the stage behind them, whose memory the means do not share.
  template <class Next>
  void cluster_means(Stages& stages, const ClusteredForward& pass, const Next& next) const {
    ClusterExtra extra;
    if (plan().clusters_with_means) extra = {floats(pass.tensors.centroids), zeroed(pass)};
    cluster(stages, pass, extra);
    stages([&](Arena& arena) {
      if (!plan().clusters_with_means || arena.counting()) means(pass, arena);
      next(pass, arena);
    });
  }
  void means(const ClusteredForward& pass, Arena& arena) const {
    const ClusteredTensors& tensors = pass.tensors;
    centroid_means(call_, tensors.order, tensors.offsets, tensors.centroids, arena, pass.stream,
                   zeroed(pass));
  }
  static ZeroedWords zeroed(const ClusteredForward& pass) {
    return {pass.counters, pass.plan.counters()};
  }
  void outputs(const Stages& stages, const ClusteredForward& pass) const {
    if (stages.shared.counting()) return;
    kImproved ? attend_top_keys(pass) : broadcast_means(pass);
  }

  const Params& params_;
  mutable std::optional<ClusteredPlan> plan_;
};

}  // namespace

std::unique_ptr<Pass> make_pass(const ClusteredParams& params, const AttentionCall& call) {
  return std::make_unique<ClusteredPass<ClusteredParams>>(params, call);
}

std::unique_ptr<Pass> make_pass(const ImprovedClusteredParams& params, const AttentionCall& call) {
  return std::make_unique<ClusteredPass<ImprovedClusteredParams>>(params, call);
}

}  // namespace coterie::cuda
