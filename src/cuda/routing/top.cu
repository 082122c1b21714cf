// SPDX-License-Identifier: MIT
// Routing's members: the `width` rows with the largest scores x . m / sigma of every centroid, ties
// by lower row, listed in ascending order.
//
// Candidates decide most lists of long bf16 sequences (candidates_sm90a.cu, choose.cu). For the
// others, and for all lists of other calls, select_top scores all rows: a team of blocks of 512
// threads takes up to 8 lists of a head at a time, keeps the scores, finds the cut (the smallest
// score of a member) two bits at a time, and writes the rows above it and as many of those on it as
// needed. Teams of several blocks share undecided lists, which are few; else a team is one block.
// Shared memory: scores of the block's rows, up to 160 KB or what the device has; beyond that
// scores are in global memory. Preconditions: none.
#include "cuda/launch/dispatch.h"
#include "cuda/launch/launch.h"
#include "cuda/prim/dependent.cuh"
#include "cuda/prim/warp.cuh"
#include "cuda/routing/top.cuh"

namespace coterie::cuda {

namespace {

constexpr int kChunkThreads = 512, kChunkWarps = kChunkThreads / 32;
constexpr int kChunkLists = 8;                           // at a time
constexpr int kProbes = 3;                               // per step, which finds two bits of a cut
constexpr int kTeamCounts = 16 * kChunkLists * kProbes;  // of a team, per chunk

// Rows above the cut, and on it.
struct CutCount {
  int above, equal;
};

struct ChunkShared {
  int cluster[kChunkLists];
  int counts[kChunkLists][kProbes];  // keys that are not below a probe
  std::uint32_t cut[kChunkLists];  // the bits known so far; in the end the smallest key of a member
  int above[kChunkLists];          // keys above those that begin with these bits
  CutCount warps[kChunkLists][kChunkWarps];
};

// The scores of a block's rows, one list after the other.
struct ChunkScores {
  float* scores;
  int pitch, length, lists;

