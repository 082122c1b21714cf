// SPDX-License-Identifier: MIT
// All passes of the k-means in the keys' metric (key_metric.h) as one kernel, for 16-bit queries of
// up to 64 elements and up to 256 clusters on Hopper. key_kmeans_sm90a.cu
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/arena.h"
#include "core/call.h"
#include "cuda/cluster/group.h"
#include "cuda/cluster/key_metric.h"
#include "cuda/prim/team.cuh"

namespace coterie::cuda {

// Whether the kernel can run a call of this shape, and has blocks enough to be worth it; and
// whether it serves the call itself, whose rows must be aligned.
bool key_kmeans_fits(const AttentionCall& call, const ClusterShape& shape);
bool key_kmeans_serves(const AttentionCall& call, const ClusterShape& shape);

struct KeyKMeansBuffers {
  float* sums = nullptr;            // (blocks, 256, 64)
  unsigned char* tables = nullptr;  // of centroids, for each team
  std::int32_t* counts = nullptr;   // (blocks, 256)
  std::int32_t* ranks = nullptr;    // (B, H, N): of a row among those of its block and cluster
  unsigned* arrivals = nullptr;     // a word for each team

  KeyKMeansBuffers() = default;
  KeyKMeansBuffers(Arena& arena, const AttentionCall& call, const ClusterShape& shape);
};

struct KeyKMeansRun {
  int passes;
  ClusterLists out;
  float* means;        // (items, H, C, Dk) of the final clusters, or null
  ZeroedWords zeroed;  // besides, for later kernels
};

// `metric` keeps the covariance and the centroids.
void key_kmeans(const AttentionCall& call, const ClusterShape& shape,
                const KeyMetricBuffers& metric, const KeyKMeansBuffers& buffers,
                const KeyKMeansRun& run, cudaStream_t stream);

}  // namespace coterie::cuda
