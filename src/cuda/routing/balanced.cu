// SPDX-License-Identifier: MIT
// Balanced membership (docs/mechanisms.md: routing): pairs (row, cluster) are visited by descending
// score, ties by lower row, then lower cluster; a pair is accepted if its row and a place of its
// cluster are free.
//
// Computed by deferred acceptance: rows without a cluster apply to the best one that would take
// them, and clusters keep their best applicants. A full cluster takes only rows that beat its
// worst, and that bar only rises, so rounds need no other state. Both sides rank pairs by one
// strict order, so the stable matching is unique and is the one above.
//
// Grid and block: cooperative, one block of 512 threads per multiprocessor; a team of blocks takes
// an item and head. A warp scores four rows at a time in fp32, a lane per cluster; after every
// round the rows are sorted by cluster (cluster/group.cuh), and a warp takes a cluster. Shared
// memory: up to 96 KB for the sort. Preconditions: statistics of the rows are available.
#include "cuda/cluster/group.cuh"
#include "cuda/launch/dispatch.h"
#include "cuda/launch/launch.h"
#include "cuda/prim/candidates.cuh"
#include "cuda/prim/element.cuh"
#include "cuda/routing/stages.h"

namespace coterie::cuda {

namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kBatch = 4;  // rows that a warp scores at a time

template <class T>
struct BalancedArgs {
  ClusterShape shape;
  Teams teams;
  Tensor4<const T> x;
  const RowStatistics* stats;
  CentredCentroids centroids;
  std::int32_t *labels, *order;  // (B, heads, rows)
  float* scores;                 // (B, heads, rows): with the row's cluster
  std::int32_t* offsets;         // (problems, C + 1)
  CandidateKey* bars;            // (problems, C): keys must exceed it
  int* waiting;                  // (problems, 2): rows without a cluster, for alternating rounds
  std::int32_t* histograms;
  std::int32_t* members;  // (items, heads, C, width)
  int width, shared_words;
};

// One problem: an item and head.
template <class T>
struct BalancedProblem {
  const BalancedArgs<T>& args;
  Rows<const T> rows;
  const RowStatistics* stats;
  const float* columns;  // (pitch, C)
  std::int32_t *labels, *order, *offsets;
  float* scores;
  CandidateKey* bars;
  int* waiting;
  int length, capacity;

  // The rows of the batch, -1 for none, apply to the best clusters that would take them. `staged`
  // has space for kBatch rows.
  __device__ void apply(const int (&row)[kBatch], float4* staged) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int clusters = args.shape.clusters, pitch = args.centroids.pitch;
    const auto element = [&](int r, int d) {
      return r >= 0 && d < rows.width ? to_float(rows.row(r)[d]) : 0.0f;
    };
    __syncwarp();
    for (int d = lane; d < pitch; d += 32)
      staged[d] = make_float4(element(row[0], d), element(row[1], d), element(row[2], d),
                              element(row[3], d));
    __syncwarp();
    float best[kBatch];
    int label[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) best[i] = 0.0f, label[i] = -1;
    for (int c = lane; c < clusters; c += 32) {
      float sum[kBatch] = {};
#pragma unroll 8
      for (int d = 0; d < pitch; ++d) {
        const float centroid = columns[static_cast<std::int64_t>(d) * clusters + c];
        const float4 x = staged[d];
        sum[0] = fmaf(x.x, centroid, sum[0]);
        sum[1] = fmaf(x.y, centroid, sum[1]);
        sum[2] = fmaf(x.z, centroid, sum[2]);
        sum[3] = fmaf(x.w, centroid, sum[3]);
      }
      const CandidateKey bar = bars[c];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (row[i] < 0) continue;
        float score = sum[i] * stats[row[i]].inverse + 0.0f;
        if (isnan(score)) score = -INFINITY;
        if (candidate_key(score, row[i]) > bar && (label[i] < 0 || score > best[i]))
          best[i] = score, label[i] = c;
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
#pragma unroll
      for (int step = 16; step > 0; step /= 2) {
        const float score = __shfl_xor_sync(~0u, best[i], step);
        const int other = __shfl_xor_sync(~0u, label[i], step);
        const bool better = score > best[i] || (score == best[i] && other < label[i]);
        if (other >= 0 && (label[i] < 0 || better)) best[i] = score, label[i] = other;
      }
      if (lane == 0 && row[i] >= 0) {
        labels[row[i]] = label[i];
        scores[row[i]] = best[i];
      }
    }
  }

  // All rows of the range that have no cluster apply.
  __device__ void apply_all(const RowRange& range, float4* staged) {
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    for (int first = range.begin + 32 * warp; first < range.end; first += kThreads) {
      const int i = first + lane;
      unsigned left = __ballot_sync(~0u, i < range.end && labels[i] < 0);
      while (left) {
        int row[kBatch];
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
          row[j] = left ? first + __ffs(left) - 1 : -1;
          left &= left - 1;
        }
        apply(row, staged);
      }
    }
  }

  __device__ CandidateKey key(int slot) const {
    const int row = order[slot];
    return candidate_key(scores[row], row);
  }

  // A cluster keeps its best rows and raises its bar. Called by one warp.
  __device__ void accept(int cluster, int* rejected) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int begin = offsets[cluster], end = offsets[cluster + 1];
    if (end - begin < capacity) return;
    const auto for_each = [&](const auto& visit) {
      for (int slot = begin + lane; slot < end; slot += 32) visit(key(slot));
    };
    const bool crowded = end - begin > capacity;
    const CandidateKey least = crowded ? find_cut(for_each, capacity, capacity) : 0;
    CandidateKey smallest = 0;  // of the complements of those kept
    for_each([&](CandidateKey each) {
      if (each >= least) smallest = max(smallest, ~each);
    });
    const CandidateKey cut = ~warp_max(smallest);
    if (crowded) {
      int count = 0;
      for (int slot = begin + lane; slot < end; slot += 32)
        if (key(slot) < cut) labels[order[slot]] = -1, ++count;
      count = __reduce_add_sync(~0u, count);
      if (lane == 0) atomicAdd(rejected, count);
    }
    if (lane == 0) bars[cluster] = cut;
  }
};

