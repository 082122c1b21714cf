// SPDX-License-Identifier: MIT
#pragma once

namespace coterie::cuda {

// The sum over the lanes of a warp, in all of them.
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
  return value;
}

}  // namespace coterie::cuda
