// SPDX-License-Identifier: MIT
// Columns of a tile of scores or weights, 64 by 64, in the registers of a warpgroup: a thread has
// columns 8 j + 2 (l%4) + {0, 1} of two rows, 16 of each. Numbers and bits below are of these 16.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/device/list_stream_copy.cuh"

namespace coterie::cuda {

// How many are below `column` of the tile.
__device__ __forceinline__ int columns_below(int column) {
  const int own = min(max(column - static_cast<int>(threadIdx.x) % 4 * 2, 0), kStreamRows);
  return own / 8 * 2 + min(own % 8, 2);
}
// A bit for each that is not; the bits above the 16th do not count.
__device__ __forceinline__ std::uint32_t columns_from(int column) {
  return ~0u << columns_below(column);
}

// -inf for scores of a row whose bit is 0.
__device__ __forceinline__ void mask_columns(float (&s)[32], int half, std::uint32_t seen) {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    float& score = s[i / 2 * 4 + 2 * half + i % 2];
    score = seen >> i & 1 ? score : -INFINITY;
  }
}
// Scores of another tile where the bit is 0.
__device__ __forceinline__ void replace_columns(float (&s)[32], const float (&other)[32], int half,
                                                std::uint32_t own) {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int at = i / 2 * 4 + 2 * half + i % 2;
    s[at] = own >> i & 1 ? s[at] : other[at];
  }
}
// Weights of a row, packed: the first `count` go to `other` and leave 0 behind.
__device__ __forceinline__ void split_columns(std::uint32_t (&p)[4][4],
                                              std::uint32_t (&other)[4][4], int half, int count) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    std::uint32_t& word = p[j / 2][half + j % 2 * 2];
    std::uint32_t own;  // 0 where it is shifted by 32 bits or more
    asm("shl.b32 %0, %1, %2;" : "=r"(own) : "r"(~0u), "r"(max(16 * count - 32 * j, 0)));
    other[j / 2][half + j % 2 * 2] = word & ~own;
    word &= own;
  }
}

}  // namespace coterie::cuda
