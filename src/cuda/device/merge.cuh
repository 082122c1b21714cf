// SPDX-License-Identifier: MIT
// Last step of the selection of top keys: from the lists of candidates of a row to its top keys, by
// a warp (attend_centroid_select.cu).
//
// Candidates have the scores of means rounded to the element type. Ranked by these, the first ones
// are top keys whatever rounding did, those behind the first `wanted` are none, and the ones
// between are scored again in f32.
#pragma once

#include <climits>
#include <cstdint>

#include "cuda/device/candidates.cuh"
#include "cuda/device/rescore.cuh"
#include "cuda/device/select.cuh"
#include "cuda/tuning.h"

namespace coterie::cuda {

constexpr int kRankedSpare = 16;  // the cut before the ranking may leave so many more than wanted
constexpr int kMaxRanked = 192;
constexpr int kStaged = 512;  // candidates of a row that are kept on the chip
constexpr int kMaxFresh = 64;

// How many ranks rounding may move a key.
__host__ __device__ constexpr int spare_keys(std::int64_t topk) {
  return static_cast<int>(topk / 8) + 4;
}
static_assert(kMaxTopKeys + spare_keys(kMaxTopKeys) + kRankedSpare <= kMaxRanked, "room to rank");
static_assert(3 * spare_keys(kMaxTopKeys) <= kMaxFresh, "room to score again");

// The top keys of a row with the scores of the rounded mean, in no order.
struct TopKeys {
  int count;
  const int* index;
  const float* score;
};

// Shared memory of a warp.
struct MergeMemory {
  CandidateKey staged[kStaged], ranked[kMaxRanked], fresh[kMaxFresh];
  int index[kMaxTopKeys];
  float score[kMaxTopKeys];
  float mean[kMaxHeadDim];
};

// Exclusive sum over the lanes of a warp.
__device__ __forceinline__ int sum_before(int value) {
  const int lane = threadIdx.x % 32;
  int sum = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += other;
  }
  return sum - value;
}

// Copies the keys not below `cut` to memory; returns their number. for_each as in find_cut.
template <class ForEach>
__device__ __forceinline__ int collect(const ForEach& for_each, CandidateKey cut,
                                       CandidateKey* to) {
  int count = 0;
  for_each([&](CandidateKey key) { count += key >= cut; });
  int place = sum_before(count);
  for_each([&](CandidateKey key) {
    if (key >= cut) to[place++] = key;
  });
  __syncwarp();
  return __reduce_add_sync(~0u, count);
}

// The keys at places lane, lane + 32, ... of memory, and how many of all are better.
template <int kSlots>
struct RankedKeys {
  CandidateKey own[kSlots];
  int rank[kSlots];

  __device__ RankedKeys(const CandidateKey* keys, int count) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      own[i] = lane + 32 * i < count ? keys[lane + 32 * i] : 0;
      rank[i] = lane + 32 * i < count ? 0 : INT_MAX / 2;
    }
#pragma unroll 4
    for (int j = 0; j < count; ++j) {
      const CandidateKey key = keys[j];
#pragma unroll
      for (int i = 0; i < kSlots; ++i) rank[i] += key > own[i];
    }
  }
};

// Top keys of `count` candidates in memory.ranked, which may be all there are.
template <int kSlots, class T>
__device__ __forceinline__ TopKeys choose(const SelectArgs<T>& args, const ExactScores<T>& exact,
                                          int count, MergeMemory& memory) {
  const int lane = threadIdx.x % 32, topk = args.topk;
  const RankedKeys<kSlots> ranked(memory.ranked, count);
  const int certain = count <= topk ? count : max(topk - 2 * spare_keys(topk), 0);
  const int open = min(count, args.wanted) - certain;
#pragma unroll
  for (int i = 0; i < kSlots; ++i) {
    if (ranked.rank[i] < certain) {
      memory.index[ranked.rank[i]] = index_of(ranked.own[i]);
      memory.score[ranked.rank[i]] = score_of(ranked.own[i]);
    } else if (ranked.rank[i] < certain + open) {
      memory.fresh[ranked.rank[i] - certain] = ranked.own[i];
    }
  }
  __syncwarp();
  if (open > 0) {
    float rounded[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) rounded[i] = score_of(memory.fresh[min(lane + 32 * i, open - 1)]);
    __syncwarp();
    exact.rescore(memory.fresh, open);
    const RankedKeys<2> again(memory.fresh, open);
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (const int place = certain + again.rank[i]; place < topk) {
        memory.index[place] = index_of(again.own[i]);
        memory.score[place] = rounded[i];
      }
    __syncwarp();
  }
  return {min(count, topk), memory.index, memory.score};
}

