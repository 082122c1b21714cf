// SPDX-License-Identifier: MIT
// What the thresholds and the scan for routing's candidates share: normalised rows of bf16 times
// centroids, from half-precision factors on tensor cores.
//
// Half precision because normalised rows are at most sqrt(Dk) long: their elements fit, and scores
// are eight times as close as those of bf16 factors.
#pragma once

#include <cstdint>

#include "cuda/device/routing_top.cuh"
#include "cuda/device/row_fragments.cuh"
#include "cuda/launch.h"
#include "cuda/routing.h"

namespace coterie::cuda {

constexpr float kCandidateAim = 2.5f;    // candidates that thresholds should leave ...
constexpr int kCandidateRoom = 4;        // ... and room for them, times the wanted rows
constexpr int kLeastCandidateRows = 16;  // of a sequence, times the wanted rows

// Tiles of 16 rows of a warp.
template <int kChunks>
constexpr int kCandidateTiles = kChunks <= 2 ? 2 : 1;

struct CandidateSide {
  Tensor4<const __nv_bfloat16> x;
  SequenceSpans spans;
  int heads, group;
  const RowStatistics* stats;
  int width;  // of the members
  CandidateLists lists;
};

struct CandidateArgs {
  CandidateSide sides[2];
  CentredCentroids centroids;
  ZeroedWords zeroed;
  int columns;    // of a block
  unsigned zero;  // 0, unknown to the compiler: see RowFragments
};

// What a block works on: head y of the queries, then of the keys, of batch entry z.
struct CandidateBlock {
  const CandidateSide& side;
  int head, batch, length;
  Rows<const __nv_bfloat16> rows;
  const RowStatistics* stats;
  std::int64_t list;  // of the head's first centroid

  __device__ CandidateBlock(const CandidateArgs& args, bool keys)
      : side(args.sides[keys]),
        head(static_cast<int>(blockIdx.y) - (keys ? args.sides[0].heads : 0)),
        batch(static_cast<int>(blockIdx.z)),
        length(side.spans.span(batch).length),
        rows(side.x.rows(batch, head, 0)),
        stats(side.stats +
              (static_cast<std::int64_t>(batch) * side.heads + head) * side.spans.rows),
        list((static_cast<std::int64_t>(batch) * side.heads + head) * args.centroids.clusters) {}
};

// 8 elements of a head's centroid times its scale, zeros for those that are not there; lane l of
// kLanes has elements 8 l .. 8 l + 7. By all lanes of the warp.
template <int kLanes>
__device__ __forceinline__ uint4 scaled_centroid(const CentredCentroids& centroids, int head,
                                                 int cluster) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  float4 x[2] = {};
  if (cluster >= 0 && cluster < centroids.clusters) {
    const auto* from = reinterpret_cast<const float4*>(
        centroids.rows +
        (static_cast<std::int64_t>(head) * centroids.clusters + cluster) * centroids.pitch);
    x[0] = from[2 * lane], x[1] = from[2 * lane + 1];
  }
  float most = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) most = fmaxf(most, fabsf((&x[0].x)[i]));
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
  const float scale = centroid_scale(most);
  uint4 words;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    (&words.x)[i] = pack2<__half>((&x[0].x)[2 * i] * scale, (&x[0].x)[2 * i + 1] * scale);
  return words;
}

// Tiles of 16 rows on their way, with their statistics.
template <int kChunks, int kMTiles>
struct RowsAhead {
  RowWords<__nv_bfloat16, kChunks> words[kMTiles][2];
  RowStatistics stats[kMTiles][2];

  // row_of(i), i = 0 .. 16 * kMTiles - 1, is a row, or negative.
  template <class RowOf>
  __device__ __forceinline__ void load(const CandidateBlock& block, const RowOf& row_of) {
    if (block.rows.aligned)  // one branch around all loads, so that they are on their way together
      load_all<true>(block, row_of);
    else
      load_all<false>(block, row_of);
  }

  // Normalised: take(16 rows, half of them, elements).
  template <class Take>
  __device__ __forceinline__ void normalised(const Take& take) const {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m)
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        const float inverse = stats[m][s].inverse, shift = -stats[m][s].mean * inverse;
        RowWords<__half, kChunks> y;
#pragma unroll
        for (int i = 0; i < kChunks; ++i)
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const std::uint32_t word = (&words[m][s].word[i].x)[j];
            (&y.word[i].x)[j] =
                pack2<__half>(fmaf(__uint_as_float(word << 16), inverse, shift),
                              fmaf(__uint_as_float(word & 0xffff0000u), inverse, shift));
          }
        take(m, s, y);
      }
  }

 private:
  template <bool kAligned, class RowOf>
  __device__ __forceinline__ void load_all(const CandidateBlock& block, const RowOf& row_of) {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m)
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        const int row = row_of(16 * m + 8 * s + static_cast<int>(threadIdx.x) % 32 / 4);
        words[m][s].template load<kAligned>(block.rows, row, row >= 0);
        stats[m][s] = row >= 0 ? block.stats[row] : RowStatistics{0.0f, 0.0f};
      }
  }
};

// routing_thresholds.cu
void find_thresholds(const AttentionCall& call, const CandidateArgs& args, dim3 grid,
                     cudaStream_t stream);
}  // namespace coterie::cuda
