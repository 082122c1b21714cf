// SPDX-License-Identifier: MIT
// Routing's members: the rows with the largest scores of every centroid, ties by lower row, listed
// in ascending order. Candidates decide most lists of long bf16 sequences; of the others, and of
// all lists of other calls, teams of blocks score all rows.
#include "cuda/launch/dispatch.h"
#include "cuda/launch/launch.h"
#include "cuda/prim/dependent.cuh"
#include "cuda/prim/warp.cuh"
#include "cuda/routing/top.cuh"

namespace coterie::cuda {

namespace {

// The rows with the largest scores of several centroids of a head at a time: teams of blocks keep
// the scores of all rows, and find the smallest score that counts digit by digit.

constexpr int kChunkThreads = 512, kChunkWarps = kChunkThreads / 32;
constexpr int kChunkLists = 8;                               // at a time
constexpr int kBins = 256, kBits = 8, kDigits = 32 / kBits;  // of the radix selection
constexpr int kTeamBins = kDigits * kChunkLists * kBins;     // of a team, for a chunk

// Rows above the cut, and on it.
struct CutCount {
  int above, equal;
};

struct ChunkShared {
  int cluster[kChunkLists];
  int bins[kChunkLists][kBins];
  std::uint32_t cut[kChunkLists];  // the digits known so far; in the end the smallest key
  int rank[kChunkLists];           // of it among the keys with these digits; rows on it that count
  CutCount warps[kChunkLists][kChunkWarps];
};

// The scores of a block's rows, of one list behind the other.
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

// Exact scores of the rows of the range. By all threads.
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

// The digit in which the `rank`-th largest entry of a histogram falls; rank becomes that among the
// entries of the digit. By one warp.
__device__ __forceinline__ int find_digit(const int* bins, int& rank) {
  constexpr int kEach = kBins / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32, top = kBins - 1 - lane * kEach;
  int sum = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) sum += bins[top - i];
  const int before = warp_inclusive_scan(sum) - sum;  // entries in digits above this lane's
  const int owner = __ffs(__ballot_sync(~0u, before + sum >= rank)) - 1;
  int digit = 0, left = 0;
  if (lane == owner) {
    left = rank - before;
    for (digit = top; left > bins[digit]; --digit) left -= bins[digit];
  }
  rank = __shfl_sync(~0u, left, owner);
  return __shfl_sync(~0u, digit, owner);
}

// A histogram of the digit at `shift` of the keys that begin as the cut. Equal digits of a warp are
// counted by one lane: most digits of most scores are equal.
__device__ __forceinline__ void count_digits(const ChunkScores& scores, int number, int shift,
                                             std::uint32_t cut, int* bins) {
  const std::uint32_t mask = shift + kBits < 32 ? ~0u << (shift + kBits) : 0u;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int first = 0; first < scores.length; first += kChunkThreads) {
    const int i = first + static_cast<int>(threadIdx.x);
    const std::uint32_t key = i < scores.length ? ordered(scores.list(number)[i]) : 0u;
    const bool in = i < scores.length && (key & mask) == cut;
    const int digit = in ? static_cast<int>(key >> shift & (kBins - 1)) : kBins;
    const unsigned alike = __match_any_sync(~0u, digit);
    if (in && (alike & ((1u << lane) - 1)) == 0) atomicAdd(&bins[digit], __popc(alike));
  }
}

// The cuts of all lists for `wanted` rows each. By all threads of the team.
__device__ inline void find_cuts(Team& team, const ChunkScores& scores, int wanted,
                                 std::int32_t* team_bins, ChunkShared& shared) {
  int* bins = shared.bins[0];
  const int count = scores.lists * kBins, warp = static_cast<int>(threadIdx.x) / 32;
  if (threadIdx.x < kChunkLists) shared.cut[threadIdx.x] = 0, shared.rank[threadIdx.x] = wanted;
  for (int shift = 32 - kBits; shift >= 0; shift -= kBits, team_bins += kChunkLists * kBins) {
    for (int i = threadIdx.x; i < count; i += kChunkThreads) bins[i] = 0;
    __syncthreads();
    for (int l = 0; l < scores.lists; ++l)
      count_digits(scores, l, shift, shared.cut[l], shared.bins[l]);
    __syncthreads();
    if (team.size > 1) {
      for (int i = threadIdx.x; i < count; i += kChunkThreads)
        if (bins[i]) atomicAdd(team_bins + i, bins[i]);
      team.sync();
      for (int i = threadIdx.x; i < count; i += kChunkThreads) bins[i] = __ldcg(team_bins + i);
      __syncthreads();
    }
    if (warp < scores.lists) {
      int rank = shared.rank[warp];
      const int digit = find_digit(shared.bins[warp], rank);
      __syncwarp();
      if (threadIdx.x % 32 == 0) {
        shared.cut[warp] |= static_cast<std::uint32_t>(digit) << shift;
        shared.rank[warp] = rank;
      }
    }
    __syncthreads();
  }
}

// Turns the warps' counts into those of all rows before theirs, over the warps and the team's
// blocks.
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

// The members among a warp's rows [first, end), of which `before` says how many are ahead of them;
// `ties` rows on the cut are members. Row 0 of the block is row `origin` of the list.
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

// The members of the chunk's lists, whose scores are there; members of list l are at member_of(l).
template <class MemberOf>
__device__ void write_members(Team& team, const ChunkScores& scores, int origin, std::int32_t* sums,
                              const MemberOf& member_of, ChunkShared& shared) {
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
    write_rows(scores.list(l), first, end, shared.cut[l], shared.warps[l][warp], shared.rank[l],
               origin, member_of(l));
}

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
TopRows<T> top_rows(const CandidateRun& run) {
  const ClusterShape& shape = run.side.shape;
  return {shape,          tensor4<const T>(run.side.rows),   run.side.stats, run.side.members,
          run.side.width, shape.problems() * shape.clusters, run.lists};
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
    const OpenLists open = take_open(arena, chosen, rows, problems, queries.shape.clusters);
    // Candidates bring the statistics of their rows along.
    if (launches && (!q.wanted || (keys && !k.wanted))) row_statistics(call, queries, keys, stream);
    if (chosen) find_candidates(call, centroids, q, k, open.words, arrivals, arena, stream);
    if (!launches || problems == 0 || rows == 0) return;
    TopArgs<T> args{};
    args.sides[0] = top_rows<T>(q);
    if (keys) args.sides[1] = top_rows<T>(k);
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
}

}  // namespace coterie::cuda
