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
  using Base::memory;
  using Base::own_lane;
  using Base::rows;
  using Base::split_pair;
  using Base::store_shared32;
  using Base::warp;

  // Where shared memory has columns [column, column + 8) of a centroid, in
  // slots of the ring that the first two rounds leave free. Rows change banks.
  __device__ std::uint32_t staged(int cluster, int column) const {
    return this->slot(2 + cluster / 128) + cluster % 128 * (4 * kWidth) +
           (column ^ (cluster & 7) * 8) * 4;
  }
  // All centroids to shared memory, the last one repeated.
  __device__ void stage_centroids(bool initial) const {
    const int column = threadIdx.x % 8 * 8, last = args.shape.clusters - 1;
    const bool inside = column < args.width;
    if (initial) {
      constexpr int kLoads = kClusters / (kThreads / 8);
      uint4 words[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {  // all on their way together
        const int c = threadIdx.x / 8 + i * (kThreads / 8);
        words[i] = load_once(rows.row(memory.initial[c]) + (inside ? column : 0), inside);
      }
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int c = threadIdx.x / 8 + i * (kThreads / 8);
        const auto* elements = reinterpret_cast<const T*>(&words[i]);
#pragma unroll
        for (int e = 0; e < 8; e += 4)
          store_shared16(staged(c, column) + 4 * e,
                         make_uint4(__float_as_uint(to_float(elements[e])),
                                    __float_as_uint(to_float(elements[e + 1])),
                                    __float_as_uint(to_float(elements[e + 2])),
                                    __float_as_uint(to_float(elements[e + 3]))));
      }
    } else {
#pragma unroll 1
      for (int c = threadIdx.x / 8; c < kClusters; c += kThreads / 8) {
        const std::uint32_t to = staged(c, column);
        const float* from = args.centroids;
        if (inside) from += (this->first_centroid() + min(c, last)) * args.width + column;
        cp_async16(to, from, inside ? 16 : 0);
        cp_async16(to + 16, from + 4, inside ? 16 : 0);
      }
      cp_async_commit();
    }
    cp_async_wait<0>();
    __syncthreads();
  }
  // The table of all centroids to shared memory, from those that are staged
  // there.
  __device__ __forceinline__ void weigh() const {
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
      if (step == 0)
        wgmma<__nv_bfloat16, 0, 0>(weighed, low[step], right);
      else
        wgmma<__nv_bfloat16, 1, 0>(weighed, low[step], right);
      wgmma<__nv_bfloat16, 1, 0>(weighed, high[step], descriptor_behind(right, kTileBytes));
      wgmma<__nv_bfloat16, 1, 0>(weighed, high[step], right);
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_settle(weighed);
    const Tile<T, kWidth> table{shared_address(memory.table)};
    uint2 most = make_uint2(0, 0);
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const int c = row + 8 * side;
      float own = 0.0f, shared = 0.0f, norm = 0.0f;
#pragma unroll
      for (int n = 0; n < kWidth / 8; ++n) {
        const float2 mu = element_pair(c, 8 * n + column),
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
        store_shared32(table.chunk(c, n) + lane % 4 * 4, word);
      }
      // -(mu + r).m / 2 - mu.(m' - m)
      float bias = -(own + 0.5f * shared);
#pragma unroll
      for (int step = 1; step <= 2; step *= 2) {
        bias += __shfl_xor_sync(~0u, bias, step);
        norm += __shfl_xor_sync(~0u, norm, step);
      }
      most.x = max(most.x, magnitude_bits(norm));
      most.y = max(most.y, magnitude_bits(bias));
      if (lane % 4 == 0) write_bias(c, bias);
    }
    most = make_uint2(__reduce_max_sync(~0u, most.x), __reduce_max_sync(~0u, most.y));
    if (lane == 0) memory.bounds[warp] = most;
    if (threadIdx.x == 0) memory.poisoned = 0;
    fence_async_proxy();
    __syncthreads();
  }
  __device__ float2 element_pair(int cluster, int column) const {
    float2 pair;
    asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];"
                 : "=f"(pair.x), "=f"(pair.y)
                 : "r"(staged(cluster, column & ~7) + (column & 7) * 4)
                 : "memory");
    return pair;
  }
  __device__ void write_bias(int cluster, float bias) const {
    __nv_bfloat16 part[3];
    split_factor(bias, part);
    const std::uint32_t to =
        shared_address(memory.bias) + cluster / 8 * (8 * kBiasBytes) + cluster % 8 * 16;
    store_shared16(to, make_uint4(pack2<__nv_bfloat16>(to_float(part[0]), to_float(part[1])),
                                  pack2<__nv_bfloat16>(to_float(part[2]), 1.0f), 0, 0));
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
