// SPDX-License-Identifier: MIT
// Strict routing's selection in one kernel: the nearest cluster argmax_c x . m_c of bf16 rows with
// the centred centroids m, exactly as given by fp32 sums over ascending depths; statistics of the
// rows; and the sort of the rows by cluster. If queries and keys have the same number of heads and
// rows, both are sorted together, which also gives the number of keys that a query sees.
//
// Grid and block: cooperative, one block of 4 warpgroups (3 for Dk = 128) per multiprocessor; a
// team of blocks takes an item and head; a block's rows are contiguous. A warpgroup loads 64 rows
// from global memory to registers and takes 64 centroids at a time from shared memory.
//
// Both are f16 in the products: a row x, whose bf16 elements hardly change, and m, each times a
// power of two. The rounding error of m is multiplied as well, as a second f16 number, if it fits
// in shared memory. With m = table + low + rest, a score and the fp32 sum differ by at most
//   |x| max |rest|  +  2^-15 |x| max |m|,
// where the second term covers sums on tensor cores (8 steps of 17 terms at 2^-23 each), in fp32
// (128 terms at 2^-24) and the smallest elements; half of it for 64 elements. A label is certain if
// the two largest scores of a row (ScoreGrid) are farther apart than twice the bound. Other rows
// are undecided: the warpgroup collects 64 of them, multiplies them again, and computes fp32 sums
// only for the centroids that are near enough to the best.
//
// Shared memory: the table, 128 or 256 bytes per centroid and part, up to 192 KB; the sort uses the
// same memory (sort_shared_bytes); 28 KB for undecided rows. __launch_bounds__(512 or 384, 1): 128
// or 168 registers. Preconditions: scan_fits (Hopper, bf16, as many centroids as fit in shared
// memory), one cluster per row. Otherwise nearest.cu and cluster/group.cu run.
#include <cstdint>

#include "cuda/api/padding.h"
#include "cuda/cluster/first_sync.cuh"
#include "cuda/cluster/nearest.cuh"
#include "cuda/cluster/sorted_runs.cuh"
#include "cuda/launch/device.h"
#include "cuda/launch/dispatch.h"
#include "cuda/prim/candidates.cuh"
#include "cuda/prim/row_chunk.cuh"
#include "cuda/prim/warp.cuh"
#include "cuda/prim/wgmma.cuh"
#include "cuda/routing/centred_centroid.cuh"
#include "cuda/routing/row_statistics.cuh"
#include "cuda/routing/stages.h"

namespace coterie::cuda {

namespace {

using ScanElement = Bf16;
using ScanHalf = F16;

// Warpgroups per block, as many as registers allow for rows of 32 * kChunks elements.
template <int kChunks>
constexpr int kScanGroups = kChunks <= 2 ? 4 : 3;
template <int kChunks>
constexpr int kScanThreads = kScanGroups<kChunks>* kWarpgroup;
constexpr int kMostScanGroups = 4, kMostScanWarps = kMostScanGroups * kWarpgroup / 32;
constexpr int kScanStep = 64;  // centroids at a time
constexpr int kScanRows = 64;

// Rows of lengths in [2^-2, 2^12) are used as f16 unscaled: their elements are below 2^12, and the
// loss from elements below 2^-14 is less than 2^-22 of the length. Other rows are scaled to 2^-2 by
// a power of two; the longest centroid is scaled to 2^11, which keeps the digits of its lower part.
constexpr float kShortestRow = 0x1p-2f, kLongestRow = 0x1p12f, kTableLength = 0x1p11f;

template <int kChunks>
constexpr int kScanBands = (kChunks + 1) / 2;  // of 64 depths

// The centroids that the rows of a block's problem are compared with.
struct ScanTable {
  std::uint64_t descriptor;
  int low_part;  // byte offset of the centroids' rounding errors; 0: none
  int columns, clusters, pitch;
  int halves;              // twice the steps over the columns
  const float* centroids;  // (clusters, pitch)
  bool usable;             // scores are finite and not too small to scale
  float slack;             // the error bound over |x|, scaled
};

// The power of two that scales a length to `power`, also a power of two, or up to twice that; 0:
// the length is not finite, or so short that its squares underflow.
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

// Stages centroids times `scale` in shared memory, and their f16 rounding errors if there is space;
// depths in the order of RowFragments, zeros after the last one. Returns the largest |m - table|,
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
    // Stores the values, and leaves their rounding errors.
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

constexpr std::int32_t kNumbers = 63;  // low bits of a score that are replaced by a number

// The two best positive scores of this lane's columns of a row. In a grid whose rows are the even
// or odd columns of a step, and whose columns are the 8 blocks of 8 columns of all steps, two
// scores differ in their row or in their column: the second best is the second largest row maximum
// or column maximum. So a score takes part in two maxima, of three numbers each, and needs no
// separate number. Bits of positive floats, as integers, have the order of the floats; those of
// negative floats are below 0.
struct ScoreGrid {
  std::int32_t first = 0, second = 0;  // row maxima; the low bits are the number
  std::int32_t block[8] = {};

