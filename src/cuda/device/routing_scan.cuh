// SPDX-License-Identifier: MIT
// Scores of rows and centroids for routing_scan_sm90a.cu: 64 rows of a warpgroup, in registers, and
// kScanStep centroids at a time from shared memory, both in f16.
#pragma once

#include "cuda/device/nearest.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/device/wgmma.cuh"
#include "cuda/device/wgmma_e4m3.cuh"
#include "cuda/routing.h"

namespace coterie::cuda {

using ScanElement = Bf16;
using ScanHalf = F16;

// Warpgroups of a block, as many as have registers enough for rows of 32 * kChunks elements.
template <int kChunks>
constexpr int kScanGroups = kChunks <= 2 ? 4 : 3;
template <int kChunks>
constexpr int kScanThreads = kScanGroups<kChunks>* kWarpgroup;
constexpr int kMostScanGroups = 4, kMostScanWarps = kMostScanGroups * kWarpgroup / 32;
constexpr int kScanStep = 64;  // centroids at a time
constexpr int kScanRows = 64;

// Rows of lengths in [2, 2^8) are taken as they are: their elements fit into e4m3, and what is lost
// there of small ones is less than 2^-7 of the length. Other rows are brought to 2 by a power of
// two; the longest centroid is brought to 2^11, so that what rounding to f16 takes from the
// centroids fits into e4m3, too.
constexpr float kShortestRow = 2.0f, kLongestRow = 0x1p8f, kTableLength = 0x1p11f;
// What products in e4m3 miss of x . rest, over |x| |rest|: half a unit of x's 4 bits, small
// elements, and sums of 14 bits.
constexpr float kRowLoss = 0x1p-4f + 0x1p-7f + 0x1p-7f;

template <int kChunks>
constexpr int kScanBands = (kChunks + 1) / 2;  // of 64 depths

__device__ __forceinline__ int group_number() {
  return static_cast<int>(threadIdx.x / unsigned{kWarpgroup});
}

// What the rows of a block's problem are measured with.
struct ScanTable {
  std::uint64_t descriptor;
  int low_part;  // bytes behind it are what rounding took from the centroids; 0: nowhere
  int columns, clusters, pitch;
  int halves;              // twice the steps over the columns
  const float* centroids;  // (clusters, pitch)
  bool usable;             // scores are finite, and not too small to scale
  float norm, slack;       // scaled: the largest |m|, and the error bound over |x|
};

// The power of two that brings a length to `power`, itself one, or up to twice that; 0: the length
// is not finite, or so short that squares were lost.
__device__ __forceinline__ float scale_to(float length, float power) {
  const std::uint32_t exponent = __float_as_uint(length) >> 23;
  return length > 0x1p-50f && length < 0x1p100f ? power * __uint_as_float((254 - exponent) << 23)
                                                : 0.0f;
}
__device__ __forceinline__ float row_scale(float length) {
  return length >= kShortestRow && length < kLongestRow ? 1.0f : scale_to(length, kShortestRow);
}

// The largest value of the block; NaN counts as larger than all. Synchronises the threads.
__device__ inline float block_largest(float value) {
  __shared__ float warps[kMostScanWarps];
  const auto raise = [&](float other) {
    if (!(other <= value) && !isnan(value)) value = other;
  };
  for (int step = 16; step > 0; step /= 2) raise(__shfl_xor_sync(~0u, value, step));
  __syncthreads();
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  for (int w = 0; w < static_cast<int>(blockDim.x) / 32; ++w) raise(warps[w]);
  return value;
}

// Bytes of the lower part of the table. A row of 128 bytes has that of a centroid, or of two that
// are a step apart.
template <int kChunks>
constexpr int low_bytes(int columns) {
  constexpr int kEach = 2 / kScanBands<kChunks>;  // centroids
  return (columns + kScanStep * kEach - 1) / (kScanStep * kEach) * kScanStep * 128;
}
// Where that of a step stands, in 16 bytes; `number` is twice the step's.
template <int kChunks>
__device__ __forceinline__ int low_step(int number) {
  return kScanBands<kChunks> == 2 ? number / 2 * 512 : number / 4 * 512 + number / 2 % 2 * 4;
}

// Centroids times `scale` to shared memory, and in e4m3 what rounding them to f16 takes, if there
// is room; depths in the order of RowProducts, zeros behind the last one. Returns the largest |m -
// table|, and what products miss of it, scaled.
template <int kChunks>
__device__ float stage_table(const ScanTable& table, float scale, std::uint32_t memory) {
  float most = 0.0f;
  for (int i = threadIdx.x; i < table.columns * kChunks; i += kScanThreads<kChunks>) {
    const int column = i / kChunks, chunk = i % kChunks;
    const auto* from = reinterpret_cast<const float4*>(
        table.centroids + static_cast<std::int64_t>(column) * table.pitch + 32 * chunk);
    float value[32];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      float4 m = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (column < table.clusters) m = from[j];
#pragma unroll
      for (int k = 0; k < 4; ++k) value[4 * j + k] = (&m.x)[k] * scale;
    }
    // Stores the values, and leaves what is lost of them.
    const auto store = [&](std::uint32_t to) {
      std::uint32_t word[16];
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        word[j] = pack2<ScanHalf>(value[2 * j], value[2 * j + 1]);
#pragma unroll
        for (int k = 2 * j; k < 2 * j + 2; ++k) value[k] -= to_float(from_float<F16>(value[k]));
      }
      const Tile<ScanHalf, 64> band{to + chunk / 2 * table.columns * 128};
#pragma unroll
      for (int pair = 0; pair < 4; ++pair)
        store_shared16(band.chunk(column, chunk % 2 * 4 + pair),
                       make_uint4(word[pair], word[4 + pair], word[8 + pair], word[12 + pair]));
    };
    store(memory);
    float low_squares = 0.0f;
    if (table.low_part) {
      const Tile<ScanHalf, 64> low{memory + table.low_part +
                                   16 * low_step<kChunks>(column / kScanStep * 2) / 1024 * 1024};
      const int place = (kScanBands<kChunks> == 2 ? 0 : column / kScanStep % 2 * 4) + chunk * 2;
      std::uint32_t word[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int at = j % 4 * 8 + j / 4 * 4;
        word[j] = pack_e4m3(value[at], value[at + 1], value[at + 2], value[at + 3]);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const float part = unpack_e4m3(word[j], k);
          low_squares = fmaf(part, part, low_squares);
          value[at + k] -= part;
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half)
        store_shared16(
            low.chunk(column % kScanStep, place + half),
            make_uint4(word[4 * half], word[4 * half + 1], word[4 * half + 2], word[4 * half + 3]));
    }
    float squares = 0.0f;
#pragma unroll
    for (int k = 0; k < 32; ++k) squares = fmaf(value[k], value[k], squares);
#pragma unroll
    for (int step = 1; step < kChunks; step *= 2) {
      squares += __shfl_xor_sync(~0u, squares, step);
      low_squares += __shfl_xor_sync(~0u, low_squares, step);
    }
    most = fmaxf(most, sqrtf(squares) + kRowLoss * sqrtf(low_squares));
  }
  fence_async_proxy();
  return block_largest(most);
}

