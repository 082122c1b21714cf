// SPDX-License-Identifier: MIT
// Last step of the selection of top keys: from the lists of candidates of a row to its top keys,
// two rows of a warp side by side (attend_centroid_select.cu).
//
// Candidates have the scores of means rounded to the element type. Ranked by these, the first ones
// are top keys whatever rounding did, those behind the first `wanted` are none, and the ones
// between are scored again in f32.
#pragma once

#include <cstdint>

#include "cuda/device/candidates.cuh"
#include "cuda/device/half_warp.cuh"
#include "cuda/device/rescore.cuh"
#include "cuda/device/row_lists.cuh"
#include "cuda/device/select.cuh"
#include "cuda/tuning.h"

namespace coterie::cuda {

constexpr int kRankedSpare = 16;  // the cut before the ranking may leave so many more than wanted
constexpr int kLeastCut = 64;     // what is ranked without a cut
constexpr int kMaxFresh = 40;

// How many ranks rounding may move a key.
__host__ __device__ constexpr int spare_keys(std::int64_t topk) {
  return static_cast<int>(topk / 8) + 4;
}
static_assert(kMaxTopKeys + spare_keys(kMaxTopKeys) + kRankedSpare + 4 <= kStaged, "room to rank");
static_assert(2 * spare_keys(kMaxTopKeys) <= kMaxFresh, "room to score again");

// Shared memory of a row. In the end index and score are those of its top keys, in no order.
struct alignas(16) MergeMemory {
  CandidateKey keys[kStaged];
  CandidateKey fresh[kMaxFresh + 2];
  std::uint32_t index[kMaxTopKeys + 4];  // complements: the larger, the lower the index
  float score[kMaxTopKeys];              // of the rounded mean
  float rounded[kMaxFresh];              // the scores that fresh ones had
  float total[128];                      // output of the softmax over all keys, before the division
  float shift, sum;                      // of that softmax
  float apart[6];                        // rows of a warp begin in different banks
};

static_assert(sizeof(MergeMemory) % 128 == 32, "different banks");

// A cluster, of the same item and head as the other one of the warp.
struct SelectRow {
  int item, head, cluster;
  bool there;    // otherwise nothing is written
  bool members;  // otherwise it has no top keys

