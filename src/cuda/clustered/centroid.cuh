// SPDX-License-Identifier: MIT
// Scores of cluster means against keys: what the centroid kernels share. Means are f32 in memory
// and rounded to the element type for the products.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/prim/fragments.cuh"
#include "cuda/prim/load.cuh"
#include "cuda/prim/splits.cuh"

namespace coterie::cuda {

constexpr int kCentroidRows = 128;  // of a block of the kernels for all architectures

// The cluster means of a call as queries over all keys. "Row" of a cluster: (item * H + h) * C + c.
struct CentroidQueries {
  ItemSpans spans;
  ItemChunks chunks;
  const float* centroids;       // (items, H, C, width)
  const std::int32_t* offsets;  // (items, H, C + 1)
  int H, group, clusters, width;
  int block_rows, row_tiles;      // means of a thread block; blocks for all of them
  float sign, exponent, inverse;  // sign of the scale; |scale| log2(e), and 1 over it

  __device__ std::int64_t row(int item, int head, int cluster) const {
    return (static_cast<std::int64_t>(item) * H + head) * clusters + cluster;
  }
  __device__ bool empty(int item, int head, int cluster) const {
    const std::int64_t first = (static_cast<std::int64_t>(item) * H + head) * (clusters + 1);
    return offsets[first + cluster] >= offsets[first + cluster + 1];
  }
};

// Block number = (slot * H + head) * row_tiles + tile: blocks that read the same keys are
// neighbours.
struct CentroidBlock {
  int slot, head, first;

  __device__ CentroidBlock(const CentroidQueries& queries, unsigned number)
      : slot(static_cast<int>(number / queries.row_tiles) / queries.H),
        head(static_cast<int>(number / queries.row_tiles) % queries.H),
        first(static_cast<int>(number % queries.row_tiles) * queries.block_rows) {}
};

// Fills kRows rows of the tile with columns from `column0` on of the means of clusters first,
// first + 1, ... times the sign of the scale; what is beyond the last cluster or column is zero.
template <int kRows, int kThreads, class T, int kDim>
__device__ __forceinline__ void load_centroids(const Tile<T, kDim>& tile,
                                               const CentroidQueries& queries, int item, int head,
                                               int first, int column0 = 0) {
  using Shape = Tile<T, kDim>;
  const float* means = queries.centroids + queries.row(item, head, 0) * queries.width;
  const bool whole = queries.width % 4 == 0;  // float4 are aligned, and inside or outside
  constexpr int kVector = Shape::kVector;
  const auto store = [&](int number, const float(&values)[kVector]) {
    union {
      T elements[kVector];
      uint4 words;
    } rounded;
#pragma unroll
    for (int i = 0; i < kVector; ++i) rounded.elements[i] = from_float<T>(values[i] * queries.sign);
    store_shared16(tile.chunk(number / Shape::kChunks, number % Shape::kChunks), rounded.words);
  };
  // Where a chunk stands, and how many of its elements are there.
  const auto left_of = [&](int number, const float*& from) {
    const int column = column0 + number % Shape::kChunks * kVector;
    const int cluster = first + number / Shape::kChunks;
    const int left = cluster < queries.clusters ? queries.width - column : 0;
    from = means + (left > 0 ? static_cast<std::int64_t>(cluster) * queries.width + column : 0);
    return left;
  };
  if (!whole) {  // rare
#pragma unroll 1
    for (int number = threadIdx.x; number < kRows * Shape::kChunks; number += kThreads) {
      const float* from;
      const int left = left_of(number, from);
      float values[kVector];
#pragma unroll
      for (int i = 0; i < kVector; ++i) values[i] = i < left ? from[i] : 0.0f;
      store(number, values);
    }
    return;
  }
  constexpr int kTotal = kRows * Shape::kChunks / kThreads, kBatch = kTotal % 4 == 0 ? 4 : 1;
  static_assert(kRows * Shape::kChunks % kThreads == 0, "every thread has as many");
#pragma unroll 1
  for (int step = 0; step < kTotal; step += kBatch) {  // loads of a batch are in flight together
    float values[kBatch][kVector];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const float* from;
      const int left = left_of(threadIdx.x + (step + j) * kThreads, from);
#pragma unroll
      for (int i = 0; i < kVector; i += 4) {
        const float4 four = *reinterpret_cast<const float4*>(from + (i < left ? i : 0));
#pragma unroll
        for (int e = 0; e < 4; ++e) values[j][i + e] = i < left ? (&four.x)[e] : 0.0f;
      }
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) store(threadIdx.x + (step + j) * kThreads, values[j]);
  }
}

}  // namespace coterie::cuda
