// SPDX-License-Identifier: MIT
// Routing's members: the rows with the largest scores of every centroid, ties by lower row, listed
// in ascending order. Candidates decide most lists of long bf16 sequences; the others, and all
// lists of other calls, take a block each that scores all rows.
#include <algorithm>

#include "cuda/device/await.cuh"
#include "cuda/device/routing_top.cuh"
#include "cuda/launch.h"
#include "cuda/tuning.h"

namespace coterie::cuda {

namespace {

constexpr int kThreads = 512;
constexpr int kBins = 256, kBits = 8, kDigits = 32 / kBits;  // of the radix selection
constexpr int kRoom = 24 * 1024;                             // scores that a block keeps
constexpr int kTeamRows = 4096;                              // of a block, where lists are few
constexpr std::int64_t kScratch = std::int64_t{32} << 20;    // scores in memory, of all blocks

// The scores of a block's rows of a list.
struct ScoreList {
  const float* scores;  // in shared memory, or not
  int length;

  // visit(i, key), key 0 beyond the last row: rows ascend with the threads and from call to call.
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

// Adds up a histogram over the blocks of a team.
__device__ void add_bins(Team& team, int* bins, std::int32_t* shared_bins) {
  if (team.size == 1) return;
  for (int i = threadIdx.x; i < kBins; i += kThreads)
    if (bins[i]) atomicAdd(shared_bins + i, bins[i]);
  team.sync();
  for (int i = threadIdx.x; i < kBins; i += kThreads) bins[i] = __ldcg(shared_bins + i);
  __syncthreads();
}

// The key of the `rank`-th largest; `rank` becomes the number of rows with that key to take.
__device__ std::uint32_t find_key(Team& team, const ScoreList& scores, std::int32_t* team_bins,
                                  int& rank) {
  __shared__ int bins[kBins];
  __shared__ int found[2];
  std::uint32_t prefix = 0, mask = 0;
  for (int shift = 32 - kBits; shift >= 0; shift -= kBits, team_bins += kBins) {
    for (int i = threadIdx.x; i < kBins; i += kThreads) bins[i] = 0;
    __syncthreads();
    scores.for_each([&](int i, std::uint32_t key) {
      if (i < scores.length && (key & mask) == prefix)
        atomicAdd(&bins[key >> shift & (kBins - 1)], 1);
    });
    __syncthreads();
    add_bins(team, bins, team_bins);
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

// Rows above the cut, and on it.
struct CutCount {
  int above, equal;
};

// Of a warp's rows [first, end) of the list.
__device__ __forceinline__ CutCount count_rows(const ScoreList& scores, int first, int end,
                                               std::uint32_t cut) {
  CutCount mine{0, 0};
#pragma unroll 4
  for (int i = first + static_cast<int>(threadIdx.x) % 32; i < end; i += 32) {
    const std::uint32_t key = ordered(scores.scores[i]);
    mine.above += key > cut;
    mine.equal += key == cut;
  }
  return {__reduce_add_sync(~0u, mine.above), __reduce_add_sync(~0u, mine.equal)};
}

// Turns a warp's counts into those of all rows before its own, over the warps and the team's
// blocks.
__device__ CutCount count_before(Team& team, const CutCount& mine, std::int32_t* sums) {
  constexpr int kWarps = kThreads / 32;
  __shared__ CutCount warps[kWarps];
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (threadIdx.x % 32 == 0) warps[warp] = mine;
  __syncthreads();
  CutCount before{0, 0}, total{0, 0};
  for (int w = 0; w < kWarps; ++w) {
    if (w == warp) before = total;
    total.above += warps[w].above;
    total.equal += warps[w].equal;
  }
  if (team.size == 1) return before;
  if (threadIdx.x == 0) sums[2 * team.rank] = total.above, sums[2 * team.rank + 1] = total.equal;
  team.sync();
  for (int rank = 0; rank < team.rank; ++rank) {
    before.above += __ldcg(sums + 2 * rank);
    before.equal += __ldcg(sums + 2 * rank + 1);
  }
  return before;
}

// The members among a warp's rows [first, end), of which `before` says how many are ahead of them;
// `ties` rows on the cut are members. Row 0 of the block is row `origin` of the list.
__device__ void write_rows(const ScoreList& scores, int first, int end, std::uint32_t cut,
                           CutCount before, int ties, int origin, std::int32_t* members) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const unsigned below = (1u << lane) - 1;
  for (int base = first; base < end; base += 32) {
    const std::uint32_t key = base + lane < end ? ordered(scores.scores[base + lane]) : 0u;
    const unsigned above = __ballot_sync(~0u, base + lane < end && key > cut);
    const unsigned equal = __ballot_sync(~0u, base + lane < end && key == cut);
    const int level = before.equal + __popc(equal & below);
    const bool in = (above >> lane & 1) || ((equal >> lane & 1) && level < ties);
    if (in) members[before.above + __popc(above & below) + min(level, ties)] = origin + base + lane;
    before.above += __popc(above);
    before.equal += __popc(equal);
  }
}

template <class T, int kWidth>
__device__ void select_exactly(const TopArgs<T>& args, const TopList<T>& list, Team& team,
                               std::int32_t* bins, float* scores) {
  const ExactScores<T, kWidth> exact(list, args.centroids.pitch);
  const RowRange range = team.share(list.span.length);
  exact.template compute<kThreads>(
      range.end - range.begin, [&](int i) { return range.begin + i; },
      [&](int i, int, float score) { scores[i] = score; });
  __syncthreads();
  const ScoreList own{scores, range.end - range.begin};
  int ties = list.wanted;
  const std::uint32_t cut = find_key(team, own, bins, ties);
  constexpr int kWarps = kThreads / 32;
  const int each = ((own.length + kWarps - 1) / kWarps + 31) / 32 * 32;
  const int first = min(static_cast<int>(threadIdx.x) / 32 * each, own.length);
  const int end = min(first + each, own.length);
  const CutCount before =
      count_before(team, count_rows(own, first, end, cut),
                   args.sums + static_cast<std::int64_t>(team.number) * team.size * 2);
  write_rows(own, first, end, cut, before, ties, range.begin, list.members);
}

// A team per list, as long as there are lists.
template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    select_top_kernel(const __grid_constant__ TopArgs<T> args) {
  await_previous();
  extern __shared__ float shared[];
  Team team(args.teams);
  const int lists = args.open ? *args.open_count : args.sides[0].lists + args.sides[1].lists;
  if (team.number >= lists) return;
  std::int32_t* bins = args.bins + static_cast<std::int64_t>(team.number) * 2 * kDigits * kBins;
  const auto clear = [&](int turn) {
    if (team.rank != 0 || team.size == 1) return;
    for (int i = threadIdx.x; i < kDigits * kBins; i += kThreads)
      bins[turn * kDigits * kBins + i] = 0;
  };
  clear(0);
  int turn = 0;
  for (int i = team.number; i < lists; i += args.teams.count) {
    const TopList<T> list(args, args.open ? args.open[i] : i);
    if (list.write_ends()) continue;
    team.sync();  // nobody is at the list before the last any more, and bins are zero
    clear(turn ^ 1);
    select_exactly<T, kWidth>(
        args, list, team, bins + turn * kDigits * kBins,
        args.scratch ? args.scratch + static_cast<std::int64_t>(blockIdx.x) * args.room : shared);
    turn ^= 1;
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

// Teams and their memory. Open lists are few: many blocks share one. Words to be zero.
template <class T>
ZeroedWords take_open(Arena& arena, bool chosen, int rows, int lists, TopArgs<T>& args) {
  ZeroedWords zeroed;
  const int blocks = multiprocessors();
  args.teams = {lists, 1, nullptr};
  if (chosen) {
    const int size = std::clamp((rows + kTeamRows - 1) / kTeamRows, 1, std::min(blocks, 16));
    args.teams = {std::max(1, std::min(lists, blocks / size)), size, nullptr};
    zeroed.count = 1 + args.teams.count;
    zeroed.data = arena.take<unsigned>(zeroed.count);
    args.open_count = reinterpret_cast<std::int32_t*>(zeroed.data);
    args.teams.arrivals = zeroed.data + 1;
    args.open = arena.take<std::int32_t>(lists);
    args.bins =
        arena.take<std::int32_t>(static_cast<std::int64_t>(args.teams.count) * 2 * kDigits * kBins);
    args.sums = arena.take<std::int32_t>(2 * static_cast<std::int64_t>(args.teams.blocks()));
  }
  args.room = ((rows + args.teams.size - 1) / args.teams.size + 63) / 64 * 64;
  if (args.room <= kRoom) return zeroed;
  if (args.teams.size == 1)
    args.teams.count = static_cast<int>(
        std::clamp<std::int64_t>(kScratch / args.room, 1, std::min(lists, 2 * blocks)));
  args.scratch = arena.take<float>(static_cast<std::int64_t>(args.teams.blocks()) * args.room);
  return zeroed;
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
    const ZeroedWords zeroed = take_open(arena, chosen, rows, lists, args);
    if (!queries.members.present() || lists == 0 || rows == 0) return;
    if constexpr (std::is_same_v<T, __nv_bfloat16>)
      if (chosen) {
        find_candidates(call, centroids, q, k, zeroed, stream);
        choose_candidates(call, args, stream);
      }
    const std::size_t bytes =
        args.scratch ? 0 : static_cast<std::size_t>(args.room) * sizeof(float);
    dispatch_wide_dim(call.op, call.Dk, [&](auto dim) {
      const auto kernel = select_top_kernel<T, decltype(dim)::value>;
      const int blocks = args.teams.blocks();
      if (args.teams.size > 1)
        launch_cooperative_early(kernel, blocks, kThreads, bytes, stream, args);
      else
        launch_early("select_top", kernel, dim3(static_cast<unsigned>(blocks)), kThreads, bytes,
                     stream, args);
    });
  });
}

}  // namespace coterie::cuda