  // `number` is twice the step.
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
  // Lower than the true score by at most 2^-17 of it.
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

  __device__ __forceinline__ void set(int side, const float (&x)[8 * kChunks]) {
#pragma unroll
    for (int i = 0; i < 4 * kChunks; ++i)  // elements 2 i, 2 i + 1 of the lane's, see RowFragments
      rows.a[0][i / 2][i % 2 * 2 + side] = pack2<ScanHalf>(x[2 * i], x[2 * i + 1]);
  }

  // Starts the scores of the kScanStep centroids at `at` in the table; `at` is advanced to the next
  // ones.
  template <int kParts>
  __device__ __forceinline__ void start(float (&d)[kScanStep / 2], const ScanTable& table,
                                        std::uint32_t& at) const {
    constexpr int kDepths = 2 * kChunks;
    wgmma_fence();  // lower parts first: small sums lose less
#pragma unroll
    for (int i = 0; i < kDepths * kParts; ++i) {
      const int depth = i % kDepths;
      const std::uint32_t place = at + ((kParts - 1 - i / kDepths) * table.low_part >> 4) +
                                  depth / 4 * table.columns * 8 + depth % 4 * 2;
      wgmma_step<ScanHalf, 0>(i, d, rows.a[0][depth], table.descriptor >> 32 << 32 | place);
    }
    wgmma_commit();
    at += kScanStep * 128 / 16;
  }
  // Place of the first centroids, opaque to the compiler, which would otherwise recompute it for
  // every product.
  __device__ static __forceinline__ std::uint32_t first_columns(const ScanTable& table) {
    auto low = static_cast<std::uint32_t>(table.descriptor);
    asm volatile("" : "+r"(low));
    return low;
  }
  __device__ static __forceinline__ void finish(float (&d)[kScanStep / 2]) {
    wgmma_wait<0>();
    wgmma_settle(d);
  }

  // Finds the two best of all centroids.
  template <int kParts>
  __device__ __forceinline__ void find(const ScanTable& table, ScoreGrid (&grid)[2]) const {
    std::uint32_t low = first_columns(table);
    int number = 0;
#pragma unroll 1
    do {
      float d[kScanStep / 2];
      start<kParts>(d, table, low);
      finish(d);
      grid[0].add(d, 0, number);
      grid[1].add(d, 1, number);
    } while ((number += 2) < table.halves);
  }
};

// Rows whose nearest cluster the products leave undecided: fp32 sums for the centroids that are
// near enough to the best.

constexpr int kUndecidedRounds = 4;  // tiles between checks of the list
constexpr int kMostUndecided = (kUndecidedRounds + 1) * kScanRows;

// The rows that a block works on, of one side or two, in shared memory because registers are
// scarce. Rows of the second side have numbers from kSecondSide on.
constexpr int kSecondSide = 1 << 30;
struct ScanSides {
  Rows<const ScanElement> rows;  // except for their data
  const ScanElement* data[2];
  std::int32_t* labels[2];
  RowStatistics* stats[2];  // null: not requested

  __device__ Rows<const ScanElement> of(int side) const {
    return {data[side], rows.pitch, rows.width, rows.aligned};
  }
  // The rows that contain a row number.
  __device__ Rows<const ScanElement> at(int row) const { return of(row / kSecondSide); }
  __device__ static int index(int row) { return row % kSecondSide; }
};

// Undecided rows of a warpgroup, up to 63 of them after a check.
struct UndecidedRows {
  std::int32_t row[kMostUndecided];  // their numbers
  float limit[kMostUndecided];       // scores not below it count; -inf: unknown
  float bound[kMostUndecided];       // distance of the limit from the best score
  float scale[kMostUndecided];
  int count;
  std::uint64_t barrier;

