// SPDX-License-Identifier: MIT
#pragma once

#include "cuda/device/warp.cuh"

namespace coterie::cuda {

// Sum of `value` over the threads of the block before this one; `carry` is added, and becomes the
// next carry. By all threads, which it synchronises.
__device__ inline int block_exclusive_scan(int value, int& carry) {
  __shared__ int warp_sums[32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int sum = warp_inclusive_scan(value);
  if (lane == 31) warp_sums[warp] = sum;
  __syncthreads();
  int before = 0, total = 0;
  for (int w = 0; w < static_cast<int>(blockDim.x) / 32; ++w) {
    before += w < warp ? warp_sums[w] : 0;
    total += warp_sums[w];
  }
  __syncthreads();
  const int result = carry + before + sum - value;
  carry += total;
  return result;
}

}  // namespace coterie::cuda
