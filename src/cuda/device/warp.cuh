// SPDX-License-Identifier: MIT
#pragma once

namespace coterie::cuda {

// The sum over the lanes of a warp, in all of them.
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
  return value;
}

// What all lanes of a warp have, so that the compiler sees it: descriptors that are computed from
// it stay in uniform registers.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(~0u, value, 0); }
// The same of a number >= 0 on which loops depend: the assembler keeps what is computed in them in
// uniform registers only if it knows the trips to be the same.
__device__ __forceinline__ int uniform_trips(int number) { return __reduce_max_sync(~0u, number); }

}  // namespace coterie::cuda