  __device__ float* list(int number) const { return scores + number * pitch; }
};

// Sums over the lanes of a row, of all lists at once: lane l gets that of list
// (l & 1) * 4 + (l & 2) + (l >> 2 & 1). The same bits as Lanes::sum.
template <class Lanes>
__device__ __forceinline__ float sum_lists(const float (&part)[kChunkLists]) {
  static_assert(Lanes::kLanes >= kChunkLists && kChunkLists == 8);
  const int lane = static_cast<int>(threadIdx.x);
  float four[4], two[2];
  const auto add = [&](float low, float high, int bit) {
    const bool upper = lane & bit;
    return (upper ? high : low) + __shfl_xor_sync(~0u, upper ? low : high, bit);
  };
#pragma unroll
  for (int i = 0; i < 4; ++i) four[i] = add(part[i], part[4 + i], 1);
#pragma unroll
  for (int i = 0; i < 2; ++i) two[i] = add(four[i], four[2 + i], 2);
  float sum = add(two[0], two[1], 4);
#pragma unroll
  for (int step = 8; step < Lanes::kLanes; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
  return sum;
}

// Computes exact scores of the rows of the range. Called by all threads.
template <class T, int kWidth>
__device__ void score_chunk(const TopArgs<T>& args, const TopList<T>& any, const int* cluster,
                            const RowRange& range, const ChunkScores& to) {
  using Exact = ExactScores<T, kWidth>;
  using Lanes = typename Exact::Lanes;
  const Exact exact(any, args.centroids.pitch);
  const float* centroids = any.head_centroids(args);
  typename Lanes::Values centroid[kChunkLists];
#pragma unroll
  for (int l = 0; l < kChunkLists; ++l)
    Lanes::load_floats(
        centroids + static_cast<std::int64_t>(l < to.lists ? cluster[l] : 0) * args.centroids.pitch,
        args.centroids.pitch, centroid[l]);
  const int lane = static_cast<int>(threadIdx.x) % Lanes::kLanes;
  const int own = (lane & 1) * 4 + (lane & 2) + (lane >> 2 & 1);
  exact.template for_rows<kChunkThreads, 4>(
      to.length, [&](int i) { return range.begin + i; },
      [&](int i, int row, const uint4& words, float inverse) {
        float part[kChunkLists];
#pragma unroll
        for (int l = 0; l < kChunkLists; ++l) part[l] = Exact::lane_product(words, centroid[l]);
        const float sum = sum_lists<Lanes>(part);
        if (row >= 0 && lane < kChunkLists && own < to.lists)
          to.list(own)[i] = plain_score(sum * inverse);
      });
}

// Finds the cuts of all lists for `wanted` rows each, two bits at a time. Called by all threads of
// the team, which sums counts in team_counts, initially zero.
__device__ inline void find_cuts(Team& team, const ChunkScores& scores, int wanted,
                                 std::int32_t* team_counts, ChunkShared& shared) {
  int* counts = shared.counts[0];
  const int own = static_cast<int>(threadIdx.x), count = scores.lists * kProbes;
  if (own < kChunkLists) shared.cut[own] = 0, shared.above[own] = 0;
  for (int shift = 30; shift >= 0; shift -= 2, team_counts += kChunkLists * kProbes) {
    if (own < count) counts[own] = 0;
    __syncthreads();
    for (int l = 0; l < scores.lists; ++l) {
      const std::uint32_t first = shared.cut[l] | 1u << shift;
      int reached[kProbes] = {};
      for (int i = own; i < scores.length; i += kChunkThreads) {
        const std::uint32_t key = ordered(scores.list(l)[i]);
#pragma unroll
        for (std::uint32_t p = 0; p < kProbes; ++p) reached[p] += key >= first + (p << shift);
      }
#pragma unroll
      for (int p = 0; p < kProbes; ++p) {
        reached[p] = __reduce_add_sync(~0u, reached[p]);
        if (own % 32 == 0) atomicAdd(&shared.counts[l][p], reached[p]);
      }
    }
    __syncthreads();
    if (team.size > 1) {
      if (own < count) atomicAdd(team_counts + own, counts[own]);
      team.sync();
      if (own < count) counts[own] = __ldcg(team_counts + own);
      __syncthreads();
    }
    if (own < scores.lists) {
      int digit = 0;
      while (digit < kProbes && shared.counts[own][digit] >= wanted) ++digit;
      if (digit < kProbes) shared.above[own] = shared.counts[own][digit];
      shared.cut[own] |= static_cast<std::uint32_t>(digit) << shift;
    }
    __syncthreads();
  }
}

// Turns the warps' counts into counts of all earlier rows, over the warps and the team's blocks.
__device__ inline void sum_counts(Team& team, int lists, std::int32_t* sums, ChunkShared& shared) {
  const int l = static_cast<int>(threadIdx.x) / kChunkWarps;
  const int warp = static_cast<int>(threadIdx.x) % kChunkWarps;
  CutCount before{0, 0}, total{0, 0};
  __syncthreads();
  if (l < lists)
    for (int w = 0; w < kChunkWarps; ++w) {
      if (w == warp) before = total;
      total.above += shared.warps[l][w].above;
      total.equal += shared.warps[l][w].equal;
    }
  if (team.size > 1) {
    std::int32_t* own = sums + (team.rank * kChunkLists + l) * 2;
    if (l < lists && warp == 0) own[0] = total.above, own[1] = total.equal;
    team.sync();
    if (l < lists)
      for (int rank = 0; rank < team.rank; ++rank) {
        before.above += __ldcg(sums + (rank * kChunkLists + l) * 2);
        before.equal += __ldcg(sums + (rank * kChunkLists + l) * 2 + 1);
      }
  }
  __syncthreads();
  if (l < lists) shared.warps[l][warp] = before;
  __syncthreads();
}

// Writes the members among a warp's rows [first, end), given the counts `before` them; `ties` rows
// on the cut are members. Row 0 of the block is row `origin` of the list.
__device__ inline void write_rows(const float* scores, int first, int end, std::uint32_t cut,
                                  CutCount before, int ties, int origin, std::int32_t* members) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const unsigned below = (1u << lane) - 1;
  for (int base = first; base < end; base += 32) {
    const std::uint32_t key = base + lane < end ? ordered(scores[base + lane]) : 0u;
    const unsigned above = __ballot_sync(~0u, base + lane < end && key > cut);
    const unsigned equal = __ballot_sync(~0u, base + lane < end && key == cut);
    const int level = before.equal + __popc(equal & below);
    const bool in = (above >> lane & 1) || ((equal >> lane & 1) && level < ties);
    if (in) members[before.above + __popc(above & below) + min(level, ties)] = origin + base + lane;
    before.above += __popc(above);
    before.equal += __popc(equal);
  }
}

// Writes the members of the chunk's lists from their scores; members of list l are at member_of(l).
template <class MemberOf>
__device__ void write_members(Team& team, const ChunkScores& scores, int wanted, int origin,
                              std::int32_t* sums, const MemberOf& member_of, ChunkShared& shared) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int each = ((scores.length + kChunkWarps - 1) / kChunkWarps + 31) / 32 * 32;
  const int first = min(warp * each, scores.length), end = min(first + each, scores.length);
  for (int l = 0; l < scores.lists; ++l) {
    CutCount mine{0, 0};
    for (int i = first + lane; i < end; i += 32) {
      const std::uint32_t key = ordered(scores.list(l)[i]);
      mine.above += key > shared.cut[l];
      mine.equal += key == shared.cut[l];
    }
    mine = {__reduce_add_sync(~0u, mine.above), __reduce_add_sync(~0u, mine.equal)};
    if (lane == 0) shared.warps[l][warp] = mine;
  }
  sum_counts(team, scores.lists, sums, shared);
  for (int l = 0; l < scores.lists; ++l)
    write_rows(scores.list(l), first, end, shared.cut[l], shared.warps[l][warp],
               wanted - shared.above[l], origin, member_of(l));
}

constexpr int kPadding = 4;                                // of a list, against bank conflicts
constexpr int kTeamRows = 4096;                            // per block, if lists are few
constexpr std::int64_t kScratch = std::int64_t{32} << 20;  // scores in global memory, of all blocks

// Lists [first, first + count) of the undecided ones of a problem of both sides.
template <class T, int kWidth>
__device__ void select_chunk(const TopArgs<T>& args, int problem, int first, int count, Team& team,
                             std::int32_t* counts, float* scores, ChunkShared& shared) {
  const UndecidedLists& undecided = args.undecided;
  const int clusters = args.sides[0].shape.clusters;
  const TopList<T> any(args, problem * clusters);
  const int mine = static_cast<int>(threadIdx.x);
  if (mine < count)
    shared.cluster[mine] =
        undecided.clusters
            ? undecided.clusters[static_cast<std::int64_t>(problem) * clusters + first + mine]
            : first + mine;
  __syncthreads();
  bool done = false;
  for (int l = 0; l < count; ++l)
    done = TopList<T>(args, problem * clusters + shared.cluster[l]).write_ends();
  if (done) return;
  const RowRange range = team.share(any.span.length);
  const ChunkScores own{scores, undecided.room + kPadding, range.end - range.begin, count};
  score_chunk<T, kWidth>(args, any, shared.cluster, range, own);
  __syncthreads();
  find_cuts(team, own, any.wanted, counts, shared);
  write_members(
      team, own, any.wanted, range.begin,
      undecided.sums + static_cast<std::int64_t>(team.number) * team.size * kChunkLists * 2,
      [&](int l) {
        return any.members + static_cast<std::int64_t>(shared.cluster[l]) * any.side.width;
      },
      shared);
}

// A team per chunk of lists, until all lists are done.
template <class T, int kWidth>
__global__ void __launch_bounds__(kChunkThreads)
    select_top_kernel(const __grid_constant__ TopArgs<T> args) {
  await_previous();
  extern __shared__ float memory[];
  __shared__ ChunkShared shared;
  const UndecidedLists& undecided = args.undecided;
  if (undecided.clusters && *undecided.words.data == 0) return;
  Team team(undecided.teams);
  std::int32_t* team_counts =
      undecided.counts + static_cast<std::int64_t>(team.number) * 2 * kTeamCounts;
  const auto clear = [&](int turn) {
    if (team.rank != 0 || team.size == 1) return;
    for (int i = threadIdx.x; i < kTeamCounts; i += kChunkThreads)
      team_counts[turn * kTeamCounts + i] = 0;
  };
  clear(0);
  float* scores = undecided.scratch ? undecided.scratch + static_cast<std::int64_t>(blockIdx.x) *
                                                              (undecided.room + kPadding)
                                    : memory;
  const int problems = args.sides[0].shape.problems() + args.sides[1].shape.problems();
  int turn = 0, number = 0;
  for (int p = 0; p < problems; ++p) {
    const int count = undecided.clusters ? static_cast<int>(undecided.words.data[1 + p])
                                         : args.sides[0].shape.clusters;
    for (int first = 0; first < count; first += undecided.at_once, ++number) {
      if (number % undecided.teams.count != team.number) continue;
      team.sync();  // no block still uses the chunk before the last, and counts are zero
      clear(turn ^ 1);
      select_chunk<T, kWidth>(args, p, first, min(undecided.at_once, count - first), team,
                              team_counts + turn * kTeamCounts, scores, shared);
      turn ^= 1;
    }
  }
}

// Scores that a block keeps in shared memory, at most.
int score_room() { return min(160 * 1024, shared_for_tables()) / static_cast<int>(sizeof(float)); }

// Teams and their memory. Undecided lists are few: many blocks share some.
UndecidedLists take_undecided(Arena& arena, bool chosen, int rows, int problems, int clusters) {
  UndecidedLists undecided{};
  const int blocks = multiprocessors(), lists = problems * clusters;
  undecided.teams = {lists, 1, nullptr};
  if (chosen) {
    const int size = min(max((rows + kTeamRows - 1) / kTeamRows, 1), min(blocks, 16));
    undecided.teams = {max(1, min(lists, blocks / size)), size, nullptr};
    undecided.words.count = 1 + problems + undecided.teams.count;
    undecided.words.data = arena.take<unsigned>(undecided.words.count);
    undecided.teams.arrivals = undecided.words.data + 1 + problems;
    undecided.clusters = arena.take<std::int32_t>(lists);
    undecided.counts = arena.take<std::int32_t>(static_cast<std::int64_t>(undecided.teams.count) *
                                                2 * kTeamCounts);
    undecided.sums = arena.take<std::int32_t>(2 * kChunkLists *
                                              static_cast<std::int64_t>(undecided.teams.blocks()));
  }
  undecided.room = ((rows + undecided.teams.size - 1) / undecided.teams.size + 63) / 64 * 64;
  const int most = chosen ? kChunkLists : min(max(lists / (2 * blocks), 1), kChunkLists);
  undecided.at_once = min(max(score_room() / (undecided.room + kPadding), 1), most);
  if (undecided.teams.size == 1)
    undecided.teams.count = problems * ((clusters + undecided.at_once - 1) / undecided.at_once);
  if (undecided.room + kPadding <= score_room()) return undecided;
  if (undecided.teams.size == 1)
    undecided.teams.count = static_cast<int>(
        min(max(kScratch / undecided.room, std::int64_t{1}), std::int64_t{min(lists, 2 * blocks)}));
  undecided.scratch = arena.take<float>(static_cast<std::int64_t>(undecided.teams.blocks()) *
                                        (undecided.room + kPadding));
  return undecided;
}

}  // namespace