  // Barrier of all threads of the warpgroup.
  __device__ PartBarrier<kWarpgroup> group_barrier() const {
    return {static_cast<int>(threadIdx.x) / kWarpgroup + kGroupBarriers, shared_address(&barrier)};
  }
};

// Pairs (row, centroid) of a warp whose sums are needed, and the best of its 16 rows.
struct UndecidedPairs {
  std::uint32_t pair[64];
  CandidateKey best[16];
};

// x . m in fp32, depths ascending: the deciding score. Reads `kVectors` times 8 elements at once.
template <int kVectors, bool kAligned>
__device__ __forceinline__ float exact_score(const Rows<const ScanElement>& rows, int row,
                                             const float* centroid) {
  const ScanElement* x = rows.row(row);
  float sum = 0.0f;
#pragma unroll 1
  for (int column = 0; column < rows.width; column += 8 * kVectors) {
    union {
      uint4 words;
      ScanElement elements[8];
    } chunk[kVectors];
    float4 m[2 * kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int first = column + 8 * i;
      chunk[i].words = make_uint4(0, 0, 0, 0);
      m[2 * i] = m[2 * i + 1] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (first >= rows.width) continue;
      chunk[i].words =
          kAligned ? *reinterpret_cast<const uint4*>(x + first) : load_chunk(x, first, rows.width);
      m[2 * i] = *reinterpret_cast<const float4*>(centroid + first);
      m[2 * i + 1] = *reinterpret_cast<const float4*>(centroid + first + 4);
    }
#pragma unroll
    for (int i = 0; i < 8 * kVectors; ++i)
      sum = fmaf(to_float(chunk[i / 8].elements[i % 8]), (&m[i / 4].x)[i % 4], sum);
  }
  return sum;
}

// Sums the warp's last pairs, one per lane, and updates the best of their rows. A pair's row is one
// of this warp's 16: own_rows[side] of lane 4 i for i + 8 side.
__device__ __forceinline__ void sum_pairs(UndecidedPairs& undecided, int first, int count,
                                          const int (&own_rows)[2], const ScanSides& sides,
                                          const ScanTable& table) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  __syncwarp();
  const std::uint32_t pair = lane < count ? undecided.pair[first + lane] : 0;
  const int own = static_cast<int>(pair >> 16), cluster = static_cast<int>(pair & 0xffffu);
  const int low = __shfl_sync(~0u, own_rows[0], own % 8 * 4),
            high = __shfl_sync(~0u, own_rows[1], own % 8 * 4);
  if (lane < count) {
    const int number = own < 8 ? low : high, row = ScanSides::index(number);
    const Rows<const ScanElement> rows = sides.at(number);
    const float* centroid = table.centroids + static_cast<std::int64_t>(cluster) * table.pitch;
    const float score = rows.aligned ? exact_score<4, true>(rows, row, centroid)
                                     : exact_score<1, false>(rows, row, centroid);
    atomicMax(&undecided.best[own],
              candidate_key(isnan(score) ? -INFINITY : score + 0.0f, cluster));
  }
  __syncwarp();
}

// Labels of up to 64 undecided rows: the warpgroup's last `count` of `total`.
template <int kChunks>
__device__ __forceinline__ void resolve_rows(const ScanTable& table, const ScanSides& sides,
                                             UndecidedRows& list, int total, int count,
                                             UndecidedPairs& undecided) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int place = static_cast<int>(threadIdx.x) % kWarpgroup / 32 * 16 + lane / 4;
  RowProducts<kChunks> products;
  int row[2];
  float limit[2], bound[2], scale[2];
  RowWords<ScanElement, kChunks> words[2];
#pragma unroll
  for (int side = 0; side < 2; ++side) {
    const int at = place + 8 * side;
    row[side] = at < count ? list.row[total - count + at] : -1;
    limit[side] = at < count ? list.limit[total - count + at] : INFINITY;
    bound[side] = at < count ? list.bound[total - count + at] : 0.0f;
    scale[side] = at < count ? list.scale[total - count + at] : 0.0f;
  }
  const auto load = [&](auto aligned) {
#pragma unroll
    for (int side = 0; side < 2; ++side)
      words[side].template load<decltype(aligned)::value>(
          sides.at(max(row[side], 0)), ScanSides::index(row[side]), row[side] >= 0);
  };
  if (sides.rows.aligned)  // one branch around all loads keeps them in flight together
    load(std::true_type{});
  else
    load(std::false_type{});
#pragma unroll
  for (int side = 0; side < 2; ++side) {
    float x[8 * kChunks];
    unpack(words[side], x);
#pragma unroll
    for (int i = 0; i < 8 * kChunks; ++i) x[i] *= scale[side];
    products.set(side, x);
  }
  bool known = true;  // the limits of all 64
  for (int at = lane; at < count; at += 32) known &= list.limit[total - count + at] > -INFINITY;
  known = __all_sync(~0u, known);
  if (lane < 16) undecided.best[lane] = 0;
  list.group_barrier().sync();  // all have read the list
  if (threadIdx.x % kWarpgroup == 0) list.count = total - count;
  // Visits the scores of kScanStep centroids at a time.
  const auto sweep = [&](const auto& visit) {
    std::uint32_t low = products.first_columns(table);
#pragma unroll 1
    for (int column = 0; column < table.columns; column += kScanStep) {
      float d[kScanStep / 2];
      if (table.low_part)
        products.template start<2>(d, table, low);
      else
        products.template start<1>(d, table, low);
      products.finish(d);
      visit(d, column);
    }
  };
  if (!known && table.usable) {
    float most[2] = {-INFINITY, -INFINITY};
    sweep([&](const float(&d)[kScanStep / 2], int column) {
      const int last = table.clusters - column - lane % 4 * 2;
#pragma unroll
      for (int i = 0; i < kScanStep / 2; ++i)
        if (i / 4 * 8 + i % 2 < last) most[i / 2 % 2] = fmaxf(most[i / 2 % 2], d[i]);
    });
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      most[side] = fmaxf(most[side], __shfl_xor_sync(~0u, most[side], 1));
      most[side] = fmaxf(most[side], __shfl_xor_sync(~0u, most[side], 2));
      limit[side] = fmaxf(limit[side], most[side] - bound[side]);
    }
  }
  int pairs = 0;
  sweep([&](const float(&d)[kScanStep / 2], int column) {
    unsigned near[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < kScanStep / 2; ++i)
      near[i / 2 % 2] |= (d[i] < limit[i / 2 % 2] ? 0u : 1u) << (i / 4 * 2 + i % 2);
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      if (row[side] < 0) near[side] = 0;
      while (__any_sync(~0u, near[side] != 0)) {
        const int bit = __ffs(static_cast<int>(near[side])) - 1;
        const int cluster = column + bit / 2 * 8 + lane % 4 * 2 + bit % 2;
        const bool push = near[side] != 0 && cluster < table.clusters;
        const unsigned pushing = __ballot_sync(~0u, push);
        if (push)
          undecided.pair[pairs + __popc(pushing & ((1u << lane) - 1))] =
              static_cast<std::uint32_t>(lane / 4 + 8 * side) << 16 |
              static_cast<std::uint32_t>(cluster);
        pairs += __popc(pushing);
        near[side] &= near[side] - 1;
        if (pairs < 32) continue;
        pairs -= 32;
        sum_pairs(undecided, pairs, 32, row, sides, table);
      }
    }
  });
  sum_pairs(undecided, 0, pairs, row, sides, table);
