// SPDX-License-Identifier: MIT
// The metric inside the one-kernel k-means (key_kmeans_sm90a.cu): the keys' covariance, and the
// table of all centroids. Every block computes both for itself: that takes less time than blocks
// need to tell each other.
//
// A warp makes 16 columns of the table by mma.sync, m_c = S (mu_c - r) with both factors as sums of
// two bf16 numbers. In its fragments a lane has the same elements of mu_c as left factor and of m_c
// as sum: rows l/4 and l/4 + 8, columns 8 n + 2 (l%4) + {0, 1}. Loops are rolled up where nothing
// is lost: at 4k most of this code runs once or twice, and instructions come from far away.
#pragma once

#include "cuda/device/key_kmeans.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/device/wgmma_transposed.cuh"

namespace coterie::cuda {

namespace key_kmeans_detail {

// Parts of the covariance: sums of products of each warpgroup's keys. Rows change banks.
struct CovarianceParts {
  float* data;
  __device__ float& at(int part, int row, int column) const {
    return data[(part * kWidth + row) * kWidth + (column ^ (row & 3) * 8)];
  }
};

template <class T>
struct KeyMetric : KeyProblem<T> {
  using Base = KeyProblem<T>;
  using Base::args;
  using Base::Base;
  using Base::group;
  using Base::head;
  using Base::item;
  using Base::memory;
  using Base::own_lane;
  using Base::problem;
  using Base::rows;
  using Base::span;
  using Base::team;
  using Base::warp;

  // One half of the warps finds the rows of the first centroids, the other one starts to load the
  // sampled keys, zeros behind them: 64 a warp.
  __device__ __forceinline__ void choose_rows(const ItemSpan& keys, int samples) const {
    const int lane = own_lane(), first = (warp - kWarps / 2) * 64;
    if (warp < kWarps / 2) {
      const RandomStream stream{args.shape.seed, RandomUse::initial_centroid,
                                static_cast<std::uint32_t>(problem)};
      const int c = min(warp * 32 + lane, args.shape.clusters - 1);
      memory.initial[warp * 32 + lane] = static_cast<int>(random_permutation(
          stream, static_cast<std::uint32_t>(c), static_cast<std::uint32_t>(span.length)));
      return;
    }
    const Rows<const T> from =
        aligned_rows(args.k.rows(keys.batch, head / args.shape.group, keys.begin));
    const Tile<T, kWidth> tile{shared_address(memory.ring)};
    const int column = lane % 8 * 8;
#pragma unroll 1
    for (int half = first; half < first + 64; half += 32) {
      const auto number = static_cast<int>(static_cast<std::uint64_t>(half + lane) *
                                           static_cast<unsigned>(keys.length) /
                                           static_cast<unsigned>(max(samples, 1)));
#pragma unroll
      for (int step = 0; step < 32; step += 4) {
        const int row = half + step + lane / 8, source = __shfl_sync(~0u, number, step + lane / 8);
        const bool there = row < samples && column < args.width;
        cp_async16(tile.chunk(row, lane % 8), there ? from.row(source) + column : from.data,
                   there ? 16 : 0);
      }
    }
    cp_async_commit();
  }

  // Where shared memory has columns [column, column + 8) of a centroid, in slots of the ring that
  // the first two rounds leave free. Rows change banks.
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
  // Keeps the block's share of the first centroids: an empty cluster needs its own again. The first
  // of them is the reference.
  __device__ void store_initial() const {
    if (threadIdx.x < kWidth)
      memory.reference[threadIdx.x] = threadIdx.x < static_cast<unsigned>(args.width)
                                          ? to_float(rows.row(memory.initial[0])[threadIdx.x])
                                          : 0.0f;
    this->for_share([&](int cluster, int column) {
      const T* from = rows.row(memory.initial[cluster]) + column;
      *reinterpret_cast<float4*>(args.centroids + (this->first_centroid() + cluster) * args.width +
                                 column) =
          make_float4(to_float(from[0]), to_float(from[1]), to_float(from[2]), to_float(from[3]));
    });
  }

  // S2 / n - mean mean^T, in place of the first part of S2.
  __device__ void covariance(int samples) const {
    const int lane = own_lane();
    float sum[32], columns[32];
#pragma unroll
    for (int i = 0; i < 32; ++i) sum[i] = columns[i] = 0.0f;
    const std::uint32_t one = pack2<T>(1.0f, 1.0f), ones[4] = {one, one, one, one};
    const std::uint64_t keys =
        matrix_descriptor(shared_address(memory.ring) + group * (kSamples / kGroups * 128));
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSamples / kGroups / 16; ++step) {
      const std::uint64_t tile = descriptor_behind(keys, step * (16 * 128));
      wgmma_transposed<T>(sum, tile, tile);
      wgmma<T, 1, 1>(columns, ones, tile);
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_settle(sum);
    wgmma_settle(columns);
    const CovarianceParts parts{reinterpret_cast<float*>(memory.ring + kSamples * 128)};
    const int row = warp % 4 * 16 + lane / 4, column = lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < kWidth / 8; ++n) {
      store2(&parts.at(group, row, 8 * n + column), sum[4 * n], sum[4 * n + 1]);
      store2(&parts.at(group, row + 8, 8 * n + column), sum[4 * n + 2], sum[4 * n + 3]);
      if (warp % 4 == 0 && lane < 4)
        store2(&memory.column_sums[group][8 * n + column], columns[4 * n], columns[4 * n + 1]);
    }
    __syncthreads();
    const float count = static_cast<float>(max(samples, 1)), inverse = __frcp_rn(count);
    const bool keep = team.rank == 0 && head % args.shape.group == 0;
    float* kept = args.covariance +
                  static_cast<std::int64_t>(args.shape.key_problem(problem)) * kWidth * kWidth;
    const auto mean = [&](int d) {
      float total = 0.0f;
      for (int part = 0; part < kGroups; ++part) total += memory.column_sums[part][d];
      return divide(total, count, inverse);
    };
    const int b = threadIdx.x % kWidth;
    const float mean_b = mean(b);
#pragma unroll 2
    for (int a = threadIdx.x / kWidth; a < kWidth; a += kThreads / kWidth) {
      float total = 0.0f;
#pragma unroll
      for (int part = 0; part < kGroups; ++part) total += parts.at(part, a, b);
      total = divide(total, count, inverse) - mean(a) * mean_b;
      parts.at(0, a, b) = total;
      if (keep) kept[a * kWidth + b] = total;
    }
    __syncthreads();
  }

