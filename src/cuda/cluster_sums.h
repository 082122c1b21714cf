// SPDX-License-Identifier: MIT
// The first step of sums over clusters, for kernels that do the second themselves. means.cu
#pragma once

#include "core/arena.h"
#include "cuda/device/cluster_sums.cuh"

namespace coterie::cuda {

// Takes `partials` from the arena; null when it only counts.
ClusterSums make_cluster_sums(Arena& arena, const ClusterShape& shape, const TensorView& x,
                              const std::int32_t* order, const std::int32_t* offsets, float* sums);

// Writes args.sums and args.partials from the rows of x (B, H, N, width).
void sum_cluster_tiles(const char* op, const ClusterSums& args, const TensorView& x,
                       cudaStream_t stream);

}  // namespace coterie::cuda
