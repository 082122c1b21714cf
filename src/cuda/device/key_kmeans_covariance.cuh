// SPDX-License-Identifier: MIT
// The start of the one-kernel k-means (key_kmeans_sm90a.cu): the first centroids, and the keys'
// covariance. Every block computes it for itself: that takes less time than blocks need to tell
// each other. Of its warpgroups the first multiplies the keys, the second adds them up, and the
// others fetch the first centroids.
#pragma once

#include "cuda/device/key_kmeans.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/device/warp.cuh"

namespace coterie::cuda {

namespace key_kmeans_detail {

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

  // The row of a first centroid; by one half of the warps.
  __device__ __forceinline__ void choose_row() const {
    const RandomStream stream{args.shape.seed, RandomUse::initial_centroid,
                              static_cast<std::uint32_t>(problem)};
    const int place = (warp - kWarps / 2) * 32 + own_lane(),
              c = min(place, args.shape.clusters - 1);
    const auto row = static_cast<std::int32_t>(random_permutation(
        stream, static_cast<std::uint32_t>(c), static_cast<std::uint32_t>(span.length)));
    memory.initial[place] = row;
    prefetch(rows.row(row));
  }

  // Starts to load the sampled keys, zeros behind them, by the other half: 64 a warp.
  __device__ __forceinline__ void load_keys(const ItemSpan& keys, int samples) const {
    const int lane = own_lane(), first = warp * 64;
    const Rows<const T> from =
        aligned_rows(args.k.rows(keys.batch, head / args.shape.group, keys.begin));
    const Tile<T, kWidth> tile{this->slot(first / kRound)};
    const int column = lane % 8 * 8, each = keys.length / max(samples, 1),
              rest = keys.length - each * samples;
#pragma unroll 1
    for (int half = first; half < first + 64; half += 32) {
      const int number = (half + lane) * each + (half + lane) * rest / max(samples, 1);
#pragma unroll
      for (int step = 0; step < 32; step += 4) {
        const int row = half + step + lane / 8, source = __shfl_sync(~0u, number, step + lane / 8);
        const bool there = row < samples && column < args.width;
        cp_async16(tile.chunk(row % kRound, lane % 8),
                   there ? from.row(source) + column : from.data, there ? 16 : 0);
      }
    }
    cp_async_commit();
  }

  // A row, of up to 128 bytes, comes to the L2.
  __device__ static void prefetch(const T* row) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(row));
  }

  // Sums of the keys' elements, by the second warpgroup: ones times the keys, 128 of them a warp.
  __device__ __forceinline__ void add_keys() const {
    const int lane = own_lane(), own = warp % 4;
    const Tile<T, kWidth> tile{this->slot(own / 2)};
    const std::uint32_t one = pack2<T>(1.0f, 1.0f), ones[4] = {one, one, one, one};
    float sums[kWidth / 8][4] = {};
#pragma unroll 2
    for (int first = own % 2 * 128; first < own % 2 * 128 + 128; first += 16) {
      std::uint32_t keys[kWidth / 16][4];
#pragma unroll
      for (int n = 0; n < kWidth / 16; ++n)
        ldmatrix_x4_trans(keys[n], tile.chunk(first + lane % 16, 2 * n + lane / 16));
#pragma unroll
      for (int n = 0; n < kWidth / 8; ++n)
        mma_m16n8k16<T>(sums[n], ones, keys[n / 2] + n % 2 * 2, sums[n]);
    }
    if (lane >= 4) return;  // all rows of the product are the same
#pragma unroll
    for (int n = 0; n < kWidth / 8; ++n)
      store2(&memory.column_sums[own][8 * n + 2 * lane], sums[n][0], sums[n][1]);
  }

  // Where the sums of products of elements stand, in place of the table. Rows change banks.
  __device__ float* product(int row, int column) const {
    return reinterpret_cast<float*>(memory.table) + row * kWidth + (column ^ (row & 3) * 8);
  }
  // Sums of products, by the first warpgroup.
  __device__ __forceinline__ void multiply_keys() const {
    const int lane = own_lane();
    float sum[32];
#pragma unroll
    for (int i = 0; i < 32; ++i) sum[i] = 0.0f;
    wgmma_fence();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::uint64_t keys = matrix_descriptor(this->slot(half));
#pragma unroll
      for (int step = 0; step < kRound / 16; ++step) {
        const std::uint64_t tile = descriptor_behind(keys, step * (16 * 128));
        wgmma<T, 1, 1, 1>(sum, tile, tile);
      }
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_settle(sum);
    const int row = warp % 4 * 16 + lane / 4, column = lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < kWidth / 8; ++n)
