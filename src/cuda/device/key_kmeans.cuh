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
  unsigned char metric[2][kTileBytes];       // the covariance in bf16: high parts, low parts
  std::uint32_t lists[kWarps][kRound + 20];  // rows of a warp's clusters, and what nobody reads
  std::uint8_t labels[kSlots][kRound];       // of row r at r % 32 * 8 + r / 32
  float column_sums[kGroups][kWidth];
  float reference[kWidth];  // the fixed query
  uint2 bounds[kWarps];
  std::int32_t numbers[kSamples];   // rows of the sampled keys
  std::int32_t initial[kClusters];  // rows of the first centroids; places of the clusters
  std::uint64_t ready[kSlots], free[kSlots];
  int poisoned;  // a row of cluster 0 is not finite
};

// The same value, but of unknown origin: what depends on it is no constant of the loops around, for
// which there are no registers. Local memory is far away here, with so little L1 left.
template <class Value>
__device__ __forceinline__ Value afresh(Value value) {
  if constexpr (sizeof(Value) == 8)
    asm volatile("" : "+l"(value));
  else
    asm volatile("" : "+r"(value));
  return value;
}

// A value that all lanes share, in a uniform register.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(~0u, value, 0); }
__device__ __forceinline__ ItemSpan uniform(const ItemSpan& span) {
  return {uniform(span.batch), uniform(span.begin), uniform(span.length)};
}

// a / b in a few instructions, exact where the quotient is a float; `inverse` is 1 / b, rounded.
__device__ __forceinline__ float divide(float a, float b, float inverse) {
  const float quotient = a * inverse;
  return fmaf(fmaf(-quotient, b, a), inverse, quotient);
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

  __device__ static int own_lane() { return static_cast<int>(afresh(threadIdx.x) % 32); }
  __device__ int place(int round) const { return static_cast<unsigned>(done + round) % kSlots; }
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
    for (int i = afresh(static_cast<int>(threadIdx.x)); i < (end - begin) * (kWidth / 4);
         i += kThreads)
      if (i % (kWidth / 4) * 4 < args.width) visit(begin + i / (kWidth / 4), i % (kWidth / 4) * 4);
  }

  // Means of the block's share of the clusters to `to`; those without rows become zeros, or stay
  // as they are where `keep`.
  __device__ void write_means(float* to, bool keep) const {
    const float* from = afresh(args.sums) + part(0) * kWidth;
    const std::int32_t* sizes = afresh(args.counts) + part(0);
    for_share([&](int cluster, int column) {
      float4 sums[kMostParts];
      int counts[kMostParts];
#pragma unroll
      for (int rank = 0; rank < kMostParts; ++rank) {  // all loads are on their way together
        const int row = min(rank, team.size - 1) * kClusters + cluster;
        sums[rank] = __ldcg(reinterpret_cast<const float4*>(from + row * kWidth + column));
        counts[rank] = __ldcg(sizes + row);
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
      const float size = static_cast<float>(max(members, 1)), inverse = __frcp_rn(size);
      *reinterpret_cast<float4*>(to + (first_centroid() + cluster) * args.width + column) =
          make_float4(divide(sum.x, size, inverse), divide(sum.y, size, inverse),
                      divide(sum.z, size, inverse), divide(sum.w, size, inverse));
    });
  }

  // The sort: offsets of the clusters, then every row to its place. Many rows are put in order in
  // shared memory first, where neighbours are cheap.
  __device__ void write_order() const {
    const int clusters = args.shape.clusters, c = afresh(static_cast<int>(threadIdx.x));
    const std::int32_t* sizes = afresh(args.counts) + part(0);
    int total = 0, before = 0, own = 0, carry = 0, own_carry = 0;
    if (c < clusters)
#pragma unroll
      for (int rank = 0; rank < kMostParts; ++rank) {
        const int members = rank < team.size ? __ldcg(sizes + rank * kClusters + c) : 0;
        before += rank < team.rank ? members : 0;
        own += rank == team.rank ? members : 0;
        total += members;
      }
    const int start = block_exclusive_scan(total, carry);
    const int count = range.end - range.begin;
    const bool staged = count > 8 * kThreads && count <= kSlots * kSlotBytes / 2;
    const int own_start = staged ? block_exclusive_scan(own, own_carry) : 0;
    if (c < clusters) memory.initial[c] = start + before;
    if (c <= clusters) memory.numbers[c] = own_start;
    if (c <= clusters && team.rank == 0)
      args.run.offsets[static_cast<std::int64_t>(problem) * (clusters + 1) + c] = start;
    __syncthreads();
    auto* sorted = reinterpret_cast<std::uint16_t*>(memory.ring);
    const std::int64_t first = args.shape.start(span, head);
    std::int32_t* order = args.run.order + first;
    constexpr int kBatch = 8;
#pragma unroll 1
    for (int begin = c; begin < count; begin += kBatch * kThreads) {
      int labels[kBatch], ranks[kBatch];  // all loads are on their way together
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const std::int64_t row = first + range.begin + min(begin + i * kThreads, count - 1);
        labels[i] = args.run.labels[row];
        ranks[i] = args.ranks[row];
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int row = begin + i * kThreads;
        if (row >= count) continue;
        if (staged)
          sorted[memory.numbers[labels[i]] + ranks[i]] = static_cast<std::uint16_t>(row);
        else
          order[memory.initial[labels[i]] + ranks[i]] = range.begin + row;
      }
    }
    if (!staged) return;
    __syncthreads();
    for (int cluster = warp * kOwn; cluster < min(warp * kOwn + kOwn, clusters); ++cluster) {
      const int from = memory.numbers[cluster], to = memory.initial[cluster];
      for (int i = own_lane(); i < memory.numbers[cluster + 1] - from; i += 32)
        order[to + i] = range.begin + sorted[from + i];
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
