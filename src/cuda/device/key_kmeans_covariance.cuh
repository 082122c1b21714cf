// SPDX-License-Identifier: MIT
// The start of the one-kernel k-means (key_kmeans_sm90a.cu): the rows of the
// first centroids, and the keys' covariance. Every block computes it for
// itself: that takes less time than blocks need to tell each other.
#pragma once

#include "cuda/device/key_kmeans.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/device/wgmma_transposed.cuh"

namespace coterie::cuda {

namespace key_kmeans_detail {

// Parts of the covariance: sums of products of each warpgroup's keys. Rows
// change banks.
struct CovarianceParts {
  float* data;
  __device__ float& at(int part, int row, int column) const {
    return data[(part * kWidth + row) * kWidth + (column ^ (row & 3) * 8)];
  }
};

template <class T>
struct KeyCovariance : KeyProblem<T> {
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

  // One half of the warps finds the rows of the first centroids, the other one
  // starts to load the sampled keys, zeros behind them: 64 a warp.
  __device__ __forceinline__ void choose_rows(const ItemSpan& keys, int samples) const {
    const int lane = own_lane(), first = (warp - kWarps / 2) * 64;
    if (warp < kWarps / 2) {
      const RandomStream stream{args.shape.seed, RandomUse::initial_centroid,
                                static_cast<std::uint32_t>(problem)};
      const int c = min(warp * 32 + lane, args.shape.clusters - 1);
      const auto row = static_cast<int>(random_permutation(
          stream, static_cast<std::uint32_t>(c), static_cast<std::uint32_t>(span.length)));
      memory.initial[warp * 32 + lane] = row;
      prefetch(rows.row(row));
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

  // A row, of up to 128 bytes, comes to the L2.
  __device__ static void prefetch(const T* row) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(row));
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

  // A power of two by which the covariance's mean variance comes near 1: it
  // changes no label, and keeps the table in the range of fp16.
  __device__ float metric_scale(const CovarianceParts& parts) const {
    const int lane = own_lane();
    const float trace = parts.at(0, lane, lane) + parts.at(0, lane + 32, lane + 32);
    const std::uint32_t exponent =
        __float_as_uint(warp_sum(trace) / static_cast<float>(args.width)) >> 23;
    return exponent > 1 && exponent < 253 ? __uint_as_float((254 - exponent) << 23) : 1.0f;
  }

  // The covariance as right factor of the products, in two bf16 parts.
  __device__ void split_metric() const {
    const CovarianceParts parts{reinterpret_cast<float*>(memory.ring + kSamples * 128)};
    const Tile<__nv_bfloat16, kWidth> high{shared_address(memory.metric[0])},
        low{shared_address(memory.metric[1])};
    const float scale = metric_scale(parts);
#pragma unroll 2
    for (int i = threadIdx.x; i < kWidth * kWidth / 2; i += kThreads) {
      const int row = i / (kWidth / 2), column = i % (kWidth / 2) * 2;
      std::uint32_t words[2];
      split_pair(parts.at(0, row, column) * scale, parts.at(0, row, column + 1) * scale, words[0],
                 words[1]);
      store_shared32(high.address(row, column), words[0]);
      store_shared32(low.address(row, column), words[1]);
    }
    fence_async_proxy();
  }
  __device__ static void store_shared32(std::uint32_t to, std::uint32_t word) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(word) : "memory");
  }
  __device__ static void split_pair(float a, float b, std::uint32_t& high, std::uint32_t& low) {
    high = pack2<__nv_bfloat16>(a, b);
    low = pack2<__nv_bfloat16>(a - __uint_as_float(high << 16),
                               b - __uint_as_float(high & 0xffff0000u));
  }

  // Keeps the block's share of the first centroids: an empty cluster needs its
  // own again. The first of them is the reference.
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

  __device__ __forceinline__ void make_metric() const {
    const ItemSpan keys = uniform(args.shape.k.span(item));
    const int samples = min(keys.length, 8 * args.width);
    const int next = this->range.begin + static_cast<int>(threadIdx.x);  // of the first two rounds
    if (next < this->range.end) prefetch(rows.row(next));
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
