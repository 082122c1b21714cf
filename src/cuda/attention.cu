// SPDX-License-Identifier: MIT
// Which mechanisms have CUDA kernels, and the order of their stages.
#include <algorithm>
#include <limits>

#include "core/check.h"
#include "cuda/cluster.h"
#include "cuda/clustered.h"
#include "cuda/entry.h"
#include "cuda/launch.h"
#include "cuda/means.h"
#include "cuda/tuning.h"

namespace coterie::cuda {

ClusteredTensors clustered_tensors(const ClusteredParams&, const std::vector<TensorView>& saved) {
  ClusteredTensors tensors;
  TensorView* const places[] = {&tensors.labels,    &tensors.order,        &tensors.offsets,
                                &tensors.centroids, &tensors.centroid_lse, &tensors.out};
  for (std::size_t i = 0; i < std::min(saved.size(), std::size(places)); ++i) *places[i] = saved[i];
  return tensors;
}

ClusteredTensors clustered_tensors(const ImprovedClusteredParams&,
                                   const std::vector<TensorView>& saved) {
  ClusteredTensors tensors;
  TensorView* const places[] = {&tensors.labels,   &tensors.order,     &tensors.offsets,
                                &tensors.top_keys, &tensors.centroids, &tensors.centroid_lse,
                                &tensors.mass,     &tensors.out,       &tensors.lse};
  for (std::size_t i = 0; i < std::min(saved.size(), std::size(places)); ++i) *places[i] = saved[i];
  return tensors;
}

namespace {

ClusteredSizes sizes_of(const ClusteredParams& params, const AttentionCall&) {
  return {params.clustering.clusters, 0};
}
ClusteredSizes sizes_of(const ImprovedClusteredParams& params, const AttentionCall& call) {
  return {params.clustering.clusters, std::min(params.topk, call.S)};
}

// One checked call of one of the two mechanisms.
template <class Params>
struct Clustered {
  const Params& params;
  const AttentionCall& call;
  ClusteredSizes sizes;

  Clustered(const Params& p, const AttentionCall& c) : params(p), call(c), sizes(sizes_of(p, c)) {}

  void cluster(const ClusteredTensors& tensors, const Workspace& workspace) const {
    cluster_queries(params.clustering, call, tensors.labels, tensors.order, tensors.offsets,
                    workspace.data, stream_of(workspace));
  }
  void means(const ClusteredTensors& tensors, Arena& arena, cudaStream_t stream) const {
    centroid_means(call, tensors.order, tensors.offsets, tensors.centroids, arena, stream);
  }
  void select_keys(const ClusteredTensors& tensors, Arena& arena, cudaStream_t stream) const {
    if constexpr (std::is_same_v<Params, ImprovedClusteredParams>)
      centroid_select(call, sizes, tensors, arena, stream);
  }
  // Outputs, from tensors whose centroids are there.
  void outputs(const ClusteredTensors& tensors, const TensorView& out, Arena& arena,
               cudaStream_t stream) const {
    centroid_forward(call, sizes, tensors, arena, stream);
    if (!out.present()) return;  // counting
    if constexpr (std::is_same_v<Params, ImprovedClusteredParams>)
      topk_forward(call, sizes, tensors, out, stream);
    else
      broadcast_forward(call, tensors, out, stream);
  }
  void gradients(const ClusteredBackward& pass, Arena& arena, cudaStream_t stream) const {
    clustered_backward(call, sizes, pass, arena, stream);
  }

  // Scratch memory for means that are not kept.
  TensorView take_centroids(Arena& arena) const {
    const std::int64_t items = call.num_items();
    float* data = arena.take<float>(items * call.H * sizes.clusters * call.Dk);
    return TensorView::contiguous(data, DType::f32, {items, call.H, sizes.clusters, call.Dk},
                                  Device::cuda);
  }

