// SPDX-License-Identifier: MIT
// Clusters of queries on the GPU, by any of the three clusterings (see coterie/params.h).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/call.h"
#include "coterie/params.h"
#include "cuda/prim/zero.cuh"

namespace coterie::cuda {

// Most clusters of one (item, head) that the kernels support.
constexpr std::int64_t kMaxClusters = 32768;

// Bytes of device memory, aligned to 64, that cluster_queries needs. `params` are resolved.
std::int64_t cluster_workspace_bytes(const ClusteringParams& params, const AttentionCall& call);

// Whether cluster_queries can also write the means of its clusters.
bool clusters_with_means(const ClusteringParams& params, const AttentionCall& call);

// The mean query of every cluster, as in means.h, and words that are set to zero.
struct ClusterExtra {
  float* means = nullptr;
  ZeroedWords zeroed;
};

// labels (B, H, N): cluster of every query, -1 in padding; order (B, H, N) and offsets (items, H,
// C+1): the stable sort of each item's queries by label (see core/clustering.h); all int32 and
// contiguous. Launches on `stream` and returns; the same inputs give the same bits. `extra` is only
// written if clusters_with_means().
void cluster_queries(const ClusteringParams& params, const AttentionCall& call,
                     const TensorView& labels, const TensorView& order, const TensorView& offsets,
                     void* workspace, cudaStream_t stream, const ClusterExtra& extra = {});

}  // namespace coterie::cuda
