// SPDX-License-Identifier: MIT
// How gradients leave in the backward pass of whole lists (whole_list.cuh).
#pragma once

#include <cstdint>

#include "cuda/device/list_bwd_group.cuh"
#include "cuda/device/list_stream_rows.cuh"
#include "cuda/device/whole_list.cuh"

namespace coterie::cuda {

// Rows of sums times a factor, to slots from `slot` on; `count` of them are there. Rounded ones
// go through `stage`, a tile of which a warp uses its own 16 rows, and leave as whole rows.
template <class T>
__device__ __forceinline__ void store_rows(const float (&sum)[32], float factor, int width,
                                           const ListSums<T>& to, std::int64_t slot, int count,
                                           std::uint32_t stage) {
  if (!to.wanted()) return;
  const int thread = static_cast<int>(thread_again()), lane = thread % 32;
  const int warp_row = thread % kWarpgroup / 32 * 16;
  if (to.rounded) {
    const std::uint32_t at = stage + (warp_row + lane % 16) * 128 + ((lane / 16 ^ lane % 8) << 4);
#pragma unroll
    for (int d = 0; d < 4; ++d) {
      std::uint32_t word[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        word[i] = pack2<T>(sum[8 * d + 2 * i] * factor, sum[8 * d + 2 * i + 1] * factor);
      stmatrix_x4(at ^ d * 32, word);
    }
    __syncwarp();
    const int row = warp_row + lane / 8;
    const std::uint32_t from = stage + row * 128 + ((lane % 8 ^ lane / 8) << 4);
    T* target = static_cast<T*>(to.slots) + (slot + row) * width + lane % 8 * 8;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint4 word;
      asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
                   : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w)
                   : "r"((from ^ i % 2 * 64) + 512 * i)
                   : "memory");
      if (row + 4 * i < count && lane % 8 * 8 < width) store_global(target + 4 * i * width, word);
    }
    __syncwarp();
  } else {
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const int row = warp_row + 8 * side + lane / 4;
      if (row >= count) continue;
      float* row_of = static_cast<float*>(to.slots) + (slot + row) * width + lane % 4 * 2;
#pragma unroll
      for (int j = 0; j < 8; ++j)
        if (8 * j + lane % 4 * 2 < width)
          store2(row_of + 8 * j, sum[4 * j + 2 * side] * factor,
                 sum[4 * j + 2 * side + 1] * factor);
    }
  }
}

// Back through the normalisation of rows in shared memory.
template <class T, class Stats>
__device__ __forceinline__ void carry_back(float (&sum)[32], std::uint32_t rows, int width,
                                           const Stats& stats_of) {
  float product[2];
  const RowStatistics both[2] = {stats_of(group_row(0)), stats_of(group_row(1))};
  denormalise(sum, Tile<T, 64>{rows}, both, width, product);
}

}  // namespace coterie::cuda
