// SPDX-License-Identifier: MIT
// The one-kernel k-means of key_kmeans_sm90a.cu: its memory, and the steps by centroids that a
// team's blocks share: means of the blocks' sums, and places of the clusters' rows.
#pragma once

#include <cstdint>

#include "coterie/random.h"
#include "cuda/device/nearest.cuh"
#include "cuda/device/wgmma.cuh"
#include "cuda/key_kmeans.h"

namespace coterie::cuda {

namespace key_kmeans_detail {

constexpr int kGroups = 4, kThreads = kGroups * kWarpgroup, kWarps = kThreads / 32;
constexpr int kWidth = 64, kClusters = 64 * kGroups;
constexpr int kOwn = kClusters / kWarps;          // clusters of a warp
constexpr int kRound = 64 * kGroups, kSlots = 4;  // rows; rounds in shared memory
constexpr int kTileBytes = 64 * 128, kSlotBytes = kGroups * kTileBytes;
constexpr int kBiasBytes = 32;        // of a centroid: hi, mid, lo, 1, and zeros
constexpr int kStep = 64;             // centroids at a time
constexpr int kMostParts = 8;         // of a problem's rows
constexpr int kSamples = 8 * kWidth;  // keys of the covariance, at most

template <class T>
struct KeyKMeansArgs {
  ClusterShape shape;
  Teams teams;
  Tensor4<const T> q, k;
  float *covariance, *centroids, *sums;
  std::int32_t *counts, *ranks;
  KeyKMeansRun run;
  int width;
  unsigned key_scale;  // 512, unknown to the compiler: see best_key
};

// Shared memory of a block, at a multiple of 1024 bytes.
struct Memory {
  unsigned char ring[kSlots * kSlotBytes];  // rows; before them keys and parts of the covariance
  unsigned char table[kClusters * 128];
  unsigned char bias[kClusters * kBiasBytes];
  uint4 metric[kWidth / 16][kWidth / 8][32];  // right factors of 16 x 8: high parts, low parts
  std::uint32_t lists[kWarps][kRound + 20];   // rows of a warp's clusters, and what nobody reads
  std::uint8_t labels[kSlots][kRound];        // of row r at r % 32 * 8 + r / 32
  float column_sums[kGroups][kWidth];
  float reference[kWidth];  // the fixed query
  uint2 bounds[kWarps];
  std::int32_t numbers[kSamples];   // rows of the sampled keys
  std::int32_t initial[kClusters];  // rows of the first centroids; places of the clusters
  std::uint64_t ready[kSlots], free[kSlots];
  int poisoned;  // a row of cluster 0 is not finite
};

// A value that all lanes share, in a uniform register.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(~0u, value, 0); }
__device__ __forceinline__ ItemSpan uniform(const ItemSpan& span) {
  return {uniform(span.batch), uniform(span.begin), uniform(span.length)};
}

// The same rows, with what key_kmeans_serves has asked for known to the compiler.
template <class T>
__device__ __forceinline__ Rows<const T> aligned_rows(Rows<const T> rows) {
  rows.aligned = true;
  return rows;
}

// One problem of a team.
template <class T>
struct KeyProblem {
  const KeyKMeansArgs<T>& args;
  Memory& memory;
  Team& team;
  const int warp, group;  // of this thread; a warpgroup has four warps
  const int problem, item, head;
  const ItemSpan span;
  const RowRange range;
  const Rows<const T> rows;
  const int rounds;
  int done;  // rounds of earlier passes, for the phases of the barriers

  __device__ KeyProblem(const KeyKMeansArgs<T>& a, Memory& m, Team& t, int number, int before)
      : args(a),
        memory(m),
        team(t),
        warp(uniform(static_cast<int>(threadIdx.x / 32))),
        group(warp / 4),
        problem(number),
        item(number / a.shape.heads),
        head(number % a.shape.heads),
        span(uniform(a.shape.q.span(item))),
        range(t.share(span.length)),
        rows(aligned_rows(a.q.rows(span.batch, head, span.begin))),
        rounds((range.end - range.begin + kRound - 1) / kRound),
        done(before) {}

  // Read again in every step, so that what depends on it is no constant of the loop over rounds:
  // there are no registers for more of these, and local memory is far away with so little L1 left.
  __device__ static int own_lane() {
    int lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
  }