#pragma unroll
      for (int side = 0; side < 2; ++side)
        store2(product(row + 8 * side, 8 * n + column), sum[4 * n + 2 * side],
               sum[4 * n + 2 * side + 1]);
  }

  // A power of two by which the mean variance comes near 1. It changes no label, and keeps the
  // table in the range of fp16. Of a lane's two columns: their means, and those of their squares.
  __device__ __forceinline__ float metric_scale(const float2& mean, const float2& square) const {
    const float trace = warp_sum((square.x - mean.x * mean.x) + (square.y - mean.y * mean.y));
    const std::uint32_t exponent = __float_as_uint(trace / static_cast<float>(args.width)) >> 23;
    return exponent > 1 && exponent < 253 ? __uint_as_float((254 - exponent) << 23) : 1.0f;
  }

  // S2 / n - mean mean^T, scaled, as right factor of the products, in two bf16 parts. By all
  // threads in a loop: instructions that run once are slower than the barrier. Every warp has all
  // means, two a lane.
  __device__ __forceinline__ void covariance(int samples) const {
    const float count = static_cast<float>(max(samples, 1)), inverse = __frcp_rn(count);
    float2 mean = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      const auto sums = reinterpret_cast<const float2*>(memory.column_sums[part])[own_lane()];
      mean = make_float2(mean.x + sums.x, mean.y + sums.y);
    }
    mean = make_float2(divide(mean.x, count, inverse), divide(mean.y, count, inverse));
    const auto square = [&](int d) { return divide(*product(d, d), count, inverse); };
    const int own = 2 * own_lane();
    const float scale = metric_scale(mean, make_float2(square(own), square(own + 1)));
    const bool keep = team.rank == 0 && head % args.shape.group == 0;
    float* kept = args.covariance +
                  static_cast<std::int64_t>(args.shape.key_problem(problem)) * kWidth * kWidth;
    const Tile<Bf16, kWidth> high{shared_address(memory.metric[0])},
        low{shared_address(memory.metric[1])};
#pragma unroll 1
    for (int i = threadIdx.x; i < kWidth * kWidth / 2; i += kThreads) {
      const int row = i / (kWidth / 2), column = i % (kWidth / 2) * 2;
      const float2 sum = *reinterpret_cast<const float2*>(product(row, column));
      const float other = __shfl_sync(~0u, row % 2 ? mean.y : mean.x, row / 2);
      const float x = divide(sum.x, count, inverse) - other * mean.x;
      const float y = divide(sum.y, count, inverse) - other * mean.y;
      if (keep) store2(kept + row * kWidth + column, x, y);
      std::uint32_t words[2];
      split_pair(x * scale, y * scale, words[0], words[1]);
      store_shared32(high.address(row, column), words[0]);
      store_shared32(low.address(row, column), words[1]);
    }
    fence_async_proxy();
  }
  __device__ static void store_shared32(std::uint32_t to, std::uint32_t word) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(word) : "memory");
  }
  __device__ static void split_pair(float a, float b, std::uint32_t& high, std::uint32_t& low) {
    high = pack2<Bf16>(a, b);
    low = pack2<Bf16>(a - __uint_as_float(high << 16), b - __uint_as_float(high & 0xffff0000u));
  }

  // The first centroids to shared memory, by the last two warpgroups; the first of them is the
  // reference. The block's share goes to global memory: an empty cluster needs its own again.
  __device__ __forceinline__ void stage_initial() const {
    constexpr int kAtOnce = kThreads / 2 / 8, kLoads = 4;
    const int thread = static_cast<int>(threadIdx.x) - kThreads / 2, column = thread % 8 * 8;
    const bool inside = column < args.width;
    const RowRange share = this->share();
#pragma unroll 1
    for (int first = thread / 8; first < kClusters; first += kLoads * kAtOnce) {
      uint4 words[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i)  // all on their way together
        words[i] = load_once(rows.row(memory.initial[first + i * kAtOnce]) + (inside ? column : 0),
                             inside);
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int c = first + i * kAtOnce;
        const auto* elements = reinterpret_cast<const T*>(&words[i]);
#pragma unroll
        for (int e = 0; e < 8; e += 4) {
          const float4 values = make_float4(to_float(elements[e]), to_float(elements[e + 1]),
                                            to_float(elements[e + 2]), to_float(elements[e + 3]));
          store_shared16(this->staged(c, column + e),
                         make_uint4(__float_as_uint(values.x), __float_as_uint(values.y),
                                    __float_as_uint(values.z), __float_as_uint(values.w)));
          if (c == 0) *reinterpret_cast<float4*>(&memory.reference[column + e]) = values;
          if (inside && c >= share.begin && c < share.end)
            *reinterpret_cast<float4*>(args.centroids + (this->first_centroid() + c) * args.width +
                                       column + e) = values;
        }
      }
    }
  }

  __device__ __forceinline__ void make_metric(FirstMeeting& meeting) const {
    const ItemSpan keys = uniform(args.shape.k.span(item));
    const int samples = min(keys.length, 8 * args.width);
    const int next = this->range.begin + static_cast<int>(threadIdx.x);  // of the first two rounds
    if (next < this->range.end) prefetch(rows.row(next));
    if (threadIdx.x == 0) memory.share = this->find_share();
    if (warp < kWarps / 2)  // the first one still meets the other blocks
      load_keys(keys, samples);
    else
      choose_row();
    cp_async_wait<0>();
    fence_async_proxy();
    __syncthreads();
    if (group == 0)
      multiply_keys();
    else if (group == 1)
      add_keys();
    else
      stage_initial();
    meeting.wait();
    covariance(samples);
    __syncthreads();
  }
};

}  // namespace key_kmeans_detail

}  // namespace coterie::cuda