void select_top(const AttentionCall& call, const CentredCentroids& centroids,
                const RoutingSide& queries, const RoutingSide* keys, unsigned* arrivals,
                Arena& arena, cudaStream_t stream) {
  CandidateRun q{queries, candidates_pay(queries), {}}, k;
  if (keys) k = {*keys, candidates_pay(*keys), {}};
  const bool chosen = q.wanted || k.wanted, launches = !arena.counting();
  const int rows = max(queries.shape.rows, k.side.shape.rows);
  dispatch_element(call.op, queries.rows.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const int problems = queries.shape.problems() + k.side.shape.problems();
    const UndecidedLists undecided =
        take_undecided(arena, chosen, rows, problems, queries.shape.clusters);
    // Candidates also compute the statistics of their rows.
    if (launches && (!q.wanted || (keys && !k.wanted))) row_statistics(call, queries, keys, stream);
    if (chosen) find_candidates(call, centroids, q, k, undecided.words, arrivals, arena, stream);
    if (!launches || problems == 0 || rows == 0) return;
    TopArgs<T> args{};
    args.sides[0] = top_rows<T>(q);
    if (keys) args.sides[1] = top_rows<T>(k);
    args.centroids = centroids;
    args.undecided = undecided;
    if constexpr (std::is_same_v<T, Bf16>)
      if (chosen) choose_candidates(call, args, stream);
    const std::size_t bytes = undecided.scratch ? 0
                                                : static_cast<std::size_t>(undecided.at_once) *
                                                      (undecided.room + kPadding) * sizeof(float);
    dispatch_head_dim(call.op, call.Dk, [&](auto dim) {
      const auto kernel = select_top_kernel<T, decltype(dim)::value>;
      const int blocks = undecided.teams.blocks();
      if (undecided.teams.size > 1)
        launch_cooperative_early(kernel, blocks, kChunkThreads, bytes, stream, args);
      else
        launch_early("select_top", kernel, dim3(static_cast<unsigned>(blocks)), kChunkThreads,
                     bytes, stream, args);
    });
  });
}

}  // namespace coterie::cuda