#pragma unroll
  for (int side = 0; side < 2; ++side)
    if (lane % 4 == side && row[side] >= 0)
      sides.labels[row[side] / kSecondSide][ScanSides::index(row[side])] =
          index_of(undecided.best[lane / 4 + 8 * side]);
  list.group_barrier().sync();
}

// Rows of a tile in flight: this lane's parts of rows l/4 and l/4 + 8 of the warp's 16.
template <int kChunks>
struct RowsAhead {
  int end;
  bool full;  // rows of 32 * kChunks elements, readable in 16-byte vectors
  RowTile<ScanElement, kChunks, 1> tile;

  __device__ RowsAhead(const Rows<const ScanElement>& rows, int last)
      : end(last), full(in_vectors(rows) && rows.width == 32 * kChunks) {}

  // Loads rows first .. first + 15; the contents of those from `end` on do not matter.
  __device__ __forceinline__ void load(const Rows<const ScanElement>& rows, int first) {
    if (!full) {
      tile.load(rows, first, end);
      return;
    }
    const int row = first + static_cast<int>(threadIdx.x % 32u / 4u);
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const ScanElement* from = row_address(rows.data + threadIdx.x % 4u * 8u,
                                            min(row + 8 * side, end - 1), pitch_bytes(rows));
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk)
        tile.words[0][side].word[chunk] = load_once(from + 32 * chunk, true);
    }
  }
};

// Row metadata besides the products; lane t of a row's four has that of row t % 2 of its two.
template <int kChunks>
struct RowFacts {
  RowStatistics stats;
  float scale;
  float
      bound;  // of the difference of two scores; -inf for zeros, +inf or NaN if scores are invalid

  // `x` becomes the factor of the products.
  __device__ __forceinline__ RowFacts(const ScanTable& table, int width,
                                      float (&x)[2][8 * kChunks]) {
    const int side = static_cast<int>(threadIdx.x % 2u), four = static_cast<int>(threadIdx.x & 28u);
    const RowSums parts[2] = {RowSums(x[0]), RowSums(x[1])};
    RowSums sums = side ? parts[1] : parts[0];
    sums.sum += __shfl_xor_sync(~0u, side ? parts[0].sum : parts[1].sum, 1);
    sums.squares += __shfl_xor_sync(~0u, side ? parts[0].squares : parts[1].squares, 1);
    sums.sum += __shfl_xor_sync(~0u, sums.sum, 2);
    sums.squares += __shfl_xor_sync(~0u, sums.squares, 2);
    const float mean = sums.mean(width);
    float variance;
    const bool good = sums.variance(width, mean, variance);
    if (__any_sync(~0u, !good)) {
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        const float exact =
            sum_of_four(variance_part<kChunks>(x[s], width, __shfl_sync(~0u, mean, four + s)));
        if (!good && side == s) variance = exact;
      }
    }
    stats = {mean, inverse_sigma(variance)};
    float root;
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(sums.squares));
    const float length = 1.001f * root;
    scale = row_scale(length);
    bound = 2.0f * length * table.slack;
    if (__any_sync(~0u, scale != 1.0f)) scale_rows(table, x, side, four);
  }

 private:
  // The rare case: rows that are scaled, or zero.
  __device__ void scale_rows(const ScanTable& table, float (&x)[2][8 * kChunks], int side,
                             int four) {
    bound = scale > 0.0f ? bound * scale : INFINITY;
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      const float factor = __shfl_sync(~0u, scale, four + s);
      bool empty = true;
#pragma unroll
      for (int i = 0; i < 8 * kChunks; ++i) {
        empty = empty && x[s][i] == 0.0f;
        x[s][i] *= factor;
      }
      const unsigned lanes = __ballot_sync(~0u, empty);
      if (side == s && (lanes >> four & 15u) == 15u && table.usable) bound = -INFINITY;
    }
  }
};

