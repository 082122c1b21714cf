// SPDX-License-Identifier: MIT
// Affinities of tokens and surrogates by mma.sync: the tiles of a block, their products and the
// partial sums of the softmaxes (cast_select.cu).
#pragma once

#include <cstdint>

#include "cuda/cast_select.h"

namespace coterie::cuda {

constexpr int kAffinityTokens = 128, kAffinityThreads = 256, kAffinityStages = 3;
constexpr int kAffinityHalf = 64;  // clusters of a warp, over which it sums up

// Elements of a row that are multiplied at a time: 128 bytes.
template <class T>
constexpr int kAffinityDepth = 128 / static_cast<int>(sizeof(T));

template <class T>
struct AffinityArgs {
  CastScores scores;
  ItemChunks tiles;
  unsigned units;
  Tensor4<const T> q, k;
  const T* surrogates;  // (H, C, D)
  float2* partials;     // (2 units, 2, B, N): largest affinity and sum of exponentials, or null
  bool keep;            // affinities
};

// The tiles of one step in shared memory.
template <class T>
struct AffinityStage {
  using Shape = Tile<T, kAffinityDepth<T>>;
  static constexpr int kTileBytes = kAffinityTokens * Shape::kRowBytes;
  static constexpr int kBytes = 3 * kTileBytes;
  std::uint32_t base;

  __device__ Shape tokens(int side) const { return {base + side * kTileBytes}; }
  __device__ Shape clusters() const { return {base + 2 * kTileBytes}; }
};
static_assert(kAffinityTokens == kUnitClusters, "tiles of one size");

template <class T>
struct AffinityBlock {
  const AffinityArgs<T>& args;
  ItemChunk tile;
  int unit, list_head, first;  // first cluster

  __device__ int steps() const {
    const int heads = args.scores.shape.list_heads == 1 ? args.scores.shape.H : 1;
    return heads * chunks();
  }
  __device__ int chunks() const {
    return (args.scores.shape.D + kAffinityDepth<T> - 1) / kAffinityDepth<T>;
  }

  __device__ void load(const AffinityStage<T>& stage, int step) const {
    const CastShape& shape = args.scores.shape;
    const int head = list_head + step / chunks(), column = step % chunks() * kAffinityDepth<T>;
    const auto part = [&](Rows<const T> rows) {
      rows.data += column;
      rows.width -= column;
      return rows;
    };
    const int count = tile.end - tile.begin;
    load_tile<kAffinityTokens, kAffinityThreads>(
        stage.tokens(0), part(args.q.rows(tile.span.batch, head, tile.span.begin)), tile.begin,
        count);
    load_tile<kAffinityTokens, kAffinityThreads>(
        stage.tokens(1), part(args.k.rows(tile.span.batch, head / shape.group, tile.span.begin)),
        tile.begin, count);
    const T* table = args.surrogates + static_cast<std::int64_t>(head) * shape.clusters * shape.D;
    load_tile<kUnitClusters, kAffinityThreads>(stage.clusters(), part(dense_rows(table, shape.D)),
                                               first, shape.clusters - first);
  }
};

// Adds the products of a step: 32 tokens and 64 clusters of a warp, for queries and keys.
template <class T>
__device__ __forceinline__ void add_step(Accumulator (&sums)[2][2][4],
                                         const AffinityStage<T>& stage, int row, int column) {
#pragma unroll
  for (int depth = 0; depth < kAffinityDepth<T>; depth += 16) {
    FragmentA<T> a[2][2];
#pragma unroll
    for (int side = 0; side < 2; ++side)
#pragma unroll
      for (int m = 0; m < 2; ++m) load_a(a[side][m], stage.tokens(side), row + 16 * m, depth);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      FragmentB<T> b;
      load_b(b, stage.clusters(), column + 16 * n, depth);
#pragma unroll
      for (int side = 0; side < 2; ++side)
#pragma unroll
        for (int m = 0; m < 2; ++m) multiply_add(sums[side][m][n], a[side][m], b);
    }
  }
}

// Largest affinity and sum of exponentials of a row that four lanes share, of clusters below `end`.
__device__ __forceinline__ float2 row_partial(const Accumulator (&sums)[4], int half_row,
                                              int column, int end) {
  float largest = -INFINITY, sum = 0.0f;
  const auto visit = [&](const auto& body) {
#pragma unroll
    for (int i = 0; i < 16; ++i)
      if (column + i / 4 * 16 + i / 2 % 2 * 8 + i % 2 < end)
        body(sums[i / 4][i / 2 % 2][2 * half_row + i % 2]);
  };
  visit([&](float value) { largest = fmaxf(largest, value); });
  largest = quad_max(largest);
  visit([&](float value) { sum += expf(value - largest); });
  return make_float2(largest, quad_sum(sum));
}

template <class T>
__device__ __forceinline__ void write_affinities(const AffinityBlock<T>& block,
                                                 const Accumulator (&sums)[2][2][4], int row,
                                                 int column) {
  const CastScores& scores = block.args.scores;
  const int lane = threadIdx.x % 32, end = scores.shape.clusters - block.first;
  const int own = column + lane % 4 * 2;
  const std::int64_t first =
      static_cast<std::int64_t>(block.tile.span.batch) * scores.shape.N + block.tile.span.begin;
#pragma unroll
  for (int side = 0; side < 2; ++side)
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int token = block.tile.begin + row + 16 * m + 8 * half + lane / 4;
        const bool there = token < block.tile.end;
        if (block.args.partials) {
          const float2 partial = row_partial(sums[side][m], half, own, end);
          const int part = (2 * block.unit + column / kAffinityHalf) * 2 + side;
          if (there && lane % 4 == 0)
            block.args.partials[part * scores.rows() + first + token] = partial;
        }
        if (!block.args.keep || !there) continue;
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          const int c = own + i / 4 * 16 + i / 2 % 2 * 8 + i % 2;
          if (c < end)
            scores.affinity(block.unit, side, c)[first + token] =
                sums[side][m][i / 4][i / 2 % 2][2 * half + i % 2];
        }
      }
}

}  // namespace coterie::cuda