  // A power of two by which the covariance's mean variance comes near 1: it changes no label, and
  // keeps the table in the range of fp16.
  __device__ float metric_scale(const CovarianceParts& parts) const {
    const int lane = own_lane();
    const float trace = parts.at(0, lane, lane) + parts.at(0, lane + 32, lane + 32);
    const std::uint32_t exponent =
        __float_as_uint(warp_sum(trace) / static_cast<float>(args.width)) >> 23;
    return exponent > 1 && exponent < 253 ? __uint_as_float((254 - exponent) << 23) : 1.0f;
  }

  // The covariance as right factors of mma.sync, in two bf16 parts.
  __device__ void split_metric() const {
    const CovarianceParts parts{reinterpret_cast<float*>(memory.ring + kSamples * 128)};
    const float scale = metric_scale(parts);
    uint4* to = &memory.metric[0][0][0];
#pragma unroll 1
    for (int i = threadIdx.x; i < kWidth / 16 * (kWidth / 8) * 32; i += kThreads) {
      const int depth = i / 256 * 16 + i % 4 * 2, column = i / 32 % 8 * 8 + i % 32 / 4;
      std::uint32_t high[2], low[2];
#pragma unroll
      for (int half = 0; half < 2; ++half)
        split_pair(parts.at(0, column, depth + 8 * half) * scale,
                   parts.at(0, column, depth + 8 * half + 1) * scale, high[half], low[half]);
      to[i] = make_uint4(high[0], high[1], low[0], low[1]);
    }
  }
  __device__ static void split_pair(float a, float b, std::uint32_t& high, std::uint32_t& low) {
    high = pack2<__nv_bfloat16>(a, b);
    low = pack2<__nv_bfloat16>(a - __uint_as_float(high << 16),
                               b - __uint_as_float(high & 0xffff0000u));
  }

  // The table of all centroids to shared memory, from those that are staged there.
  __device__ __forceinline__ void weigh() const {
    const int lane = own_lane();
    const int row = warp * kOwn + lane / 4, column = lane % 4 * 2;
    float weighed[kWidth / 8][4] = {};
#pragma unroll 1
    for (int step = 0; step < kWidth / 16; ++step) {
      std::uint32_t high[4], low[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 mu = element_pair(row + i % 2 * 8, 16 * step + i / 2 * 8 + column),
                     reference = *reinterpret_cast<const float2*>(
                         &memory.reference[16 * step + i / 2 * 8 + column]);
        split_pair(mu.x - reference.x, mu.y - reference.y, high[i], low[i]);
      }
#pragma unroll
      for (int n = 0; n < kWidth / 8; ++n) {
        const uint4 metric = memory.metric[step][n][lane];
        const std::uint32_t right_high[2] = {metric.x, metric.y},
                            right_low[2] = {metric.z, metric.w};
        mma_m16n8k16<__nv_bfloat16>(weighed[n], low, right_high, weighed[n]);
        mma_m16n8k16<__nv_bfloat16>(weighed[n], high, right_low, weighed[n]);
        mma_m16n8k16<__nv_bfloat16>(weighed[n], high, right_high, weighed[n]);
      }
    }
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
        const float x = weighed[n][2 * side], y = weighed[n][2 * side + 1];
        const std::uint32_t word = pack2<T>(x, y);
        const auto* rounded = reinterpret_cast<const T*>(&word);
        const float rx = to_float(rounded[0]), ry = to_float(rounded[1]);
        own = fmaf(mu.x, fmaf(-0.5f, x, rx), own);
        own = fmaf(mu.y, fmaf(-0.5f, y, ry), own);
        shared = fmaf(reference.x, x, shared);
        shared = fmaf(reference.y, y, shared);
        norm += fabsf(rx) + fabsf(ry);
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(table.chunk(c, n) + lane % 4 * 4), "r"(word)
                     : "memory");
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
  // Absolute values as integers have the same order, with NaN above all: it must reach key_offset.
  __device__ static std::uint32_t magnitude_bits(float value) {
    return __float_as_uint(value) & 0x7fffffffu;
  }
  // The largest |m_c|_1 and |b_c| of the table.
  __device__ float2 table_bounds() const {
    const uint2 part = memory.bounds[own_lane() % kWarps];
    return make_float2(__uint_as_float(__reduce_max_sync(~0u, part.x)),
                       __uint_as_float(__reduce_max_sync(~0u, part.y)));
  }

  __device__ __forceinline__ void make_metric() const {
    const ItemSpan keys = uniform(args.shape.k.span(item));
    const int samples = min(keys.length, 8 * args.width);
    choose_rows(keys, samples);
    cp_async_wait<0>();
    fence_async_proxy();
    __syncthreads();
    store_initial();
    covariance(samples);
    split_metric();
    __syncthreads();
  }
};

}  // namespace key_kmeans_detail

}  // namespace coterie::cuda
