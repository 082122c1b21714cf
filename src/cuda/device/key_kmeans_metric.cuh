// SPDX-License-Identifier: MIT
// The table of all centroids inside the one-kernel k-means
// (key_kmeans_sm90a.cu), which every block computes for itself.
//
// A warpgroup makes 64 columns of the table, m_c = S (mu_c - r) with both
// factors as sums of two bf16 numbers. A lane has the same elements of mu_c as
// left factor and of m_c as sum: rows l/4 and l/4 + 8 of its warp's 16, columns
// 8 n + 2 (l%4) + {0, 1}. Loops are rolled up where nothing is lost: at 4k most
// of this code runs once or twice, and instructions come from far away.
#pragma once

#include "cuda/device/key_kmeans_covariance.cuh"
#include "cuda/device/mma.cuh"

namespace coterie::cuda {

namespace key_kmeans_detail {

template <class T>
struct KeyMetric : KeyCovariance<T> {
  using Base = KeyCovariance<T>;
  using Base::args;
  using Base::Base;
  using Base::group;
  using Base::memory;
  using Base::own_lane;
  using Base::split_pair;
  using Base::store_shared32;
  using Base::warp;

  // The table's rows of `count` staged centroids, from cluster `first` on, and bounds of them for
  // each warp.
  __device__ __forceinline__ void weigh(int first, int count) const {
    uint2 most = make_uint2(0, 0);
    if (group * 64 < count) most = weigh_rows(first, count);
    if (own_lane() == 0) memory.bounds[warp] = most;
    if (threadIdx.x == 0) memory.poisoned = 0;
    fence_async_proxy();
    __syncthreads();
  }

  // The block's share of the table to global memory.
  __device__ __forceinline__ void share_table() const {
    const RowRange own = this->share();
    unsigned char* to = team_table();
#pragma unroll 1
    for (int i = own.begin * 8 + static_cast<int>(threadIdx.x); i < own.end * 8; i += kThreads) {
      copy16(to, row_offset(i / 8, i % 8));
      if (i % 8 == 0) copy16(to, bias_offset(i / 8));
    }
    if (threadIdx.x < kWarps)
      team_bounds(this->team.rank)[threadIdx.x] = memory.bounds[threadIdx.x];
  }
  __device__ void copy16(unsigned char* to, int offset) const {
    *reinterpret_cast<uint4*>(to + offset) = *reinterpret_cast<const uint4*>(memory.table + offset);
  }

  // The team's table to shared memory, the last row repeated.
  __device__ __forceinline__ void stage_table() const {
    const unsigned char* from = team_table();
    const std::uint32_t to = shared_address(memory.table);
    const int last = args.shape.clusters - 1;
#pragma unroll 1
    for (int i = threadIdx.x; i < kClusters * 8; i += kThreads)
      cp_async16(to + row_offset(i / 8, i % 8), from + row_offset(min(i / 8, last), i % 8), 16);
    if (threadIdx.x < kClusters)
      cp_async16(to + bias_offset(threadIdx.x),
                 from + bias_offset(min(static_cast<int>(threadIdx.x), last)), 16);
    cp_async_commit();
    if (threadIdx.x < kWarps) {
      uint2 most = make_uint2(0, 0);
#pragma unroll
      for (int rank = 0; rank < kMostParts; ++rank) {
        const uint2 part = __ldcg(team_bounds(min(rank, this->team.size - 1)) + threadIdx.x);
        most = make_uint2(max(most.x, part.x), max(most.y, part.y));
      }
      memory.bounds[threadIdx.x] = most;
    }
    cp_async_wait<0>();
    fence_async_proxy();
    __syncthreads();
  }

  __device__ unsigned char* team_table() const {
    return args.tables + static_cast<std::int64_t>(this->team.number) * kSharedTableBytes;
  }
  __device__ uint2* team_bounds(int rank) const {
    return reinterpret_cast<uint2*>(team_table() + kTableBytes) + rank * kWarps;
  }
  // Where a table has columns [8 n, 8 n + 8) of a centroid, and its bias.
  __device__ static int row_offset(int c, int n) { return c * 128 + ((n ^ (c & 7)) << 4); }
  __device__ static int bias_offset(int c) {
    return kClusters * 128 + c / 8 * (8 * kBiasBytes) + c % 8 * 16;
  }

