// SPDX-License-Identifier: MIT
// Two rows of a warp side by side, 16 lanes each. All lanes of the warp call these together.
#pragma once

#include <cstdint>

namespace coterie::cuda {

constexpr int kRowLanes = 16;

__device__ __forceinline__ int row_lane() { return static_cast<int>(threadIdx.x) % kRowLanes; }

template <class Value>
__device__ __forceinline__ Value row_sum(Value value) {
#pragma unroll
  for (int step = kRowLanes / 2; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
  return value;
}
template <class Value>
__device__ __forceinline__ Value row_max(Value value) {
#pragma unroll
  for (int step = kRowLanes / 2; step > 0; step /= 2)
    value = max(value, __shfl_xor_sync(~0u, value, step));
  return value;
}

// Bit l: what lane l of the row says.
__device__ __forceinline__ std::uint32_t row_votes(bool vote) {
  return __ballot_sync(~0u, vote) >> (threadIdx.x & kRowLanes) & 0xffffu;
}

// The sum over the lanes before this one.
__device__ __forceinline__ int row_sum_before(int value) {
  int sum = value;
#pragma unroll
  for (int step = 1; step < kRowLanes; step *= 2) {
    const int other = __shfl_up_sync(~0u, sum, step, kRowLanes);
    if (row_lane() >= step) sum += other;
  }
  return sum - value;
}

// The larger of both rows' values.
__device__ __forceinline__ int pair_max(int value) { return __reduce_max_sync(~0u, value); }

}  // namespace coterie::cuda