  __device__ std::int64_t number(const CentroidQueries& queries) const {
    return queries.row(item, head, there ? cluster : 0);
  }
};

// What decides between most keys: of candidates their scores.
__device__ __forceinline__ std::uint32_t first_word(CandidateKey key) {
  return static_cast<std::uint32_t>(key >> 32);
}
__device__ __forceinline__ std::uint32_t first_word(std::uint32_t key) { return key; }

// How many of keys[0, most) are larger than each of `own`, by all of their bits or the first word.
template <bool kExact, int kSlots, class Key>
__device__ __forceinline__ void count_larger(const Key* keys, int most, const Key (&own)[kSlots],
                                             int (&rank)[kSlots]) {
  constexpr int kWide = 16 / sizeof(Key);
#pragma unroll
  for (int s = 0; s < kSlots; ++s) rank[s] = 0;
#pragma unroll 2
  for (int j = 0; j < most; j += kWide) {
    const uint4 words = *reinterpret_cast<const uint4*>(keys + j);
#pragma unroll
    for (int i = 0; i < kWide; ++i) {
      const Key key = reinterpret_cast<const Key*>(&words)[i];
#pragma unroll
      for (int s = 0; s < kSlots; ++s)
        if constexpr (kExact)
          count_greater(rank[s], key, own[s]);
        else
          count_greater(rank[s], first_word(key), first_word(own[s]));
    }
  }
}

// Calls visit(place, key, rank) for keys[0, count); rank: how many of them are larger. They are
// distinct and not 0. `most`: the larger count of both rows. There is room for three more.
template <int kSlots, class Key, class Visit>
__device__ __forceinline__ void rank_keys(Key* keys, int count, int most, const Visit& visit) {
  constexpr int kWide = 16 / sizeof(Key), kStep = kSlots * kRowLanes;
  const int lane = row_lane();
#pragma unroll 1
  for (int i = count + lane; i < most + kWide - 1; i += kRowLanes) keys[i] = 0;
  __syncwarp();
#pragma unroll 1
  for (int first = 0; first < most; first += kStep) {
    Key own[kSlots];
    int rank[kSlots], sum = 0;
#pragma unroll
    for (int s = 0; s < kSlots; ++s)
      own[s] = keys[min(first + s * kRowLanes + lane, max(count - 1, 0))];
    count_larger<sizeof(Key) == 4>(keys, most, own, rank);
    if constexpr (sizeof(Key) == 8) {
      // Ranks of distinct keys add up to this. Scores that are equal do not.
#pragma unroll
      for (int s = 0; s < kSlots; ++s) sum += first + s * kRowLanes + lane < count ? rank[s] : 0;
      if (__any_sync(~0u, most > kStep || row_sum(sum) != count * (count - 1) / 2))
        count_larger<true>(keys, most, own, rank);
    }
#pragma unroll
    for (int s = 0; s < kSlots; ++s)
      if (const int place = first + s * kRowLanes + lane; place < count)
        visit(place, own[s], rank[s]);
  }
  __syncwarp();
}

// The top keys of memory.keys[0, count), which may be all there are, to memory.index and
// memory.score; returns how many.
template <class T>
__device__ __forceinline__ int choose(const SelectArgs<T>& args, const MeanScores<T>& exact,
                                      int count, MergeMemory& memory) {
  const int topk = args.topk;
  const int certain = count <= topk ? count : max(topk - spare_keys(topk), 0);
  const int open = min(count, args.wanted) - certain;
  rank_keys<4>(memory.keys, count, pair_max(count), [&](int, CandidateKey key, int rank) {
    if (rank < certain) {
      memory.index[rank] = static_cast<std::uint32_t>(key);
      memory.score[rank] = score_of(key);
    } else if (rank < certain + open) {
      memory.fresh[rank - certain] = key;
      memory.rounded[rank - certain] = score_of(key);
    }
  });
  const int most = pair_max(open);
  if (most > 0) {
    if (open == 0 && row_lane() == 0) memory.fresh[0] = candidate_key(0.0f, 0);
    __syncwarp();
    exact.rescore(memory.fresh, open, most);
    rank_keys<2>(memory.fresh, open, most, [&](int place, CandidateKey key, int rank) {
      if (certain + rank >= topk) return;
      memory.index[certain + rank] = static_cast<std::uint32_t>(key);
      memory.score[certain + rank] = memory.rounded[place];
    });
  }
  return min(count, topk);
}

// Finds the top keys of a cluster and writes them in ascending order, -1 beyond them; returns how
// many. `pair`: the memory of both rows of the warp.
template <class T>
__device__ __forceinline__ int merge_lists(const SelectArgs<T>& args, const SelectRow& row,
                                           const RowLists& lists, MergeMemory* pair) {
  const CentroidQueries& queries = args.queries;
  MergeMemory& memory = pair[threadIdx.x / kRowLanes % 2];
  const int most = max(args.wanted + kRankedSpare, kLeastCut);
  int count = stage_lists(args, lists, row.members, memory.keys);
  if (__any_sync(~0u, count > kStaged))
    count = cut_long_lists(args, lists, count, most, memory.keys);
  count = cut_keys(memory.keys, count, args.wanted, most);
  const std::int64_t number = row.number(queries);
  const MeanScores<T> exact{args.keys(queries.spans.k.span(row.item), row.head),
                            queries.centroids + number * queries.width, queries.sign};
  const int found = choose(args, exact, count, memory);
  std::int32_t* top = args.top_keys + number * args.topk;
  rank_keys<2>(memory.index, found, pair_max(found), [&](int, std::uint32_t key, int rank) {
    if (row.there) top[rank] = static_cast<std::int32_t>(~key);
  });
  if (row.there)
#pragma unroll 1
    for (int i = found + row_lane(); i < args.topk; i += kRowLanes) top[i] = -1;
  return found;
}

}  // namespace coterie::cuda