struct ScanSideArgs {
  SortSide sort;
  Tensor4<const ScanElement> x;
  std::int32_t* labels;
  RowStatistics* stats;
};

struct ScanArgs {
  ScanSideArgs sides[2];
  const float* given;          // (heads, C, width): centroids
  CentredCentroids centroids;  // the centred result
  Teams teams;
  std::int32_t* numbers;  // of the sort
  std::int32_t* ends;     // not null: teams take the problems of both sides, of equal shapes
  int shared_words;
  int columns;           // centroids in shared memory, zeros after the last one
  int halves;            // see ScanTable
  int low_part;          // see ScanTable
  unsigned number_mask;  // ~kNumbers, opaque to the compiler so that it stays in a register
};

struct ScanShared {
  ScanSides sides;
  UndecidedRows undecided[kMostScanGroups];
  UndecidedPairs pairs[kMostScanWarps];
};

// Labels the block's rows of a problem, of `count` sides, the same range of each.
template <int kChunks>
__device__ void label_rows(const ScanArgs& args, const ScanTable& table, const RowRange& range,
                           int count, ScanShared& shared) {
  constexpr int kRound = kScanGroups<kChunks> * kScanRows;
  const int warp = static_cast<int>(threadIdx.x / 32u);
  const int half = static_cast<int>(threadIdx.x % 2u);  // of the row that this lane handles
  const ScanSides& sides = shared.sides;
  UndecidedRows& undecided = shared.undecided[threadIdx.x / unsigned{kWarpgroup}];
  int side = 0, first = range.begin + warp * 16;
  RowsAhead<kChunks> ahead(sides.rows, range.end);
  ahead.load(sides.of(0), first);
  if (threadIdx.x % kWarpgroup == 0) undecided.count = 0;
  undecided.group_barrier().sync();
  const int each = uniform_trips((range.end - range.begin + kRound - 1) / kRound);
  const int rounds = each * uniform_trips(count);
#pragma unroll 1
  for (int round = 0; round < rounds; ++round) {
    float x[2][8 * kChunks];
    unpack(ahead.tile.words[0][0], x[0]);
    unpack(ahead.tile.words[0][1], x[1]);
    const RowFacts<kChunks> own(table, sides.rows.width, x);
    RowProducts<kChunks> products;
    products.set(0, x[0]);
    products.set(1, x[1]);
    const int row = first + 8 * half + static_cast<int>(threadIdx.x % 32u / 4u);
    const bool mine = threadIdx.x % 4u < 2u && row < range.end;
    if (RowStatistics* to = sides.stats[side]; to && mine) to[row] = own.stats;
    std::int32_t* labels = sides.labels[side];
    const int number = row + side * kSecondSide;
    first += kRound;
    if (round + 1 == each) {
      side = 1;
      first = range.begin + warp * 16;
    }
    ahead.load(sides.of(side), first);
    ScoreGrid grid[2];
    if (table.low_part)
      products.template find<2>(table, grid);
    else
      products.template find<1>(table, grid);
    const RowBest best(grid, args.number_mask);
    const float score = best.score();
    const bool certain = score - best.next() > own.bound + 0x1p-16f * score;
    if (mine && certain) {
      *row_address(labels, row, sizeof(std::int32_t)) = best.found() ? best.column : 0;
    } else if (mine) {
      const int place = atomicAdd(&undecided.count, 1);
      undecided.row[place] = number;
      undecided.scale[place] = own.scale;
      undecided.bound[place] = own.bound;
      undecided.limit[place] = best.found() ? score - own.bound : -INFINITY;
    }
    const bool last = round + 1 == rounds;
    if (!last && (round + 1) % kUndecidedRounds != 0) continue;
    undecided.group_barrier().sync();
    int total = uniform_trips(undecided.count);
    undecided.group_barrier().sync();
    while (total >= kScanRows || (total > 0 && last)) {
      const int some = min(total, kScanRows);
      resolve_rows<kChunks>(table, sides, undecided, total, some, shared.pairs[warp]);
      total -= some;
    }
  }
}

// A problem of one side, or the same problem of both: sides first to last.
struct ScanProblem {
  int first, last, number;
};

// Centres the centroids of a head, several at a time, and returns the length of the longest of this
// warp's; NaN counts as longest. All blocks that need them write the same values independently.
template <int kChunks>
__device__ __forceinline__ float centre_head(const ScanArgs& args, int head, int width) {
  constexpr int kWarps = kScanThreads<kChunks> / 32, kBatch = 16 / kChunks;
  const int clusters = args.centroids.clusters, lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t first = static_cast<std::int64_t>(head) * clusters;
  float longest = 0.0f;
#pragma unroll 1
  for (int c = static_cast<int>(threadIdx.x) / 32; c < clusters; c += kWarps * kBatch) {
    float value[kBatch][kChunks];
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
      load_centroid(args.given + (first + min(c + kWarps * i, clusters - 1)) * width, width,
                    value[i]);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (c + kWarps * i >= clusters) break;
      const float norm = centre_centroid(width, value[i]);
      if (!(norm <= longest) && !isnan(longest)) longest = norm;
      float* to = args.centroids.rows + (first + c + kWarps * i) * args.centroids.pitch;
#pragma unroll
      for (int k = 0; k < kChunks; ++k) to[lane + 32 * k] = value[i][k];
    }
  }
  return longest;
}