constexpr std::int32_t kNumbers = 63;  // lower bits of a score that make room for a number

// The two best scores of this lane's columns of a row, of those above 0. In a grid whose rows are
// the even or the odd columns of a step, and whose columns are the 8 blocks of 8 columns of all
// steps, two scores differ in their row or in their column: the second best is that of the largest
// scores of rows or that of columns. So a score takes part in two maxima, of three numbers each,
// and needs no number of its own. Bits of positive floats ascend with them as integers; those of
// negative ones are below 0.
struct ScoreGrid {
  std::int32_t first = 0, second = 0;  // of rows; lower bits are the number
  std::int32_t block[8] = {};

  // `number` is twice that of the step.
  __device__ __forceinline__ void add(const float (&d)[kScanStep / 2], int side, int number) {
    const auto at = [&](int j, int odd) { return __float_as_int(d[4 * j + 2 * side + odd]); };
    std::int32_t most[2];
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      most[odd] = __vimax3_s32(at(0, odd), at(1, odd), at(2, odd));
      most[odd] = __vimax3_s32(most[odd], at(3, odd), at(4, odd));
      most[odd] = __vimax3_s32(most[odd], at(5, odd), at(6, odd));
      most[odd] = (max(most[odd], at(7, odd)) & ~kNumbers) | (number + odd);
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) block[j] = __vimax3_s32(block[j], at(j, 0), at(j, 1));
    const std::int32_t large = max(most[0], most[1]);
    second = __vimax3_s32(second, min(first, large), min(most[0], most[1]));
    first = max(first, large);
  }
  // The second best, and the column of the best.
  __device__ __forceinline__ std::int32_t finish(int& column, std::uint32_t mask) const {
    std::uint32_t largest = 0, nearest = 0;
    std::uint32_t key[8];
#pragma unroll
    for (int j = 0; j < 8; ++j)
      key[j] = (static_cast<std::uint32_t>(block[j]) & mask) | static_cast<std::uint32_t>(j);
#pragma unroll
    for (int j = 0; j < 8; j += 2) largest = __vimax3_u32(largest, key[j], key[j + 1]);
#pragma unroll
    for (int j = 0; j < 8; ++j) nearest = __viaddmax_u32(key[j], 0u - largest, nearest);
    const int row = first & kNumbers;
    column = row / 2 * kScanStep + static_cast<int>(largest & kNumbers) * 8 +
             static_cast<int>(threadIdx.x % 4u * 2u) + row % 2;
    return max(second, static_cast<std::int32_t>(largest + nearest));
  }
};

