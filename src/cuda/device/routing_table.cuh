// SPDX-License-Identifier: MIT
// Rows of bf16 against a table of centred centroids (CentredCentroids in routing.h) on tensor
// cores: what the scans of routing share.
#pragma once

#include <cstdint>

#include "cuda/device/row_fragments.cuh"
#include "cuda/routing.h"

namespace coterie::cuda {

constexpr int kTableParts = 2;  // of a centroid's element

// Columns [first, first + columns) of a head's table to shared memory, multiples of 8: the first
// kParts parts of them. By kThreads threads, which then wait for their copies.
template <int kThreads, int kChunks, int kParts>
__device__ __forceinline__ void stage_columns(const CentredCentroids& centroids, int head,
                                              int first, int columns, uint4* shared) {
  constexpr int kTile = kChunks * 32;  // vectors of a part of 8 columns
  const auto* from =
      static_cast<const uint4*>(centroids.table) +
      (static_cast<std::int64_t>(head) * centroids.padded + first) / 8 * (kTableParts * kTile);
  const std::uint32_t to = shared_address(shared);
  for (int i = threadIdx.x; i < columns / 8 * kParts * kTile; i += kThreads) {
    const int tile = i / (kParts * kTile), within = i % (kParts * kTile);
    cp_async16(to + i * 16, from + tile * kTableParts * kTile + within, 16);
  }
  cp_async_commit();
}

__device__ __forceinline__ void finish_stage() {
  cp_async_wait<0>();
  __syncthreads();
}

// (x - mean) * inverse of a lane's part of a row, rounded.
template <int kChunks>
__device__ __forceinline__ RowWords<__nv_bfloat16, kChunks> normalised(
    const RowWords<__nv_bfloat16, kChunks>& row, const RowStatistics& stats) {
  RowWords<__nv_bfloat16, kChunks> y;
#pragma unroll
  for (int i = 0; i < kChunks; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const std::uint32_t word = (&row.word[i].x)[j];
      const float low = __uint_as_float(word << 16), high = __uint_as_float(word & 0xffff0000u);
      (&y.word[i].x)[j] = pack2<__nv_bfloat16>((low - stats.mean) * stats.inverse,
                                               (high - stats.mean) * stats.inverse);
    }
  return y;
}

}  // namespace coterie::cuda
