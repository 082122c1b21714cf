// SPDX-License-Identifier: MIT
// Rows that a warp of attend_centroid_bwd.cu owns, keys or centroids, and tiles of the other side.
#pragma once

#include <cstdint>

#include "cuda/clustered_bwd.h"
#include "cuda/device/load.cuh"
#include "cuda/device/query_fragments.cuh"
#include "cuda/device/softmax.cuh"

namespace coterie::cuda {

// A warp owns kBlocks x 16 rows of one side and walks tiles of kStep rows of the other. Operands
// that stay are kept in registers where they fit: two products need 2 x kBlocks x kWidth / 8 each.
template <class T, int kWidth>
struct CentroidShape {
  static constexpr bool kHalf = sizeof(T) == 2;
  static constexpr int kBlocks = kHalf && kWidth <= 64 ? 2 : 1;
  static constexpr int kWarps = kHalf && kWidth > 64 ? 8 : 4;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kOwned = 16 * kBlocks * kWarps;
  static constexpr int kStep = kHalf ? 64 : 32;
  static constexpr int kDepths = kWidth / 16;
  static constexpr int kTileBytes = kStep * kWidth * static_cast<int>(sizeof(T));
  static constexpr int kOwnedBytes = kOwned * kWidth * static_cast<int>(sizeof(T));
  static constexpr int kStats = 2 * kStep * static_cast<int>(sizeof(float));
  // Two owned tiles, two stages of two tiles with two numbers a row.
  static constexpr int kSharedBytes = 2 * kOwnedBytes + 4 * kTileBytes + 2 * kStats;
  static constexpr int kMinBlocks = kWarps == 4 && kHalf ? 2 : 1;
};

template <class T, int kWidth>
using OwnedRows =
    QueryFragments<T, kWidth, CentroidShape<T, kWidth>::kHalf, CentroidShape<T, kWidth>::kBlocks>;

// The stacked centroids of the query heads of one key head.
struct StackedRows {
  std::int64_t first;
  int count;
};

__device__ __forceinline__ StackedRows stacked_rows(const BackwardShape& shape, int item,
                                                    int key_head) {
  const std::int64_t head = static_cast<std::int64_t>(item) * shape.H + key_head * shape.group;
  return {head * shape.clusters, shape.group * shape.clusters};
}

template <class T>
__device__ __forceinline__ Rows<const T> scratch_rows(const T* rows, std::int64_t first,
                                                      int pitch) {
  return {rows + first * pitch, pitch, pitch, true};
}

// Weights and their derivatives of 16 columns (centroids): stats holds lse and delta of the
// columns.
template <class T, int kBlocks>
__device__ __forceinline__ void differentiate_columns(Accumulator (&s)[kBlocks],
                                                      Accumulator (&d)[kBlocks], const float* lse,
                                                      const float* delta, float scale) {
  const int column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float2 l = *reinterpret_cast<const float2*>(lse + 8 * half + column);
    const float2 e = *reinterpret_cast<const float2*>(delta + 8 * half + column);
#pragma unroll
    for (int m = 0; m < kBlocks; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float p = exp2_approximate(fmaf(s[m][half][i], scale, -(i % 2 ? l.y : l.x)));
        s[m][half][i] = p;
        d[m][half][i] = p * (d[m][half][i] - (i % 2 ? e.y : e.x));
      }
  }
}

}  // namespace coterie::cuda
