// SPDX-License-Identifier: MIT
// Reductions, scans and searches of a warp or a block. Preconditions: all lanes of the warp call,
// and for the block functions all threads of the block.
#pragma once

#include <cstdint>

namespace coterie::cuda {

// This thread's number, opaque to the compiler: values derived from it are recomputed where they
// are used, which lowers register pressure.
__device__ __forceinline__ unsigned thread_again() {
  unsigned thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// The sum and the maximum of the lanes' values, in all lanes of a warp.
template <class T>
__device__ __forceinline__ T warp_sum(T value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
  return value;
}
__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value = fmaxf(value, __shfl_xor_sync(~0u, value, step));
  return value;
}

// The sum of the values of this lane and those before it.
template <class T>
__device__ __forceinline__ T warp_inclusive_scan(T value) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const T other = __shfl_up_sync(~0u, value, step);
    if (static_cast<int>(threadIdx.x) % 32 >= step) value += other;
  }
  return value;
}

// Shows the compiler that all lanes of a warp have the same value: descriptors computed from it
// stay in uniform registers.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(~0u, value, 0); }
// The same for a loop count >= 0: the assembler keeps values computed in the loop in uniform
// registers only if it knows that all lanes make the same number of trips.
__device__ __forceinline__ int uniform_trips(int number) { return __reduce_max_sync(~0u, number); }

// Sum of `value` over the threads of the block before this one; `carry` is added, and becomes the
// next carry. Called by all threads; it synchronises them.
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

// How many of the first `count` entries of an ascending list are <= `most`.
__device__ __forceinline__ int count_up_to(const std::int32_t* list, int count, int most) {
  int low = 0;
  while (low < count) {
    const int middle = (low + count) / 2;
    if (list[middle] <= most)
      low = middle + 1;
    else
      count = middle;
  }
  return low;
}

}  // namespace coterie::cuda