// Writes indices in ascending order, -1 beyond them.
__device__ __forceinline__ void write_ascending(const TopKeys& keys, int topk, std::int32_t* top) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int i = lane; i < keys.count; i += 32) {
    const int index = keys.index[i];
    int place = 0;
#pragma unroll 8
    for (int j = 0; j < keys.count; ++j) place += keys.index[j] < index;
    top[place] = index;
  }
  for (int i = keys.count + lane; i < topk; i += 32) top[i] = -1;
}

// The lists of a row: four side by side in each of several places.
struct RowLists {
  int total;
  std::int64_t first, step;

  __device__ std::int64_t number(int i) const {
    return first + i / kLaneLists * step + i % kLaneLists;
  }
};

// The best of too many candidates, at least `wanted` and at most `most`, to memory.ranked; returns
// how many. Rare, and kept out of the way.
template <class T>
__device__ __noinline__ int cut_lists(const SelectArgs<T>& args, const RowLists& lists, int most,
                                      MergeMemory& memory) {
  const auto listed = [&](const auto& visit) {
    for (int i = threadIdx.x % 32; i < lists.total; i += 32) {
      const std::int64_t at = lists.number(i);
      const int count = args.counts[at];
#pragma unroll 4
      for (int j = 0; j < count; ++j) visit(candidate_key(args.candidates[at * args.capacity + j]));
    }
  };
  return collect(listed, find_cut(listed, args.wanted, most), memory.ranked);
}

// Finds the top keys of a cluster, writes them and returns them.
template <class T>
__device__ __forceinline__ TopKeys merge_lists(const SelectArgs<T>& args, int item, int head,
                                               int cluster, const RowLists& lists,
                                               MergeMemory& memory) {
  const CentroidQueries& queries = args.queries;
  const int lane = threadIdx.x % 32;
  const std::int64_t row = queries.row(item, head, cluster);
  const float* mean = queries.centroids + row * queries.width;
#pragma unroll
  for (int d = lane; d < kMaxHeadDim; d += 32)
    memory.mean[d] = (d < queries.width ? mean[d] : 0.0f) * queries.sign;
  int own = 0;
  for (int i = lane; i < lists.total; i += 32) own += args.counts[lists.number(i)];
  const int all = __reduce_add_sync(~0u, own), most = args.wanted + kRankedSpare;
  int count = all;
  if (all <= kStaged) {
    CandidateKey* to = all <= most ? memory.ranked : memory.staged;
    int place = sum_before(own);
#pragma unroll 1
    for (int i = lane; i < lists.total; i += 32) {
      const std::int64_t at = lists.number(i);
      const int listed = args.counts[at];
      constexpr int kBatch = 8;  // loads on their way
#pragma unroll 1
      for (int first = 0; first < listed; first += kBatch) {
        Candidate batch[kBatch];
#pragma unroll
        for (int j = 0; j < kBatch; ++j)
          batch[j] = args.candidates[at * args.capacity + min(first + j, listed - 1)];
#pragma unroll
        for (int j = 0; j < kBatch; ++j)
          if (first + j < listed) to[place++] = candidate_key(batch[j]);
      }
    }
    __syncwarp();
    if (all > most) {
      const auto staged = [&](const auto& visit) {
#pragma unroll 1
        for (int i = lane; i < all; i += 32) visit(memory.staged[i]);
      };
      count = collect(staged, find_cut(staged, args.wanted, most), memory.ranked);
    }
  } else {
    count = cut_lists(args, lists, most, memory);
  }
  const ExactScores<T> exact{args.keys(queries.spans.k.span(item), head), memory.mean};
  const TopKeys keys =
      most <= 64 ? choose<2>(args, exact, count, memory) : choose<6>(args, exact, count, memory);
  write_ascending(keys, args.topk, args.top_keys + row * args.topk);
  return keys;
}

}  // namespace coterie::cuda
