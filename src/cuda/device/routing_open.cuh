// SPDX-License-Identifier: MIT
// Rows whose nearest cluster the products of routing_scan_sm90a.cu leave open: sums in fp32 for the
// centroids that are near enough to the best.
#pragma once

#include "cuda/device/routing_scan.cuh"
#include "cuda/device/row_statistics.cuh"

namespace coterie::cuda {

constexpr int kOpenRounds = 4;  // tiles between looks at the list
constexpr int kMostOpen = (kOpenRounds + 1) * kScanRows;

// The rows that a block works on, of one side or two: in shared memory, since there are too few
// registers. Rows of the second side have numbers from kSecondSide on.
constexpr int kSecondSide = 1 << 30;
struct ScanSides {
  Rows<const ScanElement> rows;  // but for their data
  const ScanElement* data[2];
  std::int32_t* labels[2];
  RowStatistics* stats[2];  // null: not wanted

  __device__ Rows<const ScanElement> of(int side) const {
    return {data[side], rows.pitch, rows.width, rows.aligned};
  }
  // For a row by its number.
  __device__ Rows<const ScanElement> at(int row) const { return of(row / kSecondSide); }
  __device__ static int index(int row) { return row % kSecondSide; }
};

// Rows of a warpgroup that are open, up to 63 of them after a look.
struct OpenRows {
  std::int32_t row[kMostOpen];  // their numbers
  float limit[kMostOpen];       // scores that are not below it count; -inf: not known
  float bound[kMostOpen];       // the limit below the best one
  float scale[kMostOpen];
  int count;
  std::uint64_t barrier;

  // All threads of the warpgroup wait for each other.
  __device__ PartBarrier<kWarpgroup> meeting() const {
    return {static_cast<int>(threadIdx.x) / kWarpgroup + kGroupBarriers, shared_address(&barrier)};
  }
};

// Pairs (row, centroid) of a warp whose sums are wanted, and the best of its 16 rows.
struct OpenPairs {
  std::uint32_t pair[64];
  unsigned long long best[16];
};

// x . m in fp32, depths ascending: what decides. Reads `kVectors` times 8 elements at once.
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

// Larger for a larger score, then for the lower cluster; NaN counts as -inf, -0 as 0.
__device__ __forceinline__ unsigned long long exact_key(float score, int cluster) {
  const std::uint32_t bits = __float_as_uint(isnan(score) ? -INFINITY : score + 0.0f);
  const std::uint32_t ordered = bits >> 31 ? ~bits : bits | 0x80000000u;
  return static_cast<unsigned long long>(ordered) << 32 | ~static_cast<std::uint32_t>(cluster);
}

// Sums of the warp's last pairs, a lane each, to the best of their rows. A pair's row is one of
// this warp's 16: own_rows[side] of lane 4 i for i + 8 side.
__device__ __forceinline__ void sum_pairs(OpenPairs& open, int first, int count,
                                          const int (&own_rows)[2], const ScanSides& sides,
                                          const ScanTable& table) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  __syncwarp();
  const std::uint32_t pair = lane < count ? open.pair[first + lane] : 0;
  const int own = static_cast<int>(pair >> 16), cluster = static_cast<int>(pair & 0xffffu);
  const int low = __shfl_sync(~0u, own_rows[0], own % 8 * 4),
            high = __shfl_sync(~0u, own_rows[1], own % 8 * 4);
  if (lane < count) {
    const int number = own < 8 ? low : high, row = ScanSides::index(number);
    const Rows<const ScanElement> rows = sides.at(number);
    const float* centroid = table.centroids + static_cast<std::int64_t>(cluster) * table.pitch;
    const float score = rows.aligned ? exact_score<4, true>(rows, row, centroid)
                                     : exact_score<1, false>(rows, row, centroid);
    atomicMax(&open.best[own], exact_key(score, cluster));
  }
  __syncwarp();
}

// Labels of up to 64 open rows: the warpgroup's last `count` of `total`.
template <int kChunks>
__device__ __forceinline__ void resolve_rows(const ScanTable& table, const ScanSides& sides,
                                             OpenRows& list, int total, int count,
                                             OpenPairs& open) {
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
  if (sides.rows.aligned)  // one branch around all loads, so that they are on their way together
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
  if (lane < 16) open.best[lane] = 0;
  list.meeting().sync();  // all have read the list
  if (threadIdx.x % kWarpgroup == 0) list.count = total - count;
  // Visits the scores of kScanStep centroids at a time.
  const auto sweep = [&](const auto& visit) {
    std::uint32_t low = products.first_columns(table);
#pragma unroll 1
    for (int column = 0; column < table.columns; column += kScanStep) {
      float d[kScanStep / 2];
      if (table.low_part)
        products.template start<2>(d, table, column / kScanStep * 2, low);
      else
        products.template start<1>(d, table, column / kScanStep * 2, low);
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
          open.pair[pairs + __popc(pushing & ((1u << lane) - 1))] =
              static_cast<std::uint32_t>(lane / 4 + 8 * side) << 16 |
              static_cast<std::uint32_t>(cluster);
        pairs += __popc(pushing);
        near[side] &= near[side] - 1;
        if (pairs < 32) continue;
        pairs -= 32;
        sum_pairs(open, pairs, 32, row, sides, table);
      }
    }
  });
  sum_pairs(open, 0, pairs, row, sides, table);
#pragma unroll
  for (int side = 0; side < 2; ++side)
    if (lane % 4 == side && row[side] >= 0)
      sides.labels[row[side] / kSecondSide][ScanSides::index(row[side])] =
          static_cast<std::int32_t>(~static_cast<std::uint32_t>(open.best[lane / 4 + 8 * side]));
  list.meeting().sync();
}

}  // namespace coterie::cuda