  __device__ __forceinline__ uint2 weigh_rows(int first, int count) const {
    const int lane = own_lane();
    const int row = warp * kOwn + lane / 4, column = lane % 4 * 2;
    std::uint32_t high[4][4], low[4][4];
#pragma unroll
    for (int step = 0; step < kWidth / 16; ++step)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int d = 16 * step + i / 2 * 8 + column;
        const float2 mu = element_pair(row + i % 2 * 8, d),
                     reference = *reinterpret_cast<const float2*>(&memory.reference[d]);
        split_pair(mu.x - reference.x, mu.y - reference.y, high[step][i], low[step][i]);
      }
    float weighed[kWidth / 2];
    const std::uint64_t metric = matrix_descriptor(shared_address(memory.metric[0]));
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kWidth / 16; ++step) {
      const std::uint64_t right = descriptor_behind(metric, step * 32);
      wgmma_step<Bf16, 0>(step, weighed, low[step], right);
      wgmma<Bf16, 1, 0>(weighed, high[step], descriptor_behind(right, kTileBytes));
      wgmma<Bf16, 1, 0>(weighed, high[step], right);
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_settle(weighed);
    const std::uint32_t table = shared_address(memory.table) + lane % 4 * 4;
    uint2 most = make_uint2(0, 0);
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const int r = row + 8 * side, c = first + r;
      const bool there = r < count;
      float own = 0.0f, shared = 0.0f, norm = 0.0f;
#pragma unroll
      for (int n = 0; n < kWidth / 8; ++n) {
        const float2 mu = element_pair(r, 8 * n + column),
                     reference =
                         *reinterpret_cast<const float2*>(&memory.reference[8 * n + column]);
        const float x = weighed[4 * n + 2 * side], y = weighed[4 * n + 2 * side + 1];
        const std::uint32_t word = pack2<T>(x, y);
        const auto* rounded = reinterpret_cast<const T*>(&word);
        const float rx = to_float(rounded[0]), ry = to_float(rounded[1]);
        own = fmaf(mu.x, fmaf(-0.5f, x, rx), own);
        own = fmaf(mu.y, fmaf(-0.5f, y, ry), own);
        shared = fmaf(reference.x, x, shared);
        shared = fmaf(reference.y, y, shared);
        norm += fabsf(rx) + fabsf(ry);
        if (there) store_shared32(table + row_offset(c, n), word);
      }
      // -(mu + r).m / 2 - mu.(m' - m)
      float bias = -(own + 0.5f * shared);
#pragma unroll
      for (int step = 1; step <= 2; step *= 2) {
        bias += __shfl_xor_sync(~0u, bias, step);
        norm += __shfl_xor_sync(~0u, norm, step);
      }
      if (!there) continue;
      most.x = max(most.x, magnitude_bits(norm));
      most.y = max(most.y, magnitude_bits(bias));
      if (lane % 4 == 0) write_bias(shared_address(memory.table) + bias_offset(c), bias);
    }
    return make_uint2(__reduce_max_sync(~0u, most.x), __reduce_max_sync(~0u, most.y));
  }
  __device__ float2 element_pair(int r, int column) const {
    float2 pair;
    asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];"
                 : "=f"(pair.x), "=f"(pair.y)
                 : "r"(this->staged(r, column))
                 : "memory");
    return pair;
  }
  __device__ static void write_bias(std::uint32_t to, float bias) {
    Bf16 part[3];
    split_factor(bias, part);
    store_shared16(to, make_uint4(pack2<Bf16>(to_float(part[0]), to_float(part[1])),
                                  pack2<Bf16>(to_float(part[2]), 1.0f), 0, 0));
    store_shared16(to + 4 * kBiasBytes, make_uint4(0, 0, 0, 0));
  }
  // Absolute values as integers have the same order, with NaN above all: it
  // must reach key_offset.
  __device__ static std::uint32_t magnitude_bits(float value) {
    return __float_as_uint(value) & 0x7fffffffu;
  }
  // The largest |m_c|_1 and |b_c| of the table.
  __device__ float2 table_bounds() const {
    const uint2 part = memory.bounds[own_lane() % kWarps];
    return make_float2(__uint_as_float(__reduce_max_sync(~0u, part.x)),
                       __uint_as_float(__reduce_max_sync(~0u, part.y)));
  }
};

}  // namespace key_kmeans_detail

}  // namespace coterie::cuda