// Two threads record where the rows of the sides are. A single side is recorded twice, because rows
// after the last ones are prefetched from the second.
__device__ __forceinline__ void describe_sides(const ScanArgs& args, const ScanProblem& problem,
                                               const ItemSpan& span, int head, ScanSides& to) {
  const int i = static_cast<int>(threadIdx.x);
  if (i >= 2) return;
  const ScanSideArgs& side = args.sides[i ? problem.last : problem.first];
  const Rows<const ScanElement> rows = side.x.rows(span.batch, head, span.begin);
  const std::int64_t start = side.sort.shape.start(span, head);
  if (i == 0) to.rows = rows;
  to.data[i] = rows.data;
  to.labels[i] = side.labels + start;
  to.stats[i] = side.stats ? side.stats + start : nullptr;
}

// Finds labels and statistics of the block's rows of a problem.
template <int kChunks>
__device__ __forceinline__ void label_problem(const ScanArgs& args, const ScanProblem& problem,
                                              const Team& team, std::uint32_t memory,
                                              ScanShared& shared) {
  const ClusterShape& shape = args.sides[problem.first].sort.shape;
  const int item = problem.number / shape.heads, head = problem.number % shape.heads;
  const ItemSpan span = shape.q.span(item);
  const RowRange range = team.share(span.length);
  if (range.begin >= range.end) return;
  describe_sides(args, problem, span, head, shared.sides);
  const int own = head / shape.group, clusters = shape.clusters;
  ScanTable columns{
      matrix_descriptor(memory),
      args.low_part,
      args.columns,
      clusters,
      args.centroids.pitch,
      args.halves,
      args.centroids.rows + static_cast<std::int64_t>(own) * clusters * args.centroids.pitch,
      true,
      0.0f};
  const float norm =
      block_largest(centre_head<kChunks>(args, own, args.sides[problem.first].x.width));
  const float scale = scale_to(norm, kTableLength);
  const float rest = stage_table<kChunks>(columns, scale, memory);
  columns.usable = scale > 0.0f;
  columns.slack = columns.usable ? 1.001f * (rest + kChunks * 0x1p-17f * norm * scale) : INFINITY;
  label_rows<kChunks>(args, columns, range, problem.last - problem.first + 1, shared);
}

// Queries and keys of equal lengths, sorted together: a chunk of kJointRows rows of either side in
// shared memory, and what a query sees of it. Both sides are counted in the order of their
// positions, so what a query sees is known when it is placed.
constexpr int kJointRows = kSortPairs / 2;

inline std::size_t joint_shared_bytes(int clusters, int warps) {
  return group_shared_bytes(2 * clusters, warps) +
         (kSortPairs + kJointRows) * sizeof(std::uint16_t);
}

// Counters per block, C of each: two sets of histograms of both sides, the next places of queries
// and keys of a cluster, and the number of keys of it before.
constexpr int kJointNumbers = 7;

