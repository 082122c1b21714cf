// SPDX-License-Identifier: MIT
// Clustered and improved clustered attention: the order of their stages.
#include <algorithm>

#include "cuda/attention.h"
#include "cuda/cluster.h"
#include "cuda/clustered.h"
#include "cuda/launch.h"
#include "cuda/means.h"
#include "cuda/refusal.h"
#include "cuda/tuning.h"

namespace coterie::cuda {

ClusteredTensors clustered_tensors(const ClusteredParams&, const std::vector<TensorView>& saved) {
  ClusteredTensors tensors;
  TensorView* const places[] = {&tensors.labels,    &tensors.order,        &tensors.offsets,
                                &tensors.centroids, &tensors.centroid_lse, &tensors.out};
  for (std::size_t i = 0; i < std::min(saved.size(), std::size(places)); ++i) *places[i] = saved[i];
  return tensors;
}

ClusteredTensors clustered_tensors(const ImprovedClusteredParams& params,
                                   const std::vector<TensorView>& saved) {
  ClusteredTensors tensors;
  TensorView* const places[] = {&tensors.labels,   &tensors.order,     &tensors.offsets,
                                &tensors.top_keys, &tensors.centroids, &tensors.centroid_lse,
                                &tensors.mass,     &tensors.out,       &tensors.lse};
  for (std::size_t i = 0; i < std::min(saved.size(), std::size(places)); ++i) *places[i] = saved[i];
  if (params.causal == Causality::leaking) std::swap(tensors.lse, tensors.centroids);
  return tensors;
}

namespace {

ClusteredSizes sizes_of(const ClusteredParams& params, const AttentionCall&) {
  return {params.clustering.clusters, 0};
}
ClusteredSizes sizes_of(const ImprovedClusteredParams& params, const AttentionCall& call) {
  return {params.clustering.clusters, std::min(params.topk, call.S)};
}

bool mass_grad(const ClusteredParams&) { return true; }
bool mass_grad(const ImprovedClusteredParams& params) { return params.mass_grad; }

std::string refuse_clusters(const ClusteringParams& params) {
  return refuse_more_than(kMaxClusters, "clusters", params.clusters);
}

std::string refuse(const ClusteredParams& params) { return refuse_clusters(params.clustering); }

std::string refuse(const ImprovedClusteredParams& params) {
  const std::string topk = refuse_more_than(kMaxTopKeys, "top keys", params.topk);
  return topk.empty() ? refuse_clusters(params.clustering) : topk;
}

// Both mechanisms; the plain one leaves out what concerns top keys.
template <class Params>
class ClusteredPass : public Pass {
 public:
  ClusteredPass(const Params& params, const AttentionCall& call)
      : Pass(call), params_(params), sizes_(sizes_of(params, call)) {}

  std::string refusal() const override { return refuse(params_); }

  // The largest need of any stage; stages that follow each other share the memory.
  std::int64_t workspace_bytes() const override {
    std::int64_t most = cluster_workspace_bytes(params_.clustering, call_);
    const auto count = [&](const auto& stages) {
      Arena arena;
      stages(arena);
      most = std::max(most, arena.used());
    };
    count([&](Arena& arena) {
      ClusteredTensors tensors;
      tensors.centroids = take_centroids(arena);
      select_keys(tensors, arena, nullptr);
    });
    count([&](Arena& arena) {
      ClusteredTensors tensors;
      tensors.centroids = take_centroids(arena);
      means(tensors, arena, nullptr);
      outputs(tensors, {}, arena, nullptr);
    });
    count([&](Arena& arena) { clustered_backward(call_, sizes_, {}, arena, nullptr); });
    return most;
  }

  void select(const std::vector<TensorView>& saved, const Workspace& workspace) const override {
    Arena arena = take_workspace(workspace);
    ClusteredTensors tensors = clustered_tensors(params_, saved);
    cluster(tensors, workspace);
    if (sizes_.topk == 0) return;
    tensors.centroids = take_centroids(arena);
    select_keys(tensors, arena, stream_of(workspace));
  }