template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    balanced_kernel(const __grid_constant__ BalancedArgs<T> args) {
  extern __shared__ float4 shared4[];
  auto* shared = reinterpret_cast<std::int32_t*>(shared4);
  const ClusterShape& shape = args.shape;
  const int clusters = shape.clusters, warp = static_cast<int>(threadIdx.x) / 32;
  float4* staged = shared4 + warp * args.centroids.pitch;
  Team team(args.teams);
  int turn = 0;
  for (int number = team.number; number < shape.problems(); number += args.teams.count) {
    const int item = number / shape.heads, head = number % shape.heads;
    const ItemSpan span = shape.q.span(item);
    const std::int64_t start = shape.start(span, head);
    BalancedProblem<T> problem{
        args,
        args.x.rows(span.batch, head, span.begin),
        args.stats + start,
        args.centroids.columns +
            static_cast<std::int64_t>(head / shape.group) * args.centroids.pitch * clusters,
        args.labels + start,
        args.order + start,
        args.offsets + static_cast<std::int64_t>(number) * (clusters + 1),
        args.scores + start,
        args.bars + static_cast<std::int64_t>(number) * clusters,
        args.waiting + 2 * number,
        span.length,
        (span.length + clusters - 1) / clusters};
    const RowRange range = team.share(span.length);
    const int all_warps = team.size * kWarps, own_warp = team.rank * kWarps + warp;
    for (int i = range.begin + threadIdx.x; i < range.end; i += kThreads) problem.labels[i] = -1;
    for (int c = team.rank * kThreads + threadIdx.x; c < clusters; c += team.size * kThreads)
      problem.bars[c] = 0;
    if (team.rank == 0 && threadIdx.x == 0) problem.waiting[0] = problem.waiting[1] = 0;
    team.sync();
    for (int round = 0, left = span.length; left > 0; ++round, turn ^= 1) {
      problem.apply_all(range, staged);
      team.sync();
      if (team.rank == 0 && threadIdx.x == 0) problem.waiting[(round + 1) % 2] = 0;
      group_rows(team, range,
                 {problem.labels, problem.order, problem.offsets,
                  histograms_of(args.histograms, args.teams, team, turn, clusters), clusters},
                 shared, args.shared_words);
      team.sync();
      for (int c = own_warp; c < clusters; c += all_warps)
        problem.accept(c, problem.waiting + round % 2);
      team.sync();
      left = *static_cast<volatile int*>(problem.waiting + round % 2);
    }
    std::int32_t* members =
        args.members + static_cast<std::int64_t>(number) * clusters * args.width;
    for (int i = team.rank * kThreads + threadIdx.x; i < clusters * args.width;
         i += team.size * kThreads) {
      const int c = i / args.width, rank = i % args.width;
      const int begin = span.length > 0 ? problem.offsets[c] : 0;
      const int end = span.length > 0 ? problem.offsets[c + 1] : 0;
      members[i] = begin + rank < end ? problem.order[begin + rank] : -1;
    }
  }
}

}  // namespace

void select_balanced(const AttentionCall& call, const RoutingSide& side,
                     const CentredCentroids& centroids, Arena& arena, cudaStream_t stream) {
  const ClusterShape& shape = side.shape;
  dispatch_element(call.op, side.rows.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    BalancedArgs<T> args{};
    args.shape = shape;
    args.teams = make_teams(shape.problems(), shape.rows, multiprocessors(), nullptr);
    args.x = tensor4<const T>(side.rows);
    args.stats = side.stats;
    args.centroids = centroids;
    args.labels = arena.take<std::int32_t>(side.count());
    args.order = arena.take<std::int32_t>(side.count());
    args.scores = arena.take<float>(side.count());
    args.offsets = arena.take<std::int32_t>(static_cast<std::int64_t>(shape.problems()) *
                                            (shape.clusters + 1));
    args.bars =
        arena.take<CandidateKey>(static_cast<std::int64_t>(shape.problems()) * shape.clusters);
    args.waiting = arena.take<int>(2 * static_cast<std::int64_t>(shape.problems()));
    args.histograms = arena.take<std::int32_t>(2 * static_cast<std::int64_t>(args.teams.blocks()) *
                                               shape.clusters);
    args.teams.arrivals = arena.take<unsigned>(args.teams.count);
    if (arena.counting() || shape.problems() * side.width == 0) return;
    args.members = side.members;
    args.width = side.width;
    COTERIE_CUDA(cudaMemsetAsync(args.teams.arrivals, 0,
                                 static_cast<std::size_t>(args.teams.count) * sizeof(unsigned),
                                 stream));
    const std::size_t bytes =
        max(group_shared_bytes(shape.clusters, kWarps),
            sizeof(float4) * static_cast<std::size_t>(kWarps * centroids.pitch));
    args.shared_words = static_cast<int>(bytes / sizeof(std::int32_t));
    launch_cooperative(balanced_kernel<T>, args.teams.blocks(), kThreads, bytes, stream, args);
  });
}

}  // namespace coterie::cuda