// Sorts a chunk whose clusters have been placed: rows[slot], and for queries sight[slot], the place
// after the last key of its cluster that is not after it.
__device__ __forceinline__ void fill_joint(const BlockCounts<2>& counts, const RowRange& chunk,
                                           std::uint16_t* rows, std::uint16_t* sight) {
  const int lane = static_cast<int>(threadIdx.x % 32u), clusters = counts.clusters / 2;
  const int bits = 32 - __clz(clusters - 1), end = counts.own(chunk).end;
  const unsigned below = (1u << lane) - 1;
  std::int32_t *q_slots = counts.own_counts(), *k_slots = q_slots + clusters;
  counts.for_batches(chunk, [&](int first, const int(&label)[2][kLabelBatch]) {
    const int parts = uniform_trips((end - first + 31) / 32);
    const int(&q)[kLabelBatch] = label[0];
    const int(&k)[kLabelBatch] = label[1];
    // Lanes with this lane's label: queries, keys, and keys with this query's label.
    unsigned same_q[kLabelBatch], same_k[kLabelBatch], seen_k[kLabelBatch];
#pragma unroll
    for (int i = 0; i < kLabelBatch; ++i)
      same_q[i] = same_k[i] = seen_k[i] = __ballot_sync(~0u, q[i] >= 0);
    for (int bit = 0; bit < bits; ++bit)
#pragma unroll
      for (int i = 0; i < kLabelBatch; ++i) {
        if (i >= parts) break;
        const bool q_set = q[i] >> bit & 1, k_set = k[i] >> bit & 1;
        const unsigned q_lanes = __ballot_sync(~0u, q_set), k_lanes = __ballot_sync(~0u, k_set);
        same_q[i] &= q_set ? q_lanes : ~q_lanes;
        same_k[i] &= k_set ? k_lanes : ~k_lanes;
        seen_k[i] &= q_set ? k_lanes : ~k_lanes;
      }
#pragma unroll
    for (int i = 0; i < kLabelBatch; ++i) {
      if (i >= parts) break;
      const bool in = q[i] >= 0;
      int q_slot = 0, k_slot = 0, seen = 0;
      if (in) {
        q_slot = q_slots[q[i]];
        k_slot = k_slots[k[i]];
        seen = k_slots[q[i]];
      }
      __syncwarp();
      if (in && (same_q[i] & below) == 0) q_slots[q[i]] = q_slot + __popc(same_q[i]);
      if (in && (same_k[i] & below) == 0) k_slots[k[i]] = k_slot + __popc(same_k[i]);
      __syncwarp();
      if (!in) continue;
      const auto row = static_cast<std::uint16_t>(first + 32 * i + lane - chunk.begin);
      q_slot += __popc(same_q[i] & below);
      rows[q_slot] = row;
      rows[k_slot + __popc(same_k[i] & below)] = row;
      sight[q_slot] = static_cast<std::uint16_t>(seen + __popc(seen_k[i] & (2 * below + 1)));
    }
  });
  __syncthreads();
}

// The runs of both sides of a problem, and how many keys of its cluster a query sees: those of
// earlier blocks and chunks, and those of its chunk that are not after it.
__device__ inline void sort_both_sides(const ScanArgs& args, int number, int turn, Team& team,
                                       std::int32_t* memory) {
  const ClusterShape& shape = args.sides[0].sort.shape;
  const int clusters = shape.clusters, lane = static_cast<int>(threadIdx.x % 32u);
  const ItemSpan span = shape.q.span(number / shape.heads);
  const std::int64_t start = shape.start(span, number % shape.heads);
  const std::int64_t lists = static_cast<std::int64_t>(number) * (clusters + 1);
  const SortedRuns &q = args.sides[0].sort.runs, &k = args.sides[1].sort.runs;
  const std::int64_t blocks = static_cast<std::int64_t>(args.teams.count) * team.size;
  std::int32_t* starts = args.numbers + (4 * blocks + 3 * blockIdx.x) * clusters;
  std::int32_t* before = starts + 2 * clusters;
  const RowRange range = team.share(span.length);
  const int room = args.shared_words - (kSortPairs + kJointRows) / 2;
  auto* rows = reinterpret_cast<std::uint16_t*>(memory + room);
  std::uint16_t* sight = rows + kSortPairs;
  const BlockCounts<2> counts({args.sides[0].labels + start, args.sides[1].labels + start},
                              clusters, memory, room);
  counts.count(range);
  share_counts(team, counts, histograms_of(args.numbers, args.teams, team, turn, 2 * clusters),
               [&](int c, int slot, int members) {
                 const bool keys = c >= clusters;  // they come after all queries
                 const int first = keys ? slot - span.length : slot;
                 if (team.rank == 0)
                   (keys ? k.offsets + c - clusters : q.offsets + c)[lists] = first;
                 starts[c] = first + members;
                 if (keys) before[c - clusters] = members;
               });
  if (team.rank == 0 && threadIdx.x < 2)
    (threadIdx.x ? k.offsets : q.offsets)[lists + clusters] = span.length;
  __syncthreads();
  const std::int32_t* ends = counts.last_counts();
  for (int first = range.begin; first < range.end; first += kJointRows) {
    const RowRange chunk{first, min(first + kJointRows, range.end)};
    if (range.end - range.begin > kJointRows) counts.count(chunk);
    place_clusters(counts);
    fill_joint(counts, chunk, rows, sight);
    store_clusters(ends, 0, clusters, starts, [&](int c, int place, int begin, int end) {
      const int shift = before[c] - ends[clusters + c - 1];
      __syncwarp();  // all have read it
      if (lane == 0) before[c] = shift + ends[clusters + c];
      for (int i = begin + lane; i < end; i += 32) {
        q.order[start + place - begin + i] = chunk.begin + rows[i];
        args.ends[start + place - begin + i] = sight[i] + shift;
      }
    });
    store_clusters(ends, clusters, clusters, starts, [&](int, int place, int begin, int end) {
      for (int i = begin + lane; i < end; i += 32)
        k.order[start + place - begin + i] = chunk.begin + rows[i];
    });
  }
}

