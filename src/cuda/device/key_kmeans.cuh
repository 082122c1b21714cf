// SPDX-License-Identifier: MIT
// The steps by centroids of the one-kernel k-means (key_kmeans_sm90a.cu), which a team's blocks
// share: means of the blocks' sums, and places of the clusters' rows.
#pragma once

#include <cstdint>

#include "coterie/random.h"
#include "cuda/device/first_meeting.cuh"
#include "cuda/device/key_kmeans_memory.cuh"

namespace coterie::cuda {

namespace key_kmeans_detail {

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

  // The block's share of the centroids, from make_metric on.
  __device__ RowRange share() const { return memory.share; }
  __device__ RowRange find_share() const {
    const int clusters = args.shape.clusters, each = (clusters + team.size - 1) / team.size;
    return {min(team.rank * each, clusters), min((team.rank + 1) * each, clusters)};
  }
  // Calls visit(cluster, column) for these, four columns at a time.
  template <class Visit>
  __device__ __forceinline__ void for_share(const Visit& visit) const {
    const RowRange own = share();
#pragma unroll 1
    for (int i = afresh(static_cast<int>(threadIdx.x)); i < (own.end - own.begin) * (kWidth / 4);
         i += kThreads)
      visit(own.begin + i / (kWidth / 4), i % (kWidth / 4) * 4);
  }

  // Where shared memory has columns [column, column + 4) of row r of the centroids to be weighed,
  // in slots of the ring that the first two rounds leave free. Rows change banks.
  __device__ std::uint32_t staged(int r, int column) const {
    return slot(2 + r / 128) + r % 128 * (4 * kWidth) + (column ^ (r & 7) * 8) * 4;
  }

  // Means of the block's share of the clusters to `to`, and staged where `stage`. Those without
  // rows become zeros, or stay as they are where `stage`.
  __device__ void write_means(float* to, bool stage) const {
    const float* from = afresh(args.sums) + part(0) * kWidth;
    const std::int32_t* sizes = afresh(args.counts) + part(0);
    for_share([&](int cluster, int column) {
      const auto* first = reinterpret_cast<const float4*>(from + cluster * kWidth + column);
      float4 sums[kMostParts];
      int counts[kMostParts];
#pragma unroll
      for (int rank = 0; rank < kMostParts; ++rank) {  // all loads are on their way together
        const bool there = rank < team.size;
        sums[rank] = there ? __ldcg(first + rank * (kClusters * kWidth / 4)) : float4{};
        counts[rank] = there ? __ldcg(sizes + cluster + rank * kClusters) : 0;
      }
      float4 sum = sums[0];
      int members = counts[0];
#pragma unroll
      for (int rank = 1; rank < kMostParts; ++rank) {  // zeros change nothing
        sum.x += sums[rank].x;
        sum.y += sums[rank].y;
        sum.z += sums[rank].z;
        sum.w += sums[rank].w;
        members += counts[rank];
      }
      const float size = static_cast<float>(max(members, 1)), inverse = __frcp_rn(size);
      float4 mean = make_float4(divide(sum.x, size, inverse), divide(sum.y, size, inverse),
                                divide(sum.z, size, inverse), divide(sum.w, size, inverse));
      const bool inside = column < args.width;
      auto* kept =
          reinterpret_cast<float4*>(to + (first_centroid() + cluster) * args.width + column);
      if (members == 0 && stage && inside)
        mean = __ldcg(kept);
      else if (inside)
        *kept = mean;
      if (stage)
        store_shared16(staged(cluster - share().begin, column),
                       make_uint4(__float_as_uint(mean.x), __float_as_uint(mean.y),
                                  __float_as_uint(mean.z), __float_as_uint(mean.w)));
    });
  }

  // Labels and ranks of rows of the block, from a row on.
  static constexpr int kBatch = 4;
  struct Places {
    int labels[kBatch], ranks[kBatch];
  };
  __device__ __forceinline__ Places load_places(int begin) const {
    const std::int64_t first = args.shape.start(span, head);
    Places places;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {  // all loads are on their way together
      const std::int64_t row =
          first + min(range.begin + begin + i * kThreads, max(range.end, 1) - 1);
      places.labels[i] = args.run.labels[row];
      places.ranks[i] = args.ranks[row];
    }
    return places;
  }

  // Rows of cluster `threadIdx.x`: of all blocks, of those before this one, of this one.
  struct Members {
    int total, before, own;
  };
  __device__ __forceinline__ Members load_members() const {
    const int c = afresh(static_cast<int>(threadIdx.x));
    const std::int32_t* sizes = afresh(args.counts) + part(0);
    Members members{0, 0, 0};
    if (c < args.shape.clusters)
#pragma unroll
      for (int rank = 0; rank < kMostParts; ++rank) {
        const int count = rank < team.size ? __ldcg(sizes + rank * kClusters + c) : 0;
        members.before += rank < team.rank ? count : 0;
        members.own += rank == team.rank ? count : 0;
        members.total += count;
      }
    return members;
  }

  // Sums over the threads before this one.
  __device__ __forceinline__ int2 scan(int2 value) const {
    const int lane = own_lane();
    int2 sum = value;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int x = __shfl_up_sync(~0u, sum.x, step), y = __shfl_up_sync(~0u, sum.y, step);
      if (lane >= step) sum.x += x, sum.y += y;
    }
    if (lane == 31) memory.scan[warp] = sum;
    __syncthreads();
    const int2 other = memory.scan[lane % kWarps];
    return make_int2(sum.x - value.x + __reduce_add_sync(~0u, lane < warp ? other.x : 0),
                     sum.y - value.y + __reduce_add_sync(~0u, lane < warp ? other.y : 0));
  }

  // The sort: offsets of the clusters, then every row to its place. Many rows are put in order in
  // shared memory first, where neighbours are cheap. `places` are those of the first batch.
  __device__ void write_order(const Members& members, Places places) const {
    const int clusters = args.shape.clusters, c = afresh(static_cast<int>(threadIdx.x));
    const int count = range.end - range.begin;
    const bool staged = count > 8 * kThreads && count <= kSlots * kSlotBytes / 2;
    const int2 start = scan(make_int2(members.total, members.own));
    if (c <= clusters) {  // the last one ends the others
      memory.initial[c] = start.x + members.before;
      memory.numbers[c] = start.y;
      if (team.rank == 0)
        args.run.offsets[static_cast<std::int64_t>(problem) * (clusters + 1) + c] = start.x;
    }
    __syncthreads();
    auto* sorted = reinterpret_cast<std::uint16_t*>(memory.ring);
    std::int32_t* order = args.run.order + args.shape.start(span, head);
#pragma unroll 1
    for (int begin = c; begin < count;) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int row = begin + i * kThreads;
        if (row >= count) continue;
        if (staged)
          sorted[memory.numbers[places.labels[i]] + places.ranks[i]] =
              static_cast<std::uint16_t>(row);
        else
          order[memory.initial[places.labels[i]] + places.ranks[i]] = range.begin + row;
      }
      begin += kBatch * kThreads;
      if (begin < count) places = load_places(begin);
    }
    if (!staged) return;
    __syncthreads();
#pragma unroll 1
    for (int cluster = warp * kOwn; cluster < min(warp * kOwn + kOwn, clusters); ++cluster) {
      const int from = memory.numbers[cluster], to = memory.initial[cluster];
#pragma unroll 1
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
    __syncthreads();
    if (threadIdx.x == 0) memory.share = find_share();
    __syncthreads();
    for_share([&](int cluster, int column) {
      if (column >= args.width) return;
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
