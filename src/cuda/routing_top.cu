// SPDX-License-Identifier: MIT
// Routing's members: the rows with the largest scores of every centroid, ties by lower row, listed
// in ascending order. Candidates decide most lists of long bf16 sequences; of the others, and of
// all lists of other calls, teams of blocks score all rows.
#include "cuda/device/await.cuh"
#include "cuda/device/routing_chunk.cuh"
#include "cuda/launch.h"
#include "cuda/tuning.h"

namespace coterie::cuda {

namespace {

constexpr int kThreads = kChunkThreads;
constexpr int kRoom = 40 * 1024;                           // scores that a block keeps
constexpr int kPadding = 4;                                // of a list's scores, against conflicts
constexpr int kTeamRows = 4096;                            // of a block, where lists are few
constexpr std::int64_t kScratch = std::int64_t{32} << 20;  // scores in memory, of all blocks

// Lists [first, first + count) of the open ones of a problem of both sides.
template <class T, int kWidth>
__device__ void select_chunk(const TopArgs<T>& args, int problem, int first, int count, Team& team,
                             std::int32_t* bins, float* scores, ChunkShared& shared) {
  const OpenLists& open = args.open;
  const int clusters = args.sides[0].shape.clusters;
  const TopList<T> any(args, problem * clusters);
  const int mine = static_cast<int>(threadIdx.x);
  if (mine < count)
    shared.cluster[mine] =
        open.clusters ? open.clusters[static_cast<std::int64_t>(problem) * clusters + first + mine]
                      : first + mine;
  __syncthreads();
  bool done = false;
  for (int l = 0; l < count; ++l)
    done = TopList<T>(args, problem * clusters + shared.cluster[l]).write_ends();
  if (done) return;
  const RowRange range = team.share(any.span.length);
  const ChunkScores own{scores, open.room + kPadding, range.end - range.begin, count};
  score_chunk<T, kWidth>(args, any, shared.cluster, range, own);
  __syncthreads();
  find_cuts(team, own, any.wanted, bins, shared);
  write_members(
      team, own, range.begin,
      open.sums + static_cast<std::int64_t>(team.number) * team.size * kChunkLists * 2,
      [&](int l) {
        return any.members + static_cast<std::int64_t>(shared.cluster[l]) * any.side.width;
      },
      shared);
}

// A team per chunk of lists, as long as there are lists.
template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    select_top_kernel(const __grid_constant__ TopArgs<T> args) {
  await_previous();
  extern __shared__ float memory[];
  __shared__ ChunkShared shared;
  __shared__ int counts[kThreads];
  const OpenLists& open = args.open;
  if (open.clusters && *open.words.data == 0) return;
  Team team(open.teams);
  std::int32_t* bins = open.bins + static_cast<std::int64_t>(team.number) * 2 * kTeamBins;
  const auto clear = [&](int turn) {
    if (team.rank != 0 || team.size == 1) return;
    for (int i = threadIdx.x; i < kTeamBins; i += kThreads) bins[turn * kTeamBins + i] = 0;
  };
  clear(0);
  float* scores =
      open.scratch ? open.scratch + static_cast<std::int64_t>(blockIdx.x) * (open.room + kPadding)
                   : memory;
  const int problems = args.sides[0].shape.problems() + args.sides[1].shape.problems();
  int turn = 0, number = 0;
  for (int base = 0; base < problems; base += kThreads) {
    __syncthreads();
    if (base + static_cast<int>(threadIdx.x) < problems)
      counts[threadIdx.x] = open.clusters
                                ? static_cast<int>(open.words.data[1 + base + threadIdx.x])
                                : args.sides[0].shape.clusters;
    __syncthreads();
    for (int p = 0; p < min(kThreads, problems - base); ++p)
      for (int first = 0; first < counts[p]; first += open.at_once, ++number) {
        if (number % open.teams.count != team.number) continue;
        team.sync();  // nobody is at the chunk before the last any more, and bins are zero
        clear(turn ^ 1);
        select_chunk<T, kWidth>(args, base + p, first, min(open.at_once, counts[p] - first), team,
                                bins + turn * kTeamBins, scores, shared);
        turn ^= 1;
      }
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

// Teams and their memory. Open lists are few: many blocks share some.
OpenLists take_open(Arena& arena, bool chosen, int rows, int problems, int clusters) {
  OpenLists open{};
  const int blocks = multiprocessors(), lists = problems * clusters;
  open.teams = {lists, 1, nullptr};
  if (chosen) {
    const int size = min(max((rows + kTeamRows - 1) / kTeamRows, 1), min(blocks, 16));
    open.teams = {max(1, min(lists, blocks / size)), size, nullptr};
    open.words.count = 1 + problems + open.teams.count;
    open.words.data = arena.take<unsigned>(open.words.count);
    open.teams.arrivals = open.words.data + 1 + problems;
    open.clusters = arena.take<std::int32_t>(lists);
    open.bins =
        arena.take<std::int32_t>(static_cast<std::int64_t>(open.teams.count) * 2 * kTeamBins);
    open.sums =
        arena.take<std::int32_t>(2 * kChunkLists * static_cast<std::int64_t>(open.teams.blocks()));
  }
  open.room = ((rows + open.teams.size - 1) / open.teams.size + 63) / 64 * 64;
  const int most = chosen ? kChunkLists : min(max(lists / (2 * blocks), 1), kChunkLists);
  open.at_once = min(max(kRoom / (open.room + kPadding), 1), most);
  if (open.teams.size == 1)
    open.teams.count = problems * ((clusters + open.at_once - 1) / open.at_once);
  if (open.room + kPadding <= kRoom) return open;
  if (open.teams.size == 1)
    open.teams.count = static_cast<int>(
        min(max(kScratch / open.room, std::int64_t{1}), std::int64_t{min(lists, 2 * blocks)}));
  open.scratch =
      arena.take<float>(static_cast<std::int64_t>(open.teams.blocks()) * (open.room + kPadding));
  return open;
}

}  // namespace

bool select_top(const AttentionCall& call, const CentredCentroids& centroids,
                const TopSide& queries, const TopSide* keys, const TensorView& cleared,
                unsigned* arrivals, Arena& arena, cudaStream_t stream) {
  const auto run = [](const TopSide& side) -> CandidateRun {
    return {side.side, static_cast<int>(side.width), candidates_pay(side.side, side.width), {}};
  };
  CandidateRun q = run(queries), k = keys ? run(*keys) : CandidateRun{};
  const bool chosen = q.wanted || k.wanted, launches = !arena.counting();
  bool clears = false;
  const int rows = max(queries.side.shape.rows, keys ? keys->side.shape.rows : 0);
  dispatch_element(call.op, queries.side.rows.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const int problems = queries.side.shape.problems() + (keys ? keys->side.shape.problems() : 0);
    const OpenLists open = take_open(arena, chosen, rows, problems, queries.side.shape.clusters);
    // Candidates bring the statistics of their rows along.
    if (launches && (!q.wanted || (keys && !k.wanted)))
      row_statistics(call, queries.side, keys ? &keys->side : nullptr, stream);
    if (chosen)
      clears = find_candidates(call, centroids, q, k, open.words, cleared, arrivals, arena, stream);
    if (!launches || problems == 0 || rows == 0) return;
    TopArgs<T> args{};
    args.sides[0] = top_rows<T>(queries, q.lists);
    if (keys) args.sides[1] = top_rows<T>(*keys, k.lists);
    args.centroids = centroids;
    args.open = open;
    if constexpr (std::is_same_v<T, Bf16>)
      if (chosen) choose_candidates(call, args, stream);
    const std::size_t bytes = open.scratch ? 0
                                           : static_cast<std::size_t>(open.at_once) *
                                                 (open.room + kPadding) * sizeof(float);
    dispatch_head_dim(call.op, call.Dk, [&](auto dim) {
      const auto kernel = select_top_kernel<T, decltype(dim)::value>;
      const int blocks = open.teams.blocks();
      if (open.teams.size > 1)
        launch_cooperative_early(kernel, blocks, kThreads, bytes, stream, args);
      else
        launch_early("select_top", kernel, dim3(static_cast<unsigned>(blocks)), kThreads, bytes,
                     stream, args);
    });
  });
  return clears;
}

}  // namespace coterie::cuda
