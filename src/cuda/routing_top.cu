// SPDX-License-Identifier: MIT
// Routing's members: the rows with the largest scores of every centroid, ties by lower row, listed
// in ascending order. Candidates decide most lists of long bf16 sequences; the others, and all
// lists of other calls, take a block each that scores all rows.
#include <algorithm>

#include "cuda/device/await.cuh"
#include "cuda/device/group.cuh"
#include "cuda/device/routing_top.cuh"
#include "cuda/launch.h"
#include "cuda/tuning.h"

namespace coterie::cuda {

namespace {

constexpr int kThreads = 512;
constexpr int kBins = 256, kBits = 8;                      // of a digit of the radix selection
constexpr int kRoom = 24 * 1024;                           // scores that a block keeps
constexpr std::int64_t kScratch = std::int64_t{16} << 20;  // scores in memory, of all blocks

// The scores of all rows of a list.
struct ScoreList {
  const float* scores;  // in shared memory, or not
  int length;

  // visit(row, key), key 0 beyond the last row: rows ascend with the threads and from call to call.
  template <class Visit>
  __device__ void for_each(const Visit& visit) const {
#pragma unroll 4
    for (int first = 0; first < length; first += kThreads) {
      const int i = first + static_cast<int>(threadIdx.x);
      visit(i, i < length ? ordered(scores[i]) : 0u);
    }
  }
};

// The digit in which the `rank`-th largest entry of a histogram falls; rank becomes that among the
// entries of the digit. By one warp.
__device__ __forceinline__ int find_digit(const int* bins, int& rank) {
  constexpr int kEach = kBins / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32, top = kBins - 1 - lane * kEach;
  int sum = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) sum += bins[top - i];
  int before = sum;  // entries in this lane's digits and above
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, before, step);
    if (lane >= step) before += other;
  }
  before -= sum;
  const int owner = __ffs(__ballot_sync(~0u, before + sum >= rank)) - 1;
  int digit = 0, left = 0;
  if (lane == owner) {
    left = rank - before;
    for (digit = top; left > bins[digit]; --digit) left -= bins[digit];
  }
  rank = __shfl_sync(~0u, left, owner);
  return __shfl_sync(~0u, digit, owner);
}

// The key of the `rank`-th largest; `rank` becomes the number of rows with that key to take.
__device__ std::uint32_t find_key(const ScoreList& scores, int& rank) {
  __shared__ int bins[kBins];
  __shared__ int found[2];
  std::uint32_t prefix = 0, mask = 0;
  for (int shift = 32 - kBits; shift >= 0; shift -= kBits) {
    for (int i = threadIdx.x; i < kBins; i += kThreads) bins[i] = 0;
    __syncthreads();
    scores.for_each([&](int row, std::uint32_t key) {
      if (row < scores.length && (key & mask) == prefix)
        atomicAdd(&bins[key >> shift & (kBins - 1)], 1);
    });
    __syncthreads();
    if (threadIdx.x < 32) {
      int left = rank;
      const int digit = find_digit(bins, left);
      if (threadIdx.x == 0) found[0] = digit, found[1] = left;
    }
    __syncthreads();
    prefix |= static_cast<std::uint32_t>(found[0]) << shift;
    mask |= static_cast<std::uint32_t>(kBins - 1) << shift;
    rank = found[1];
    __syncthreads();
  }
  return prefix;
}

template <class T, int kWidth>
__device__ void select_exactly(const TopArgs<T>& args, const TopList<T>& list, float* scores) {
  const ExactScores<T, kWidth> exact(list, args.centroids.pitch);
  exact.template compute<kThreads>(
      list.span.length, [](int i) { return i; },
      [&](int i, int, float score) { scores[i] = score; });
  __syncthreads();
  const ScoreList all{scores, list.span.length};
  int ties = list.wanted;
  const std::uint32_t cut = find_key(all, ties);
  int above = 0, equal = 0;  // rows before this chunk
  all.for_each([&](int row, std::uint32_t key) {
    const bool there = row < list.span.length;
    const int better = block_exclusive_scan(there && key > cut, above);
    const int level = block_exclusive_scan(there && key == cut, equal);
    if (there && (key > cut || (key == cut && level < ties)))
      list.members[better + min(level, ties)] = row;
  });
}

// A block per list, as long as there are lists.
template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    select_top_kernel(const __grid_constant__ TopArgs<T> args) {
  await_previous();
  extern __shared__ float shared[];
  const int lists = args.open ? *args.open_count : args.sides[0].lists + args.sides[1].lists;
  for (int i = static_cast<int>(blockIdx.x); i < lists; i += static_cast<int>(gridDim.x)) {
    const TopList<T> list(args, args.open ? args.open[i] : i);
    if (list.write_ends()) continue;
    __syncthreads();
    select_exactly<T, kWidth>(
        args, list,
        args.room ? shared
                  : args.scratch +
                        static_cast<std::int64_t>(blockIdx.x) *
                            std::int64_t{max(args.sides[0].shape.rows, args.sides[1].shape.rows)});
    __syncthreads();
  }
}

template <class T>
TopRows<T> top_rows(const TopSide& top, const CandidateLists& candidates) {
  const ClusterShape& shape = top.side.shape;
  return {shape,
          tensor4<const T>(top.side.rows),
          top.side.stats,
          static_cast<std::int32_t*>(top.members.data),
          static_cast<int>(top.width),
          shape.problems() * shape.clusters,
          candidates};
}

}  // namespace

void select_top(const AttentionCall& call, const CentredCentroids& centroids,
                const TopSide& queries, const TopSide* keys, Arena& arena, cudaStream_t stream) {
  const CandidateRun q{queries.side, static_cast<int>(queries.width),
                       CandidateLists(arena, queries.side, queries.width)};
  CandidateRun k{};
  if (keys)
    k = {keys->side, static_cast<int>(keys->width), CandidateLists(arena, keys->side, keys->width)};
  const bool chosen = q.lists.capacity || k.lists.capacity;
  const int rows = std::max(queries.side.shape.rows, keys ? keys->side.shape.rows : 0);
  dispatch_element(call.op, queries.side.rows.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    TopArgs<T> args{};
    args.sides[0] = top_rows<T>(queries, q.lists);
    if (keys) args.sides[1] = top_rows<T>(*keys, k.lists);
    args.centroids = centroids;
    const int lists = args.sides[0].lists + args.sides[1].lists;
    int blocks = lists;
    if (chosen) {
      args.open_count = arena.take<std::int32_t>(1);
      args.open = arena.take<std::int32_t>(lists);
      blocks = std::min(blocks, 2 * multiprocessors());
    }
    args.room = rows <= kRoom ? rows : 0;
    if (!args.room) {
      blocks = static_cast<int>(
          std::clamp<std::int64_t>(kScratch / rows, 1, std::min(blocks, 2 * multiprocessors())));
      args.scratch = arena.take<float>(static_cast<std::int64_t>(blocks) * rows);
    }
    if (!queries.members.present() || lists == 0 || rows == 0) return;
    if constexpr (std::is_same_v<T, __nv_bfloat16>)
      if (chosen) {
        find_candidates(call, centroids, q, k, args.open_count, stream);
        choose_candidates(call, args, stream);
      }
    dispatch_wide_dim(call.op, call.Dk, [&](auto dim) {
      launch_early("select_top", select_top_kernel<T, decltype(dim)::value>,
                   dim3(static_cast<unsigned>(blocks)), kThreads,
                   static_cast<std::size_t>(args.room) * sizeof(float), stream, args);
    });
  });
}

}  // namespace coterie::cuda
