// SPDX-License-Identifier: MIT
// Which queries see a range of keys, in the backward pass of lists (backward.h).
#pragma once

#include <cstdint>

#include "cuda/lists/problem.cuh"

namespace coterie::cuda {

// First of the ranks [0, count) for which `late` is true, which it then stays; count if none. By
// all lanes of a warp, or by a thread alone.
template <bool kAlone, class Late>
__device__ __forceinline__ int first_rank(int count, const Late& late) {
  constexpr int kProbes = kAlone ? 8 : 32;
  int begin = 0;  // the answer is in [begin, begin + left]
  for (int left = count; left > 0;) {
    const int step = (left + kProbes - 1) / kProbes;
    int reached = 0;
    if constexpr (kAlone) {
#pragma unroll
      for (int i = 0; i < kProbes; ++i)
        reached += i * step < left && !late(begin + min(i * step, left - 1));
    } else {
      const int place = static_cast<int>(threadIdx.x) % 32 * step;
      reached = __popc(__ballot_sync(~0u, place < left && !late(begin + place)));
    }
    if (reached == 0) break;
    const int end = min(begin + reached * step, begin + left);
    begin += (reached - 1) * step + 1;
    left = end - begin;
  }
  return begin;
}

// The query ranks that see any of the keys [first, end), and perhaps some that do not. By all lanes
// of a warp, or by a thread alone.
template <bool kAlone = false>
__device__ __forceinline__ RankRange queries_of(const ListProblem& problem, const ListPair& pair,
                                                int first, int end) {
  const std::int64_t count = pair.q.count, window = problem.window;
  std::int64_t low = 0, high = count + pair.shift;  // by r of ListRule
  switch (problem.rule) {
    case ListRule::all:
      return {0, pair.q.count};
    case ListRule::causal:
      low = first;
      break;
    case ListRule::sliding:
      low = problem.causal ? first : first - (window + 1) / 2 + 1;
      high = problem.causal ? end + window - 1 : end + window / 2;
      break;
    case ListRule::blocked:
      low = problem.causal ? first : (first / window - problem.after) * window;
      high = ((end - 1) / window + 1 + problem.before) * window;
      break;
    default: {
      int found[2];
#pragma unroll 1
      for (int side = 0; side < 2; ++side) {
        const int rank = first_rank<kAlone>(pair.q.count, [&](int r) {
          const RankRange range = problem.range(pair, r);
          return side ? range.low >= end : range.high > first;
        });
        (side ? found[1] : found[0]) = rank;
      }
      return {found[0], found[1]};
    }
  }
  low = min(max(low - pair.shift, std::int64_t{0}), count);
  high = min(max(high - pair.shift, low), count);
  return {static_cast<int>(low), static_cast<int>(high)};
}

}  // namespace coterie::cuda
