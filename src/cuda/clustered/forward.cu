// SPDX-License-Identifier: MIT
// Clustered and improved clustered attention: the order of their stages.
#include <algorithm>
#include <cstddef>

#include "cuda/api/pass.h"
#include "cuda/api/refusal.h"
#include "cuda/cluster/clustering.h"
#include "cuda/cluster/means.h"
#include "cuda/clustered/clustered.h"
#include "cuda/clustered/saved.h"
#include "cuda/launch/dispatch.h"
#include "cuda/launch/launch.h"

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

  std::string refusal() const override {
    // Clusters, their tiles of 64 rows, and hash planes of a key head, in all heads.
    const std::int64_t lists = call_.num_items() * (sizes_.clusters + 1) + call_.B * (call_.N / 64),
                       planes = call_.num_items() * params_.clustering.bits;
    for (const std::string& reason : {refuse(params_), refuse_batches(call_.B),
                                      refuse_lists(std::max(lists, planes) * call_.H)})
      if (!reason.empty()) return reason;
    return "";
  }

  // The largest need of any stage; stages that follow each other share the memory.
  std::int64_t workspace_bytes() const override {
    std::int64_t most = 0;
    const auto count = [&](const auto& stages) {
      Arena arena;
      stages(arena);
      most = std::max(most, arena.used());
    };
    count([&](Arena& arena) {
      ClusteredTensors tensors;
      const Arrivals arrivals = take_arrivals(arena);
      tensors.centroids = take_centroids(arena);
      means(tensors, arena, nullptr);
      select_keys(tensors, arrivals, arena, nullptr, !call_.causal);
    });
    count([&](Arena& arena) {
      ClusteredTensors tensors;
      const Arrivals arrivals = take_arrivals(arena);
      means(tensors, arena, nullptr);
      attend_means(tensors, arrivals, arena, nullptr);
    });
    count([&](Arena& arena) {
      take_arrivals(arena);
      arena.take<std::byte>(cluster_workspace_bytes(params_.clustering, call_));
    });
    count([&](Arena& arena) { clustered_backward(call_, sizes_, {}, arena, nullptr); });
    return most;
  }

  void select(const std::vector<TensorView>& saved, const Workspace& workspace) const override {
    Arena arena = take_workspace(workspace);
    const Arrivals arrivals = take_arrivals(arena);
    ClusteredTensors tensors = clustered_tensors(params_, saved);
    cluster(tensors, arena, stream_of(workspace), {});
    if (sizes_.topk == 0) return;
    tensors.centroids = take_centroids(arena);
    means(tensors, arena, stream_of(workspace), arrivals.words());
    select_keys(tensors, arrivals, arena, stream_of(workspace));
  }

  void attend(const AttentionResult& result, const Workspace& workspace) const override {
    Arena arena = take_workspace(workspace);
    const Arrivals arrivals = take_arrivals(arena);
    const ClusteredTensors tensors = clustered_tensors(params_, result.saved);
    if (!call_.causal) {
      means(tensors, arena, stream_of(workspace), arrivals.words());
      attend_means(tensors, arrivals, arena, stream_of(workspace));
    }
    outputs(tensors, result.out, stream_of(workspace));
  }

  // One computation of the means serves selection and outputs; the causal form does not keep them.
  void forward(const AttentionResult& result, const Workspace& workspace) const override {
    if (call_.causal) return Pass::forward(result, workspace);
    const ClusteredTensors tensors = clustered_tensors(params_, result.saved);
    Arena arena = take_workspace(workspace);
    const Arrivals arrivals = take_arrivals(arena);
    const bool with_means = clusters_with_means(params_.clustering, call_);
    ClusterExtra extra;
    if (with_means) extra = {static_cast<float*>(tensors.centroids.data), arrivals.words()};
    cluster(tensors, arena, stream_of(workspace), extra);
    bool attended = false;
    {
      Arena stage = arena;  // the memory of the clustering is free again
      if (!with_means) means(tensors, stage, stream_of(workspace), arrivals.words());
      attended = selects_and_attends(call_, sizes_);
      select_keys(tensors, arrivals, stage, stream_of(workspace), attended, with_means);
    }
    if (!attended) attend_means(tensors, arrivals, arena, stream_of(workspace));
    outputs(tensors, result.out, stream_of(workspace), attended);
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

  // Counters of the selection, then those of the centroid attention.
  struct Arrivals {
    unsigned* data;
    std::int64_t selection, attention;
    ZeroedWords words() const { return {data, selection + attention}; }
  };
  Arrivals take_arrivals(Arena& arena) const {
    const std::int64_t selection = select_arrivals(call_, sizes_);
    const std::int64_t attention = call_.causal ? 0 : centroid_arrivals(call_, sizes_);
    return {arena.take<unsigned>(selection + attention), selection, attention};
  }

  // In what the arena has left; the memory is free again afterwards.
  void cluster(const ClusteredTensors& tensors, Arena arena, cudaStream_t stream,
               const ClusterExtra& extra) const {
    cluster_queries(params_.clustering, call_, tensors.labels, tensors.order, tensors.offsets,
                    arena.take<std::byte>(cluster_workspace_bytes(params_.clustering, call_)),
                    stream, extra);
  }
  void means(const ClusteredTensors& tensors, Arena& arena, cudaStream_t stream,
             const ZeroedWords& zeroed = {}) const {
    centroid_means(call_, tensors.order, tensors.offsets, tensors.centroids, arena, stream, zeroed);
  }
  // Top keys where there are any, from tensors whose centroids are there.
  void select_keys(const ClusteredTensors& tensors, const Arrivals& arrivals, Arena& arena,
                   cudaStream_t stream, bool attend = false, bool inputs_ready = false) const {
    if constexpr (std::is_same_v<Params, ImprovedClusteredParams>)
      centroid_select(call_, sizes_, tensors, arrivals.data, arena, stream, attend, inputs_ready);
  }
  void attend_means(const ClusteredTensors& tensors, const Arrivals& arrivals, Arena& arena,
                    cudaStream_t stream) const {
    if (call_.causal) return;
    centroid_forward(call_, sizes_, tensors,
                     arrivals.data ? arrivals.data + arrivals.selection : nullptr, arena, stream);
  }
  // Outputs of the queries.
  void outputs(const ClusteredTensors& tensors, const TensorView& out, cudaStream_t stream,
               bool after_select = false) const {
    if constexpr (std::is_same_v<Params, ImprovedClusteredParams>)
      topk_forward(call_, sizes_, tensors, out, stream, after_select);
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
