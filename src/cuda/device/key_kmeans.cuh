// SPDX-License-Identifier: MIT
// The one-kernel k-means of key_kmeans_sm90a.cu: its memory, and the steps by centroids. In these a
// block takes a part of a problem's centroids, a warp two at a time.
#pragma once

#include <cstdint>

#include "coterie/random.h"
#include "cuda/device/nearest.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/device/wgmma.cuh"
#include "cuda/key_kmeans.h"

namespace coterie::cuda {

namespace key_kmeans_detail {

constexpr int kGroups = 4, kThreads = kGroups * kWarpgroup, kWarps = kThreads / 32;
constexpr int kWidth = 64, kClusters = 64 * kGroups;
constexpr int kRound = 64 * kGroups, kSlots = 4;  // rows; rounds in shared memory
constexpr int kTileBytes = 64 * 128, kSlotBytes = kGroups * kTileBytes;
constexpr int kBiasBytes = 32;  // of a centroid: hi, mid, lo, 1, and zeros
constexpr int kStep = 64;       // centroids at a time
constexpr int kMostParts = 8;   // of a problem's rows

template <class T>
struct KeyKMeansArgs {
  ClusterShape shape;
  Teams teams;
  Tensor4<const T> q;
  const float* covariance;
  float* centroids;
  T* columns;
  float *bias, *norms, *sums;
  std::int32_t *counts, *histograms;
  KeyKMeansRun run;
  int width;
  unsigned key_scale;  // 512, unknown to the compiler: see best_key
};

// Shared memory of a block, at a multiple of 1024 bytes.
struct Memory {
  unsigned char ring[kSlots * kSlotBytes];  // rows, or counters of the sort
  unsigned char table[kClusters * 128];
  unsigned char bias[kClusters * kBiasBytes];
  float covariance[kWidth][kWidth];
  float2 deltas[kWarps][kWidth];
  float2 bounds[kWarps];
  std::uint16_t labels[kSlots][kRound];  // as numbers of the element type
  std::int32_t counts[kClusters];
  std::uint64_t ready[kSlots], free[kSlots];
  int poisoned;  // a row of cluster 0 is not finite
};

// A power of two by which the covariance's mean variance comes near 1: see key_metric.cu.
__device__ float metric_scale(const float (*covariance)[kWidth], int width) {
  float trace = 0.0f;
  for (int d = threadIdx.x % 32; d < width; d += 32) trace += covariance[d][d];
  const std::uint32_t exponent = __float_as_uint(warp_sum(trace) / static_cast<float>(width)) >> 23;
  return exponent > 1 && exponent < 253 ? __uint_as_float((254 - exponent) << 23) : 1.0f;
}

// The same rows, with what key_kmeans_serves has asked for known to the compiler.
template <class T>
__device__ __forceinline__ Rows<const T> aligned_rows(Rows<const T> rows) {
  rows.aligned = true;
  return rows;
}

// One problem of a team, and the steps by centroids.
template <class T>
struct KeyProblem {
  const KeyKMeansArgs<T>& args;
  Memory& memory;
  Team& team;
  const int problem, item, head;
  const ItemSpan span;
  const RowRange range;
  const Rows<const T> rows;
  const int rounds;
  int done;            // rounds of earlier passes, for the phases of the barriers
  float reference[2];  // this lane's columns lane + 32 i of the fixed query

  __device__ KeyProblem(const KeyKMeansArgs<T>& a, Memory& m, Team& t, int number, int before)
      : args(a),
        memory(m),
        team(t),
        problem(number),
        item(number / a.shape.heads),
        head(number % a.shape.heads),
        span(a.shape.q.span(item)),
        range(t.share(span.length)),
        rows(aligned_rows(a.q.rows(span.batch, head, span.begin))),
        rounds((range.end - range.begin + kRound - 1) / kRound),
        done(before) {}

  __device__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
  __device__ static int warp() { return static_cast<int>(threadIdx.x) / 32; }
  __device__ static int group() { return static_cast<int>(threadIdx.x) / kWarpgroup; }

  // Starts to load the covariance; zeros beyond it.
  __device__ void load_covariance() const {
    constexpr int kChunks = kWidth / 4;
    const int pitch = (args.width + 31) / 32 * 32;
    const float* from = args.covariance +
                        static_cast<std::int64_t>(args.shape.key_problem(problem)) * pitch * pitch;
#pragma unroll
    for (int i = threadIdx.x; i < kWidth * kChunks; i += kThreads) {
      const int row = i / kChunks, column = i % kChunks * 4;
      const bool there = row < pitch && column < pitch;
      cp_async16(shared_address(&memory.covariance[row][column]),
                 there ? from + row * pitch + column : from, there ? 16 : 0);
    }
    cp_async_commit();
  }