  // The largest need of any stage; stages that follow each other share the memory.
  std::int64_t bytes() const {
    std::int64_t most = cluster_workspace_bytes(params.clustering, call);
    const auto count = [&](const auto& stages) {
      Arena arena;
      stages(arena);
      most = std::max(most, arena.used());
    };
    count([&](Arena& arena) {
      ClusteredTensors tensors;
      tensors.centroids = take_centroids(arena);
      means(tensors, arena, nullptr);
      select_keys(tensors, arena, nullptr);
    });
    count([&](Arena& arena) {
      ClusteredTensors tensors;
      tensors.centroids = take_centroids(arena);
      means(tensors, arena, nullptr);
      outputs(tensors, {}, arena, nullptr);
    });
    count([&](Arena& arena) { gradients({}, arena, nullptr); });
    return most;
  }
};

bool mass_grad(const ClusteredParams&) { return true; }
bool mass_grad(const ImprovedClusteredParams& params) { return params.mass_grad; }

// Calls body(Clustered<Params>) for the mechanisms that have kernels.
template <class Body>
auto with_clustered(const Mechanism& mechanism, const AttentionCall& call, Body&& body) {
  if (const auto* params = std::get_if<ClusteredParams>(&mechanism))
    return body(Clustered<ClusteredParams>(*params, call));
  if (const auto* params = std::get_if<ImprovedClusteredParams>(&mechanism))
    return body(Clustered<ImprovedClusteredParams>(*params, call));
  fail(call.op, "expected tensors on the cpu; got tensors on cuda, for which there are no kernels");
}

std::string refuse_shape(const AttentionCall& call) {
  const DType dtype = call.inputs.q.dtype;
  if (!supports(dtype))
    return std::string("the CUDA kernels take f32, bf16 and f16, not ") + dtype_name(dtype);
  if (call.Dk != call.Dv)
    return "the CUDA kernels need keys and values of one width; got " + std::to_string(call.Dk) +
           " and " + std::to_string(call.Dv);
  if (call.Dk > kMaxHeadDim)
    return "the CUDA kernels take rows of at most " + std::to_string(kMaxHeadDim) +
           " elements; got " + std::to_string(call.Dk);
  if (std::max(call.N, call.S) > std::numeric_limits<std::int32_t>::max() / 2)
    return "the CUDA kernels count rows in 32 bits; got " +
           std::to_string(std::max(call.N, call.S));
  return "";
}

std::string refuse_clusters(const ClusteringParams& params) {
  if (params.clusters > kMaxClusters)
    return "the CUDA kernels take at most " + std::to_string(kMaxClusters) + " clusters; got " +
           std::to_string(params.clusters);
  return "";
}

std::string refuse(const ClusteredParams& params) { return refuse_clusters(params.clustering); }

std::string refuse(const ImprovedClusteredParams& params) {
  if (params.causal != Causality::none)
    return "the causal form of i-clustered attention has no CUDA kernels";
  if (params.topk > kMaxTopKeys)
    return "the CUDA kernels take at most " + std::to_string(kMaxTopKeys) + " top keys; got " +
           std::to_string(params.topk);
  return refuse_clusters(params.clustering);
}

template <class Params>
std::string refuse(const Params&) {
  return "this mechanism has no CUDA kernels";
}

}  // namespace

std::string refusal(const Mechanism& mechanism, const AttentionCall& call) {
  const std::string reason =
      std::visit([](const auto& params) { return refuse(params); }, mechanism);
  return reason.empty() ? refuse_shape(call) : reason;
}

std::int64_t workspace_bytes(const Mechanism& mechanism, const AttentionCall& call) {
  return with_clustered(mechanism, call, [](const auto& pass) { return pass.bytes(); });
}

void select(const Mechanism& mechanism, const AttentionCall& call,
            const std::vector<TensorView>& saved, const Workspace& workspace) {
  with_clustered(mechanism, call, [&](const auto& pass) {
    Arena arena(call.op.c_str(), workspace, pass.bytes());
    ClusteredTensors tensors = clustered_tensors(pass.params, saved);
    pass.cluster(tensors, workspace);
    if (pass.sizes.topk == 0) return;
    tensors.centroids = pass.take_centroids(arena);
    pass.means(tensors, arena, stream_of(workspace));
    pass.select_keys(tensors, arena, stream_of(workspace));
  });
}

void attend(const Mechanism& mechanism, const AttentionCall& call, const AttentionResult& result,
            const Workspace& workspace) {
  with_clustered(mechanism, call, [&](const auto& pass) {
    Arena arena(call.op.c_str(), workspace, pass.bytes());
    const ClusteredTensors tensors = clustered_tensors(pass.params, result.saved);
    pass.means(tensors, arena, stream_of(workspace));
    pass.outputs(tensors, result.out, arena, stream_of(workspace));
  });
}

void forward(const Mechanism& mechanism, const AttentionCall& call, const AttentionResult& result,
             const Workspace& workspace) {
  with_clustered(mechanism, call, [&](const auto& pass) {
    const std::int64_t needed = pass.bytes();
    const ClusteredTensors tensors = clustered_tensors(pass.params, result.saved);
    {
      Arena arena(call.op.c_str(), workspace, needed);
      pass.cluster(tensors, workspace);
      pass.means(tensors, arena, stream_of(workspace));
      pass.select_keys(tensors, arena, stream_of(workspace));
    }
    Arena arena(call.op.c_str(), workspace, needed);  // the selection's memory is free again
    pass.outputs(tensors, result.out, arena, stream_of(workspace));
  });
}

void backward(const Mechanism& mechanism, const AttentionCall& call, const AttentionResult& result,
              const TensorView& grad_out, const AttentionGradients& gradients,
              const Workspace& workspace) {
  with_clustered(mechanism, call, [&](const auto& pass) {
    Arena arena(call.op.c_str(), workspace, pass.bytes());
    pass.gradients(
        {clustered_tensors(pass.params, result.saved), mass_grad(pass.params), grad_out, gradients},
        arena, stream_of(workspace));
  });
}

}  // namespace coterie::cuda
