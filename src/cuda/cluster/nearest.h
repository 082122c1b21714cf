// SPDX-License-Identifier: MIT
// The cluster with the largest x . m_c + b_c for every row x: a product of rows and centroids of
// which only the arg-max is kept.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/arena.h"
#include "core/call.h"
#include "cuda/cluster/group.h"
#include "cuda/cluster/key_metric.h"
#include "cuda/prim/team.cuh"

namespace coterie::cuda {

// 16-bit parts of which rows and centroids of type T consist in the product.
template <class T>
struct NearestParts {
  static constexpr int kParts = sizeof(T) == 2 ? 1 : 2;
};

struct NearestBuffers {
  std::int32_t* histograms = nullptr;  // (2, blocks, C)
  unsigned* zeroed = nullptr;  // `passes` x `teams` words, to be zeroed by an earlier kernel
  std::int64_t teams = 0, passes = 0;

  NearestBuffers(Arena& arena, const ClusterShape& shape, std::int64_t passes);
};

// Labels of the rows of x (B, H, N, D), then order and offsets. With at most C rows every row is
// its own cluster. `pass` is the number of this launch, below buffers.passes. Ties go to the lower
// cluster; a row with a NaN or infinite score to cluster 0.
void nearest_clusters(const AttentionCall& call, const ClusterShape& shape,
                      const CentroidTable& table, const NearestBuffers& buffers, std::int64_t pass,
                      const ClusterLists& out, cudaStream_t stream);

}  // namespace coterie::cuda