  // Sum of the rows of a cluster, this lane's columns lane + 32 i, and how many they are.
  __device__ int collect(int cluster, float (&sum)[2]) const {
    float part[kMostParts][2];
    int count[kMostParts], members = 0;
    sum[0] = sum[1] = 0.0f;
#pragma unroll
    for (int rank = 0; rank < kMostParts; ++rank) {  // all loads are on their way together
      const std::int64_t row =
          (static_cast<std::int64_t>(team.number) * team.size + min(rank, team.size - 1)) *
              kClusters +
          cluster;
      part[rank][0] = args.sums[row * kWidth + lane()];
      part[rank][1] = args.sums[row * kWidth + lane() + 32];
      count[rank] = args.counts[row];
    }
#pragma unroll
    for (int rank = 0; rank < kMostParts; ++rank) {
      if (rank >= team.size) continue;
      sum[0] += part[rank][0];
      sum[1] += part[rank][1];
      members += count[rank];
    }
    return members;
  }

  // Calls visit(cluster) for this warp's share of the block's clusters, pairs of neighbours.
  template <class Visit>
  __device__ __forceinline__ void for_pairs(const Visit& visit) const {
    const int clusters = args.shape.clusters, each = (clusters + team.size - 1) / team.size;
    const int begin = team.rank * each, end = min(begin + each, clusters);
    for (int first = begin + 2 * warp(); first < end; first += 2 * kWarps)
      visit(first, min(2, end - first));
  }

  __device__ int initial_row(int cluster) const {
    const RandomStream stream{args.shape.seed, RandomUse::initial_centroid,
                              static_cast<std::uint32_t>(problem)};
    return static_cast<int>(random_permutation(stream, static_cast<std::uint32_t>(cluster),
                                               static_cast<std::uint32_t>(span.length)));
  }
  __device__ void load_row(int row, float (&values)[2]) const {
    T element[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) element[i] = rows.row(row)[min(lane() + 32 * i, args.width - 1)];
#pragma unroll
    for (int i = 0; i < 2; ++i)
      values[i] = lane() + 32 * i < args.width ? to_float(element[i]) : 0.0f;
  }

