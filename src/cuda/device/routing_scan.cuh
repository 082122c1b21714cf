// SPDX-License-Identifier: MIT
// Scores of rows and centroids for routing_scan_sm90a.cu: 64 rows of a warpgroup, in registers, and
// kScanStep centroids at a time from shared memory, both in f16.
#pragma once

#include "cuda/device/nearest.cuh"
#include "cuda/device/wgmma.cuh"
#include "cuda/routing.h"

namespace coterie::cuda {

using ScanElement = __nv_bfloat16;
using ScanHalf = __half;

// Warpgroups of a block, as many as have registers enough for rows of 32 * kChunks elements.
template <int kChunks>
constexpr int kScanGroups = kChunks <= 2 ? 4 : 3;
template <int kChunks>
constexpr int kScanThreads = kScanGroups<kChunks>* kWarpgroup;
constexpr int kMostScanGroups = 4, kMostScanWarps = kMostScanGroups * kWarpgroup / 32;
constexpr int kScanStep = 64;  // centroids at a time
constexpr int kScanRows = 64;

// Rows of lengths in [2^-2, 2^12) are f16 numbers as they are: their elements are below 2^12, and
// what is lost of those below 2^-14 is less than 2^-22 of the length. Other rows are
// brought to 2^kLeastPower by a power of two, and so is the longest centroid.
constexpr int kLeastPower = -2;

template <int kChunks>
constexpr int kScanBands = (kChunks + 1) / 2;  // of 64 depths

__device__ __forceinline__ int group_number() { return static_cast<int>(threadIdx.x) / kWarpgroup; }
__device__ __forceinline__ void group_sync() {
  asm volatile("bar.sync %0, 128;" ::"r"(1 + group_number()) : "memory");
}
// How many threads of the warpgroup say yes.
__device__ __forceinline__ int group_count(bool yes) {
  int count;
  asm volatile("{.reg .pred p; setp.ne.s32 p, %2, 0; bar.red.popc.u32 %0, %1, 128, p;}"
               : "=r"(count)
               : "r"(1 + group_number()), "r"(static_cast<int>(yes))
               : "memory");
  return count;
}

// What the rows of a block's problem are measured with.
struct ScanTable {
  std::uint64_t descriptor;
  int low_part;  // bytes behind it are what rounding took from the centroids; 0: nowhere
  int columns, clusters, pitch;
  const float* centroids;  // (clusters, pitch)
  bool usable;             // scores are finite, and not too small to scale
  float norm, slack;       // scaled: the largest |m|, and the error bound over |x|
};

// The power of two that brings a length to the ones that need none; 0: the length is not finite, or
// so short that squares were lost.
__device__ __forceinline__ float scale_of(float length) {
  if (length >= 0x1p-2f && length < 0x1p12f) return 1.0f;
  const std::uint32_t exponent = __float_as_uint(length) >> 23;
  return length > 0x1p-50f && length < 0x1p100f
             ? __uint_as_float((254 + kLeastPower - exponent) << 23)
             : 0.0f;
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

// Centroids times `scale` to shared memory, and what rounding them to f16 takes, if there is room;
// depths in the order of RowFragments, zeros behind the last one. Returns the largest |m - table|,
// scaled.
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
        for (int k = 2 * j; k < 2 * j + 2; ++k) value[k] -= __half2float(__float2half_rn(value[k]));
      }
      const Tile<ScanHalf, 64> band{to + chunk / 2 * table.columns * 128};
#pragma unroll
      for (int pair = 0; pair < 4; ++pair)
        store_shared16(band.chunk(column, chunk % 2 * 4 + pair),
                       make_uint4(word[pair], word[4 + pair], word[8 + pair], word[12 + pair]));
    };
    store(memory);
    if (table.low_part) store(memory + table.low_part);
    float squares = 0.0f;
#pragma unroll
    for (int k = 0; k < 32; ++k) squares = fmaf(value[k], value[k], squares);
#pragma unroll
    for (int step = 1; step < kChunks; step *= 2) squares += __shfl_xor_sync(~0u, squares, step);
    most = fmaxf(most, squares);
  }
  fence_async_proxy();
  return sqrtf(block_largest(most));
}

// The two largest keys.
struct TwoKeys {
  std::uint32_t first = 0, second = 0;

  __device__ __forceinline__ void add(std::uint32_t a, std::uint32_t b) {
    const std::uint32_t large = max(a, b), small = min(a, b);
    second = __vimax3_u32(second, min(first, large), small);
    first = max(first, large);
  }
};

__device__ __forceinline__ std::uint32_t score_key(float score, float offset, std::uint32_t scale,
                                                   std::uint32_t low) {
  std::uint32_t word;
  asm("mad.lo.u32 %0, %1, %2, %3;"
      : "=r"(word)
      : "r"(__float_as_uint(score + offset)), "r"(scale), "r"(low));
  return word;
}

// The two best of a row: scores in units of four keys' in the upper 21 bits, 2047 less the column
// of the first in the others. Lane t of a row's four gets those of row t % 2 of its two.
struct RowBest {
  std::uint32_t first, second;