  void attend(const AttentionResult& result, const Workspace& workspace) const override {
    Arena arena = take_workspace(workspace);
    const ClusteredTensors tensors = clustered_tensors(params_, result.saved);
    if (!call_.causal) means(tensors, arena, stream_of(workspace));
    outputs(tensors, result.out, arena, stream_of(workspace));
  }

  // One computation of the means serves selection and outputs; the causal form does not keep them.
  void forward(const AttentionResult& result, const Workspace& workspace) const override {
    if (call_.causal) return Pass::forward(result, workspace);
    const ClusteredTensors tensors = clustered_tensors(params_, result.saved);
    {
      Arena arena = take_workspace(workspace);
      cluster(tensors, workspace);
      select_keys(tensors, arena, stream_of(workspace));
    }
    Arena arena = take_workspace(workspace);  // the selection's memory is free again
    outputs(tensors, result.out, arena, stream_of(workspace));
  }

  void backward(const AttentionResult& result, const TensorView& grad_out,
                const AttentionGradients& gradients, const Workspace& workspace) const override {
    Arena arena = take_workspace(workspace);
    const ClusteredBackward pass{clustered_tensors(params_, result.saved), mass_grad(params_),
                                 grad_out, gradients};
    clustered_backward(call_, sizes_, pass, arena, stream_of(workspace));
  }

 private:
  // Scratch memory for means that are not kept.
  TensorView take_centroids(Arena& arena) const {
    const std::int64_t items = call_.num_items();
    float* data = arena.take<float>(items * call_.H * sizes_.clusters * call_.Dk);
    return TensorView::contiguous(data, DType::f32, {items, call_.H, sizes_.clusters, call_.Dk},
                                  Device::cuda);
  }

  void cluster(const ClusteredTensors& tensors, const Workspace& workspace) const {
    cluster_queries(params_.clustering, call_, tensors.labels, tensors.order, tensors.offsets,
                    workspace.data, stream_of(workspace));
  }
  void means(const ClusteredTensors& tensors, Arena& arena, cudaStream_t stream,
             const ZeroedWords& zeroed = {}) const {
    centroid_means(call_, tensors.order, tensors.offsets, tensors.centroids, arena, stream, zeroed);
  }
  // Means, and top keys where there are any.
  void select_keys(const ClusteredTensors& tensors, Arena& arena, cudaStream_t stream) const {
    if constexpr (std::is_same_v<Params, ImprovedClusteredParams>) {
      const SelectArrivals arrivals(arena, call_, sizes_);
      means(tensors, arena, stream, {arrivals.data, arrivals.count});
      centroid_select(call_, sizes_, tensors, arrivals, arena, stream);
    } else {
      means(tensors, arena, stream);
    }
  }
  // Outputs, from tensors whose centroids are there.
  void outputs(const ClusteredTensors& tensors, const TensorView& out, Arena& arena,
               cudaStream_t stream) const {
    if (!call_.causal) centroid_forward(call_, sizes_, tensors, arena, stream);
    if (!out.present()) return;  // counting
    if constexpr (std::is_same_v<Params, ImprovedClusteredParams>)
      topk_forward(call_, sizes_, tensors, out, stream);
    else
      broadcast_forward(call_, tensors, out, stream);
  }

  const Params& params_;
  const ClusteredSizes sizes_;
};

}  // namespace

std::unique_ptr<Pass> make_pass(const ClusteredParams& params, const AttentionCall& call) {
  return std::make_unique<ClusteredPass<ClusteredParams>>(params, call);
}

std::unique_ptr<Pass> make_pass(const ImprovedClusteredParams& params, const AttentionCall& call) {
  return std::make_unique<ClusteredPass<ImprovedClusteredParams>>(params, call);
}

}  // namespace coterie::cuda
