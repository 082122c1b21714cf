// SPDX-License-Identifier: MIT
// Sums and means of the rows of every cluster, taken in the sorted order: no atomics, and the
// result depends on nothing but the sizes, the order and the rows.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/arena.h"
#include "core/call.h"
#include "cuda/prim/zero.cuh"

namespace coterie::cuda {

// sums (items, H, C, D) f32: sum over every cluster of rows of x (B, H, N, D), a tensor with the
// call's query sequences, or their mean; 0 for an empty cluster. Sets `zeroed` to zero besides.
// Launches on `stream` and takes scratch memory from `arena`; with an arena that only counts
// nothing is launched, and views other than those of the call and `x` may be absent.
void cluster_sums(const AttentionCall& call, const TensorView& x, const TensorView& order,
                  const TensorView& offsets, const TensorView& sums, Arena& arena,
                  cudaStream_t stream, bool mean = false, const ZeroedWords& zeroed = {});

// centroids (items, H, C, Dk): the mean query of every cluster.
inline void centroid_means(const AttentionCall& call, const TensorView& order,
                           const TensorView& offsets, const TensorView& centroids, Arena& arena,
                           cudaStream_t stream, const ZeroedWords& zeroed = {}) {
  cluster_sums(call, call.inputs.q, order, offsets, centroids, arena, stream, true, zeroed);
}

}  // namespace coterie::cuda