  __device__ explicit RowBest(const TwoKeys (&keys)[2]) {
    const int lane = static_cast<int>(threadIdx.x) % 4, own = lane % 2;
    std::uint32_t with[2], without[2];
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const std::uint32_t key = keys[side].first;  // its 9 lower bits are 511 less the number
      with[side] = (key & ~2047u) | ((key & 510u) * 4 + (key & 1u) + 6 - 2 * lane);
      without[side] = keys[side].second & ~2047u;
    }
    first = own ? with[1] : with[0];
    second = own ? without[1] : without[0];
    add(__shfl_xor_sync(~0u, own ? with[0] : with[1], 1),
        __shfl_xor_sync(~0u, own ? without[0] : without[1], 1));
    add(__shfl_xor_sync(~0u, first, 2), __shfl_xor_sync(~0u, second, 2));
  }
  __device__ int label() const { return 2047 - static_cast<int>(first & 2047u); }
  // In keys' units.
  __device__ std::uint32_t score() const { return first >> 11 << 2; }
  __device__ std::uint32_t gap() const { return (first >> 11 << 2) - (second >> 11 << 2); }

 private:
  __device__ __forceinline__ void add(std::uint32_t other, std::uint32_t other_second) {
    second = __vimax3_u32(second, other_second, min(first, other) & ~2047u);
    first = max(first, other);
  }
};

// 64 rows of a warpgroup.
template <int kChunks>
struct RowProducts {
  RowFragments<ScanHalf, kChunks, 1> rows;

  __device__ __forceinline__ void set(int side, const float (&x)[8 * kChunks], unsigned zero) {
    RowWords<ScanHalf, kChunks> words;
#pragma unroll
    for (int i = 0; i < 4 * kChunks; ++i)
      (&words.word[i / 4].x)[i % 4] = pack2<ScanHalf>(x[2 * i], x[2 * i + 1]);
    rows.set(side, words, zero);
  }

  // Starts on the scores of the kScanStep centroids that `low` says, which then says the next ones.
  __device__ __forceinline__ void start(float (&d)[kScanStep / 2], const ScanTable& table,
                                        std::uint32_t& low) const {
    wgmma_fence();
    const std::uint64_t first = table.descriptor >> 32 << 32 | low;
#pragma unroll
    for (int step = 0; step < 2 * kChunks; ++step) {
      const std::uint64_t b =
          descriptor_behind(first, step / 4 * table.columns * 128 + step % 4 * 32);
      if (step == 0)
        wgmma<ScanHalf, 0, 0>(d, rows.a[0][step], b);
      else
        wgmma<ScanHalf, 1, 0>(d, rows.a[0][step], b);
    }
    if (table.low_part) {
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < 2 * kChunks; ++step)
        wgmma<ScanHalf, 1, 0>(
            d, rows.a[0][step],
            descriptor_behind(first,
                              table.low_part + step / 4 * table.columns * 128 + step % 4 * 32));
    }
    wgmma_commit();
    low += kScanStep * 128 / 16;
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
  __device__ __forceinline__ void find(const ScanTable& table, const float (&offset)[2],
                                       unsigned key_scale, TwoKeys (&best)[2]) const {
    std::uint32_t low = first_columns(table);
#pragma unroll 1
    for (int column = 0; column < table.columns; column += kScanStep) {
      float d[kScanStep / 2];
      start(d, table, low);
      finish(d);
      add_keys(d, table, column, offset, key_scale, best);
    }
  }

 private:
  __device__ static __forceinline__ void add_keys(const float (&d)[kScanStep / 2],
                                                  const ScanTable& table, int column,
                                                  const float (&offset)[2], unsigned key_scale,
                                                  TwoKeys (&best)[2]) {
    // Keys are all different: key - largest is 0 for the largest alone, and for the others the
    // larger the nearer they are. Column numbers are counted from this step's.
    std::uint32_t key[kScanStep / 2], largest[2] = {0, 0}, nearest[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < kScanStep / 2; i += 2) {
      key[i] = score_key(d[i], offset[i / 2 % 2], key_scale, 511 - i / 4 * 2);
      key[i + 1] = score_key(d[i + 1], offset[i / 2 % 2], key_scale, 510 - i / 4 * 2);
    }
    if (column + kScanStep > table.clusters) {  // columns behind the last centroid never win
      const int own = column + static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
      for (int i = 0; i < kScanStep / 2; ++i)
        if (own + i / 4 * 8 + i % 2 >= table.clusters) key[i] = 0;
    }
#pragma unroll
    for (int i = 0; i < kScanStep / 2; i += 2)
      largest[i / 2 % 2] = __vimax3_u32(largest[i / 2 % 2], key[i], key[i + 1]);
#pragma unroll
    for (int i = 0; i < kScanStep / 2; ++i)
      nearest[i / 2 % 2] = __viaddmax_u32(key[i], 0u - largest[i / 2 % 2], nearest[i / 2 % 2]);
    const auto numbers = static_cast<std::uint32_t>(column) / 4;
#pragma unroll
    for (int side = 0; side < 2; ++side)
      best[side].add(max(largest[side], numbers) - numbers,
                     max(largest[side] + nearest[side], numbers) - numbers);
  }
};

}  // namespace coterie::cuda
