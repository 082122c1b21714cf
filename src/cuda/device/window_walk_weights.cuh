// SPDX-License-Identifier: MIT
// Weights of 32 queries and 64 keys and their derivatives, in the registers of a warpgroup whose
// rows are the keys (window_walk.cuh).
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/device/list_bwd_group.cuh"
#include "cuda/device/softmax.cuh"
#include "cuda/device/window_walk.cuh"

namespace coterie::cuda {

// The mask tells the compiler how many threads there are.
__device__ __forceinline__ unsigned walk_thread() {
  return thread_again() & (kWalkGroups * kWarpgroup - 1);
}

// The upper one of this thread's two keys; the other is 8 rows below.
__device__ __forceinline__ int walk_row(unsigned thread) {
  return static_cast<int>(thread % kWarpgroup / 32 * 16 + thread % 32 / 4);
}

// delta of 8 queries, over all keys.
template <class T>
__device__ __forceinline__ void exchange(float (&sum)[8], float* parts, unsigned thread) {
  const unsigned own = thread % 32;
  parts[(own / 8 * 8 + own % 4 * 2 + own / 4 % 2) * kWalkPartStride + thread / 32] =
      reduce_columns(sum, own);
  sync_block_anywhere<kWalkGroups * kWarpgroup>();  // from both kinds of half steps
  float total[4];
#pragma unroll
  for (int i = 0; i < kWalkGroups; ++i) {
    const float4 four = *reinterpret_cast<const float4*>(parts + own * kWalkPartStride + 4 * i);
    total[i] = (four.x + four.y) + (four.z + four.w);
  }
  float all = (total[0] + total[1]) + (total[2] + total[3]);
  if constexpr (std::is_same_v<T, F16>) all *= 1.0f / kHalfWeightScale;
#pragma unroll
  for (int i = 0; i < 8; ++i) sum[i] = __shfl_sync(~0u, all, 8 * (i / 2) + own % 4 * 2 + i % 2);
}

// Scores become weights. A lane's keys see the queries [low, low + count).
template <bool kMasked>
__device__ __forceinline__ void weigh_window(float (&s)[16], const float (&d)[16], float (&sum)[8],
                                             const float* shifts, int half, float exponent,
                                             const int (&low)[2], const int (&count)[2],
                                             unsigned thread) {
  const int first = half * kWalkHalf + static_cast<int>(thread % 4 * 2);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float2 shift = *reinterpret_cast<const float2*>(shifts + first + 8 * j);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        float& x = s[4 * j + 2 * side + c];
        x = exp2_approximate(fmaf(x, exponent, c ? -shift.y : -shift.x));
        if (kMasked && static_cast<unsigned>(first + 8 * j + c - low[side]) >=
                           static_cast<unsigned>(count[side]))
          x = 0.0f;
      }
      sum[2 * j + c] = fmaf(s[4 * j + 2 + c], d[4 * j + 2 + c], s[4 * j + c] * d[4 * j + c]);
    }
  }
}
// Of 16 queries: a weight pair as it is multiplied, and its derivative.
template <class T>
__device__ __forceinline__ void window_factors(std::uint32_t (&p)[4], std::uint32_t (&ds)[4], int k,
                                               const float (&s)[16], const float (&d)[16],
                                               const float (&delta)[8]) {
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    const int i = 8 * k + 2 * word, column = 4 * k + word / 2 * 2;
    p[word] = pack2<T>(s[i], s[i + 1]);
    ds[word] = pack2<T>(s[i] * (d[i] - delta[column]), s[i + 1] * (d[i + 1] - delta[column + 1]));
  }
}
// Where the first 16 of the half's queries go in a tile of weights or slopes; the others 32 bytes
// off, by exclusive or.
__device__ __forceinline__ std::uint32_t factor_place(int half, unsigned thread) {
  const unsigned row = thread % kWarpgroup / 32 * 16 + thread % 16;
  return row * 128 + ((static_cast<unsigned>(4 * half) + thread % 32 / 16 ^ thread % 8) << 4);
}

}  // namespace coterie::cuda