  __device__ int place(int round) const { return (done + round) % kSlots; }
  __device__ std::uint32_t slot(int round) const {
    return shared_address(memory.ring) + place(round) * kSlotBytes;
  }
  __device__ std::int64_t first_centroid() const {
    return static_cast<std::int64_t>(problem) * args.shape.clusters;
  }
  // Where the sums and counts of a block of the team begin.
  __device__ std::int64_t part(int rank) const {
    return (static_cast<std::int64_t>(team.number) * team.size + rank) * kClusters;
  }

  // Calls visit(cluster, column) for the block's share of the centroids, four columns at a time.
  template <class Visit>
  __device__ __forceinline__ void for_share(const Visit& visit) const {
    const int clusters = args.shape.clusters, each = (clusters + team.size - 1) / team.size;
    const int begin = team.rank * each, end = min(begin + each, clusters);
#pragma unroll 1
    for (int i = threadIdx.x; i < (end - begin) * (kWidth / 4); i += kThreads)
      if (i % (kWidth / 4) * 4 < args.width) visit(begin + i / (kWidth / 4), i % (kWidth / 4) * 4);
  }

  // Means of the block's share of the clusters to `to`; those without rows become zeros, or stay
  // as they are where `keep`.
  __device__ void write_means(float* to, bool keep) const {
    for_share([&](int cluster, int column) {
      float4 sums[kMostParts];
      int counts[kMostParts];
#pragma unroll
      for (int rank = 0; rank < kMostParts; ++rank) {  // all loads are on their way together
        const std::int64_t row = part(min(rank, team.size - 1)) + cluster;
        sums[rank] = __ldcg(reinterpret_cast<const float4*>(args.sums + row * kWidth + column));
        counts[rank] = __ldcg(args.counts + row);
      }
      float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      int members = 0;
#pragma unroll
      for (int rank = 0; rank < kMostParts; ++rank) {
        if (rank >= team.size) continue;
        sum.x += sums[rank].x;
        sum.y += sums[rank].y;
        sum.z += sums[rank].z;
        sum.w += sums[rank].w;
        members += counts[rank];
      }
      if (members == 0 && keep) return;
      const float size = static_cast<float>(max(members, 1));
      *reinterpret_cast<float4*>(to + (first_centroid() + cluster) * args.width + column) =
          make_float4(sum.x / size, sum.y / size, sum.z / size, sum.w / size);
    });
  }

  // The sort: offsets of the clusters, then every row to its place.
  __device__ void write_order() const {
    const int clusters = args.shape.clusters, c = threadIdx.x;
    int total = 0, before = 0, carry = 0;
    if (c < clusters)
#pragma unroll
      for (int rank = 0; rank < kMostParts; ++rank) {
        const int members = rank < team.size ? __ldcg(args.counts + part(rank) + c) : 0;
        before += rank < team.rank ? members : 0;
        total += members;
      }
    const int start = block_exclusive_scan(total, carry);
    if (c < clusters) memory.initial[c] = start + before;
    if (c <= clusters && team.rank == 0)
      args.run.offsets[static_cast<std::int64_t>(problem) * (clusters + 1) + c] = start;
    __syncthreads();
    constexpr int kBatch = 8;
    const std::int64_t first = args.shape.start(span, head);
#pragma unroll 1
    for (int begin = range.begin + threadIdx.x; begin < range.end; begin += kBatch * kThreads) {
      int labels[kBatch], ranks[kBatch];  // all loads are on their way together
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const std::int64_t row = first + min(begin + i * kThreads, range.end - 1);
        labels[i] = args.run.labels[row];
        ranks[i] = args.ranks[row];
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i)
        if (begin + i * kThreads < range.end)
          args.run.order[first + memory.initial[labels[i]] + ranks[i]] = begin + i * kThreads;
    }
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
    for_share([&](int cluster, int column) {
      float values[4] = {};
      if (cluster < span.length)
        for (int i = 0; i < 4; ++i) values[i] = to_float(rows.row(cluster)[column + i]);
      *reinterpret_cast<float4*>(args.run.means + (first_centroid() + cluster) * args.width +
                                 column) = make_float4(values[0], values[1], values[2], values[3]);
    });
  }
};

}  // namespace key_kmeans_detail

}  // namespace coterie::cuda
