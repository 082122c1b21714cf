// SPDX-License-Identifier: MIT
// The rows with the largest scores of several centroids of a head at a time: teams of blocks keep
// the scores of all rows, and find the smallest score that counts digit by digit.
#pragma once

#include "cuda/device/routing_top.cuh"
#include "cuda/device/warp.cuh"

namespace coterie::cuda {

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

}  // namespace coterie::cuda
