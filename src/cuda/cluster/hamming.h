// SPDX-License-Identifier: MIT
// k-means of 64-bit codes in Hamming distance, one persistent kernel for all iterations.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/arena.h"
#include "cuda/cluster/group.h"
#include "cuda/prim/team.cuh"

namespace coterie::cuda {

// What the kernel needs of the workspace. Members are null when the arena only counts.
struct HammingBuffers {
  std::uint64_t* centroids = nullptr;  // (problems, C)
  std::int32_t* votes = nullptr;       // (problems, C, 64): members with a bit set, see hamming.cu
  std::uint32_t* changes = nullptr;    // (blocks, segments, C, 32)
  std::int32_t* histograms = nullptr;  // (2, blocks, C)
  unsigned* zeroed = nullptr;          // to be zeroed by an earlier kernel
  std::int64_t zeroed_count = 0;

  HammingBuffers() = default;
  HammingBuffers(Arena& arena, const ClusterShape& shape, int iterations);
};

struct HammingRun {
  int iterations, bits;
  const std::uint64_t* codes;  // (B, H, N)
  ClusterLists out;
};

// Labels by k-means, then order and offsets. With at most C rows every row is its own cluster.
void hamming_kmeans(const ClusterShape& shape, const HammingRun& run, const HammingBuffers& buffers,
                    cudaStream_t stream);

}  // namespace coterie::cuda
