// SPDX-License-Identifier: MIT
// Centroids minus their means, m_c = mu_c - mean(mu_c), one warp each: lane l has elements l, l +
// 32, ... For rows y of zero mean y . mu_c = y . m_c. In registers, no shared memory; used by
// rows.cu and the scan.
#pragma once

#include "cuda/prim/warp.cuh"

namespace coterie::cuda {

// Zeros beyond the width.
template <int kEach>
__device__ __forceinline__ void load_centroid(const float* from, int width, float (&value)[kEach]) {
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int d = static_cast<int>(threadIdx.x) % 32 + 32 * i;
    value[i] = d < width ? from[d] : 0.0f;
  }
}

// Subtracts the mean of `width` elements. Returns the remaining length.
template <int kEach>
__device__ __forceinline__ float centre_centroid(int width, float (&value)[kEach]) {
  float sum = 0.0f, squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kEach; ++i) sum += value[i];
  const float mean = warp_sum(sum) / static_cast<float>(width);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int d = static_cast<int>(threadIdx.x) % 32 + 32 * i;
    value[i] = d < width ? value[i] - mean : 0.0f;
    squares = fmaf(value[i], value[i], squares);
  }
  return sqrtf(warp_sum(squares));
}

}  // namespace coterie::cuda
