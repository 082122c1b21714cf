// SPDX-License-Identifier: MIT
// How gradients leave in the backward pass of windows (window_walk.cuh).
#pragma once

#include <cstdint>

#include "cuda/device/list_stream_rows.cuh"
#include "cuda/device/row_chunk.cuh"
#include "cuda/device/window_walk_weights.cuh"

namespace coterie::cuda {

// 2 kCount columns of sums, from column 32 `part` on, of the ranks from `first` on leave as whole
// pieces of rows, through `stage`.
template <class T, int kCount>
__device__ __forceinline__ void store_walk_rows(const float (&sum)[kCount], float factor,
                                                const Rows<T>& rows, int first, int count, int part,
                                                std::uint32_t stage) {
  constexpr unsigned kChunks = kCount / 4, kRows = 32 / kChunks;  // of a row; rows at a time
  const unsigned thread = walk_thread(), lane = thread % 32;
  const unsigned warp_row = thread % kWarpgroup / 32 * 16;
  const std::uint32_t tile = stage + warp_row * 128;
  const std::uint32_t at =
      tile + lane % 16 * 128 + ((lane / 16 + 4 * static_cast<unsigned>(part) ^ lane % 8) << 4);
#pragma unroll
  for (int i = 0; i < kCount / 8; ++i) {
    std::uint32_t word[4];
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      const float low = sum[8 * i + 2 * x], high = sum[8 * i + 2 * x + 1];
      word[x] = pack2<T>(low * factor, high * factor);
    }
    stmatrix_x4(at ^ i * 32, word);
  }
  __syncwarp();
  const unsigned chunk = lane % kChunks + 4 * static_cast<unsigned>(part), row = lane / kChunks;
  const int rank = first + static_cast<int>(warp_row + row), pitch = pitch_bytes(rows);
  const bool inside = static_cast<int>(chunk * 8) < rows.width;
  const std::uint32_t from = tile + row * 128 + ((chunk ^ row % 8) << 4);
#pragma unroll
  for (unsigned i = 0; i < 16 / kRows; ++i) {
    uint4 word;
    asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w)
                 : "r"((from ^ i * kRows % 8 * 16) + i * kRows * 128)
                 : "memory");
    const int at_rank = rank + static_cast<int>(i * kRows);
    if (static_cast<unsigned>(at_rank) < static_cast<unsigned>(count) && inside)
      store_global(row_address(rows.data + chunk * 8, at_rank, pitch), word);
  }
  __syncwarp();
}

}  // namespace coterie::cuda
