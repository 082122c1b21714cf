// SPDX-License-Identifier: MIT
// Factors of routing_candidates_sm90a.cu: centroids in shared memory, rows in registers, both in
// half precision because normalised rows are at most sqrt(Dk) long: their elements fit, and scores
// are eight times as close as those of bf16 factors.
#pragma once

#include "cuda/device/load.cuh"
#include "cuda/device/routing_candidate_problem.cuh"
#include "cuda/device/routing_top.cuh"
#include "cuda/device/row_statistics.cuh"
#include "cuda/device/tile.cuh"

namespace coterie::cuda {

constexpr int kTableBand = kTeamColumns * 128;  // bytes of 64 depths of all centroids

// Centroids of the team to shared memory, times their scales; depths in the order of RowFragments.
template <int kChunks>
__device__ __forceinline__ void stage_centroids(const CentredCentroids& centroids, int head,
                                                int first, std::uint32_t table) {
  for (int i = threadIdx.x; i < kTeamColumns * kChunks; i += kCandidateThreads) {
    const int column = i / kChunks, chunk = i % kChunks;
    const auto* from = reinterpret_cast<const float4*>(
        centroids.rows +
        (static_cast<std::int64_t>(head) * centroids.clusters + first + column) * centroids.pitch +
        32 * chunk);
    float value[32], most = 0.0f;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      float4 m = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (first + column < centroids.clusters) m = from[j];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        value[4 * j + k] = (&m.x)[k];
        most = fmaxf(most, fabsf((&m.x)[k]));
      }
    }
#pragma unroll
    for (int step = 1; step < kChunks; step *= 2)
      most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
    const float scale = centroid_scale(most);
    const Tile<F16, 64> band{table + chunk / 2 * kTableBand};
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      uint4 words;
#pragma unroll
      for (int k = 0; k < 4; ++k)
        (&words.x)[k] =
            pack2<F16>(value[8 * k + 2 * pair] * scale, value[8 * k + 2 * pair + 1] * scale);
      store_shared16(band.chunk(column, chunk % 2 * 4 + pair), words);
    }
  }
  fence_async_proxy();
}

// A warp's 16 rows of a tile: on their way, and then as left factors.
template <int kChunks>
struct TokenRows {
  RowWords<CandidateElement, kChunks> words[2];
  RowFragments<F16, kChunks, 1> rows;

  // row_of(i), i < 16, is a row, or negative. Rows are aligned.
  template <class RowOf>
  __device__ __forceinline__ void load(const Rows<const CandidateElement>& from,
                                       const RowOf& row_of) {
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const int row = row_of(8 * side + static_cast<int>(threadIdx.x) % 32 / 4);
      words[side].template load<true>(from, row, row >= 0);
    }
  }

  // put(side, statistics)
  template <class Put>
  __device__ __forceinline__ void normalise(int width, unsigned zero, const Put& put) {
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      float x[8 * kChunks];
      unpack(words[side], x);
      const RowStatistics own = statistics_of<kChunks>(x, width);
      const float shift = -own.mean * own.inverse;
      RowWords<F16, kChunks> y;
#pragma unroll
      for (int i = 0; i < 4 * kChunks; ++i)
        (&y.word[i / 4].x)[i % 4] =
            pack2<F16>(fmaf(x[2 * i], own.inverse, shift), fmaf(x[2 * i + 1], own.inverse, shift));
      rows.set(side, y, zero);
      put(side, own);
    }
  }

  // Starts on the scores of kColumnStep centroids; kAdd 1: they are added to what d has.
  template <int kAdd>
  __device__ __forceinline__ void start(std::uint64_t table, float (&d)[32]) const {
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 2 * kChunks; ++step) {
      const std::uint64_t b = descriptor_behind(table, step / 4 * kTableBand + step % 4 * 32);
      wgmma_step<F16, 0>(kAdd + step, d, rows.a[0][step], b);
    }
    wgmma_commit();
  }
  __device__ static __forceinline__ void finish(float (&d)[32]) {
    wgmma_wait<0>();
    wgmma_settle(d);
  }
};

}  // namespace coterie::cuda