  // Centroids of this block and what the product needs of them.
  __device__ void weigh(bool initial) {
    const float scale = metric_scale(memory.covariance, args.width);
    for_pairs([&](int first, int count) {
      const std::int64_t row = static_cast<std::int64_t>(problem) * args.shape.clusters + first;
      float mean[2][2], weighed[2][2] = {};
      int source = 0, members[2];
      if (initial) source = initial_row(first + min(lane(), count - 1));
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (initial)
          load_row(__shfl_sync(~0u, source, j), mean[j]);
        else
          members[j] = collect(first + min(j, count - 1), mean[j]);
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (j >= count) continue;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (lane() + 32 * i >= args.width) continue;
          float* stored = args.centroids + (row + j) * args.width + lane() + 32 * i;
          if (!initial)
            mean[j][i] = members[j] > 0 ? mean[j][i] / static_cast<float>(members[j]) : *stored;
          *stored = mean[j][i];
        }
      }
      float2* deltas = memory.deltas[warp()];
      __syncwarp();
#pragma unroll
      for (int i = 0; i < 2; ++i)
        deltas[lane() + 32 * i] =
            make_float2((mean[0][i] - reference[i]) * scale, (mean[1][i] - reference[i]) * scale);
      __syncwarp();
#pragma unroll 8
      for (int d = 0; d < args.width; ++d) {
        const float2 delta = deltas[d];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float value = memory.covariance[d][lane() + 32 * i];
          weighed[0][i] = fmaf(value, delta.x, weighed[0][i]);
          weighed[1][i] = fmaf(value, delta.y, weighed[1][i]);
        }
      }
#pragma unroll
      for (int j = 0; j < 2; ++j)
        if (j < count) write_column(first + j, mean[j], weighed[j]);
    });
  }
  __device__ void write_column(int cluster, const float (&mean)[2], const float (&weighed)[2]) {
    const std::int64_t row = static_cast<std::int64_t>(team.number) * kClusters + cluster;
    float bias = 0.0f, norm = 0.0f;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const T element = from_float<T>(weighed[i]);
      const float rounded = to_float(element);
      args.columns[row * kWidth + lane() + 32 * i] = element;
      bias -= 0.5f * (mean[i] + reference[i]) * weighed[i] + mean[i] * (rounded - weighed[i]);
      norm += fabsf(rounded);
    }
    bias = warp_sum(bias);
    norm = warp_sum(norm);
    if (lane() == 0) args.bias[row] = bias;
    if (lane() == 0) args.norms[row] = norm;
  }

  // All centroids to shared memory, the last one repeated; returns the largest |m_c|_1 and |b_c|.
  __device__ float2 stage_table() const {
    const std::int64_t start = static_cast<std::int64_t>(team.number) * kClusters;
    const int last = args.shape.clusters - 1;
    const auto* from = reinterpret_cast<const uint4*>(args.columns + start * kWidth);
    const Tile<T, 64> table{shared_address(memory.table)};
    constexpr int kChunks = kClusters * 8 / kThreads;
    uint4 words[kChunks];
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const int chunk = threadIdx.x + i * kThreads;
      words[i] = from[min(chunk / 8, last) * 8 + chunk % 8];
    }
    float2 most = make_float2(0.0f, 0.0f);
    if (threadIdx.x < kClusters) {
      const int c = threadIdx.x;
      const float bias = args.bias[start + min(c, last)];
      most = make_float2(args.norms[start + min(c, last)], fabsf(bias));
      __nv_bfloat16 part[3];
      split_factor(bias, part);
      const std::uint32_t to = shared_address(memory.bias) + c / 8 * (8 * kBiasBytes) + c % 8 * 16;
      store_shared16(to, make_uint4(pack2<__nv_bfloat16>(to_float(part[0]), to_float(part[1])),
                                    pack2<__nv_bfloat16>(to_float(part[2]), 1.0f), 0, 0));
      store_shared16(to + 4 * kBiasBytes, make_uint4(0, 0, 0, 0));
      memory.counts[c] = 0;
    }
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const int chunk = threadIdx.x + i * kThreads;
      store_shared16(table.chunk(chunk / 8, chunk % 8), words[i]);
    }
    if (threadIdx.x == 0) memory.poisoned = 0;
    fence_async_proxy();
    // Comparisons that let NaN pass: it must reach key_offset.
    const auto raise = [&](const float2& other) {
      if (!(other.x <= most.x)) most.x = other.x;
      if (!(other.y <= most.y)) most.y = other.y;
    };
#pragma unroll
    for (int step = 16; step > 0; step /= 2)
      raise(make_float2(__shfl_xor_sync(~0u, most.x, step), __shfl_xor_sync(~0u, most.y, step)));
    if (lane() == 0) memory.bounds[warp()] = most;
    __syncthreads();
    for (int w = 0; w < kWarps; ++w) raise(memory.bounds[w]);
    return most;
  }

  __device__ void write_means() const {
    for_pairs([&](int first, int count) {
      for (int j = 0; j < count; ++j) {
        float sum[2];
        const int members = collect(first + j, sum);
        const std::int64_t row =
            static_cast<std::int64_t>(problem) * args.shape.clusters + first + j;
#pragma unroll
        for (int i = 0; i < 2; ++i)
          if (lane() + 32 * i < args.width)
            args.run.means[row * args.width + lane() + 32 * i] =
                members > 0 ? sum[i] / static_cast<float>(members) : 0.0f;
      }
    });
  }

  // Every row is its own cluster.
  __device__ void run_single() const {
    const std::int64_t start = args.shape.start(span, head);
    const int clusters = args.shape.clusters;
    std::int32_t* offsets = args.run.offsets + static_cast<std::int64_t>(problem) * (clusters + 1);
    for (int i = range.begin + threadIdx.x; i < range.end; i += kThreads)
      args.run.labels[start + i] = args.run.order[start + i] = i;
    if (team.rank == 0)
      for (int c = threadIdx.x; c <= clusters; c += kThreads) offsets[c] = min(c, span.length);
    if (!args.run.means) return;
    for_pairs([&](int first, int count) {
      for (int c = first; c < first + count; ++c) {
        float values[2] = {};
        if (c < span.length) load_row(c, values);
        float* to = args.run.means +
                    (static_cast<std::int64_t>(problem) * clusters + c) * args.width + lane();
#pragma unroll
        for (int i = 0; i < 2; ++i)
          if (lane() + 32 * i < args.width) to[32 * i] = values[i];
      }
    });
  }
};

}  // namespace key_kmeans_detail

}  // namespace coterie::cuda