// The two best scores of a row, and the column of the first. Lane t of a row's four gets those of
// row t % 2 of its two.
struct RowBest {
  std::int32_t first, second;
  int column;

  __device__ RowBest(const ScoreGrid (&grid)[2], std::uint32_t mask) {
    const bool own = threadIdx.x % 2u;
    int columns[2];
    std::int32_t seconds[2];
#pragma unroll
    for (int side = 0; side < 2; ++side) seconds[side] = grid[side].finish(columns[side], mask);
    first = own ? grid[1].first : grid[0].first;
    second = own ? seconds[1] : seconds[0];
    column = own ? columns[1] : columns[0];
    add(__shfl_xor_sync(~0u, own ? grid[0].first : grid[1].first, 1),
        __shfl_xor_sync(~0u, own ? seconds[0] : seconds[1], 1),
        __shfl_xor_sync(~0u, own ? columns[0] : columns[1], 1));
    add(__shfl_xor_sync(~0u, first, 2), __shfl_xor_sync(~0u, second, 2),
        __shfl_xor_sync(~0u, column, 2));
  }
  // Not above it by more than 2^-17 of it.
  __device__ float score() const { return __int_as_float(first & ~kNumbers); }
  __device__ float next() const { return __int_as_float(second & ~kNumbers); }
  __device__ bool found() const { return first > kNumbers; }

 private:
  __device__ __forceinline__ void add(std::int32_t other, std::int32_t other_second,
                                      int other_column) {
    second = __vimax3_s32(second, other_second, min(first, other));
    column = other > first ? other_column : column;
    first = max(first, other);
  }
};

// 64 rows of a warpgroup.
template <int kChunks>
struct RowProducts {
  RowFragments<ScanHalf, kChunks, 1> rows;
  std::uint32_t low[kChunks][4];  // in e4m3: of 32 elements those of a lane's first and second four

  __device__ __forceinline__ void set(int side, const float (&x)[8 * kChunks]) {
#pragma unroll
    for (int i = 0; i < 4 * kChunks; ++i)  // elements 2 i, 2 i + 1 of the lane's, see RowFragments
      rows.a[0][i / 2][i % 2 * 2 + side] = pack2<ScanHalf>(x[2 * i], x[2 * i + 1]);
#pragma unroll
    for (int i = 0; i < 2 * kChunks; ++i)
      low[i / 2][i % 2 * 2 + side] = pack_e4m3(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
  }

  // Starts on the scores of the kScanStep centroids of the step with half this number, which are
  // `at` in the table; `at` then says the next ones.
  template <int kParts>
  __device__ __forceinline__ void start(float (&d)[kScanStep / 2], const ScanTable& table,
                                        int number, std::uint32_t& at) const {
    const auto descriptor = [&](std::uint32_t place) {
      return table.descriptor >> 32 << 32 | place;
    };
    wgmma_fence();
    if constexpr (kParts == 2) {  // small numbers first: sums of e4m3 products have 14 bits
      const std::uint32_t first = static_cast<std::uint32_t>(table.descriptor) +
                                  (table.low_part >> 4) + low_step<kChunks>(number);
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk)
        if (chunk == 0)
          wgmma_e4m3<0>(d, low[chunk], descriptor(first + 2 * chunk));
        else
          wgmma_e4m3<1>(d, low[chunk], descriptor(first + 2 * chunk));
    }
#pragma unroll
    for (int depth = 0; depth < 2 * kChunks; ++depth) {
      const std::uint64_t b = descriptor(at + depth / 4 * table.columns * 8 + depth % 4 * 2);
      if (depth == 0 && kParts == 1)
        wgmma<ScanHalf, 0, 0>(d, rows.a[0][depth], b);
      else
        wgmma<ScanHalf, 1, 0>(d, rows.a[0][depth], b);
    }
    wgmma_commit();
    at += kScanStep * 128 / 16;
  }
  // For the first centroids. The compiler would make it anew for every product if it knew what it
  // is.
  __device__ static __forceinline__ std::uint32_t first_columns(const ScanTable& table) {
    auto low = static_cast<std::uint32_t>(table.descriptor);
    asm volatile("" : "+r"(low));
    return low;
  }
  __device__ static __forceinline__ void finish(float (&d)[kScanStep / 2]) {
    wgmma_wait<0>();
    wgmma_settle(d);
  }

  // The two best of all centroids.
  template <int kParts>
  __device__ __forceinline__ void find(const ScanTable& table, ScoreGrid (&grid)[2]) const {
    std::uint32_t low = first_columns(table);
    int number = 0;
#pragma unroll 1
    do {
      float d[kScanStep / 2];
      start<kParts>(d, table, number, low);
      finish(d);
      grid[0].add(d, 0, number);
      grid[1].add(d, 1, number);
    } while ((number += 2) < table.halves);
  }
};

}  // namespace coterie::cuda