// Fills the padding after the last row of an item, and sorts the runs of one side.
template <int kThreads>
__device__ __forceinline__ void sort_side(const ScanArgs& args, const ScanSideArgs& side,
                                          int number, int turn, Team& team, std::int32_t* memory) {
  const ClusterShape& shape = side.sort.shape;
  const int item = number / shape.heads, clusters = shape.clusters;
  const ItemSpan span = shape.q.span(item);
  const std::int64_t start = shape.start(span, number % shape.heads);
  if (!shape.q.cu_seqlens || item + 1 == shape.items)
    for (int i = span.length + team.rank * kThreads + threadIdx.x; i < shape.rows - span.begin;
         i += team.size * kThreads) {
      side.labels[start + i] = -1;
      if (side.stats) side.stats[start + i] = {0.0f, 0.0f};
    }
  if (side.sort.runs.order)
    sort_problem(side.sort, number, team,
                 histograms_of(args.numbers, args.teams, team, turn, clusters),
                 starts_of(args.numbers, args.teams, clusters), memory, args.shared_words);
}

// Teams work on the problems of both sides.
template <int kChunks>
__global__ void __launch_bounds__(kScanThreads<kChunks>, 1)
    routing_scan_kernel(const __grid_constant__ ScanArgs args) {
  await_previous();
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ ScanShared shared;
  if (threadIdx.x < kScanGroups<kChunks>) shared.undecided[threadIdx.x].group_barrier().init();
  Team team(args.teams);
  const int queries = args.sides[0].sort.shape.problems();
  FirstTeamSync first_sync(team);
  const int problems = args.ends ? queries : queries + args.sides[1].sort.shape.problems();
  auto* words = reinterpret_cast<std::int32_t*>(memory);
  int turn = 0;
  for (int all = team.number; all < problems; all += args.teams.count, turn ^= 1) {
    const int side = all >= queries, number = side ? all - queries : all;
    __syncthreads();  // the last problem used the same memory
    label_problem<kChunks>(args, {side, args.ends ? 1 : side, number}, team, shared_address(memory),
                           shared);
    first_sync.wait();
    if (args.ends)
      sort_both_sides(args, number, turn, team, words);
    else
      sort_side<kScanThreads<kChunks>>(args, args.sides[side], number, turn, team, words);
  }
}

}  // namespace

bool scan_fits(const AttentionCall& call, std::int64_t clusters) {
  const std::int64_t columns = (clusters + kScanStep - 1) / kScanStep * kScanStep;
  return call.inputs.q.dtype == DType::bf16 && columns <= kMostColumns &&
         columns * (call.Dk <= 64 ? 128 : 256) <= kTableBytes;
}

bool scan_finds_ends(const AttentionCall& call) {
  const auto aligned = [](const TensorView& x) { return tensor4<const ScanElement>(x).aligned; };
  return call.inputs.q.stride(2) == call.k.stride(2) && aligned(call.inputs.q) == aligned(call.k) &&
         call.H == call.key_heads && call.N == call.S && !ragged(call.inputs.q_sequences) &&
         !ragged(call.inputs.k_sequences);
}

void nearest_scan(const AttentionCall& call, const CentredCentroids& centroids,
                  const RoutingSide& queries, const RoutingSide* keys, std::int32_t* ends,
                  unsigned* arrivals, Arena& arena, cudaStream_t stream) {
  ScanArgs args{};
  int rows = 0, problems = 0;
  for (const RoutingSide* side : {&queries, keys}) {
    if (!side) continue;
    const ClusterShape& shape = side->shape;
    args.sides[side == keys] = {{shape, side->labels, 1, side->runs, side->copy},
                                tensor4<const ScanElement>(side->rows),
                                side->labels,
                                side->stats};
    rows = max(rows, shape.rows);
    problems += shape.problems();
  }
  args.given = static_cast<const float*>(call.inputs.centroids.data);
  args.centroids = centroids;
  args.number_mask = ~static_cast<unsigned>(kNumbers);
  args.ends = ends;
  if (args.ends) problems /= 2;
  args.teams = make_teams(problems, rows, multiprocessors(), arrivals);
  args.numbers = arena.take<std::int32_t>(
      kJointNumbers * static_cast<std::int64_t>(multiprocessors()) * centroids.clusters);
  if (arena.counting() || problems == 0) return;
  args.columns = (centroids.clusters + kScanStep - 1) / kScanStep * kScanStep;
  args.halves = 2 * args.columns / kScanStep;
  dispatch_head_dim(call.op, call.Dk, [&](auto width) {
    constexpr int kChunks = decltype(width)::value / 32;
    const int part = args.columns * kScanBands<kChunks> * 128;
    args.low_part = 2 * part <= kTableBytes ? part : 0;
    constexpr int kWarps = kScanThreads<kChunks> / 32;
    const std::size_t bytes = max(static_cast<std::size_t>(part + args.low_part),
                                  args.ends ? joint_shared_bytes(centroids.clusters, kWarps)
                                            : sort_shared_bytes(centroids.clusters, kWarps));
    args.shared_words = static_cast<int>(bytes / sizeof(std::int32_t));
    launch_cooperative_early(routing_scan_kernel<kChunks>, args.teams.blocks(),
                             kScanThreads<kChunks>, bytes, stream, args);
  });
}

}  // namespace coterie::cuda
