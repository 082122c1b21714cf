// SPDX-License-Identifier: MIT
// Last step of the selection of top keys: from the lists of candidates of a row to its top keys,
// two rows of a warp side by side (select.cu).
//
// Candidates have the scores of means rounded to the element type. Ranked by these, the first ones
// are top keys whatever rounding did, those behind the first `wanted` are none, and the ones
// between are scored again in f32.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/clustered/select.cuh"
#include "cuda/launch/dispatch.h"
#include "cuda/prim/candidates.cuh"
#include "cuda/prim/load.cuh"

namespace coterie::cuda {

// Two rows of a warp side by side, 16 lanes each. All lanes of the warp call these together.

constexpr int kRowLanes = 16;

__device__ __forceinline__ int row_lane() { return static_cast<int>(threadIdx.x) % kRowLanes; }

template <class Value>
__device__ __forceinline__ Value row_sum(Value value) {
#pragma unroll
  for (int step = kRowLanes / 2; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
  return value;
}
template <class Value>
__device__ __forceinline__ Value row_max(Value value) {
#pragma unroll
  for (int step = kRowLanes / 2; step > 0; step /= 2)
    value = max(value, __shfl_xor_sync(~0u, value, step));
  return value;
}

// Bit l: what lane l of the row says.
__device__ __forceinline__ std::uint32_t row_votes(bool vote) {
  return __ballot_sync(~0u, vote) >> (threadIdx.x & kRowLanes) & 0xffffu;
}

// The sum over the lanes before this one.
__device__ __forceinline__ int row_sum_before(int value) {
  int sum = value;
#pragma unroll
  for (int step = 1; step < kRowLanes; step *= 2) {
    const int other = __shfl_up_sync(~0u, sum, step, kRowLanes);
    if (row_lane() >= step) sum += other;
  }
  return sum - value;
}

// The larger of both rows' values.
__device__ __forceinline__ int pair_max(int value) { return __reduce_max_sync(~0u, value); }

// Exact scores of candidates for the top keys of a mean, two means of a warp side by side.

// Values, not references: of a choice between two elements the compiler makes a local array.
__device__ __forceinline__ float exchange(bool upper, float low, float high, int step) {
  return (upper ? high : low) + __shfl_xor_sync(~0u, upper ? low : high, step);
}

// Sums over eight lanes side by side; lane l has that of sums[l % 8] afterwards.
__device__ __forceinline__ float eight_sums(const float (&sums)[8]) {
  const int lane = threadIdx.x % 32;
  float four[4], two[2];
#pragma unroll
  for (int u = 0; u < 4; ++u) four[u] = exchange(lane & 4, sums[u], sums[u + 4], 4);
#pragma unroll
  for (int u = 0; u < 2; ++u) two[u] = exchange(lane & 2, four[u], four[u + 2], 2);
  return exchange(lane & 1, two[0], two[1], 1);
}

// sign * mean . key for 16 keys of each row at a time, by 8 lanes each.
template <class T>
struct MeanScores {
  static constexpr int kVector = 16 / sizeof(T);
  static constexpr int kTogether = 8;  // keys of a lane, whose loads are in flight together
  Rows<const T> rows;                  // the same for both rows of the warp
  const float* mean;
  float sign;

  __device__ static CandidateKey key_of(float sum, int index) {
    return candidate_key(isnan(sum) ? -INFINITY : sum, index);
  }
  // Replaces the scores of keys[0, count), of which the first one is a valid key at any rate.
  // `most`: the larger count of both rows.
  __device__ __forceinline__ void rescore(CandidateKey* keys, int count, int most) const {
    if (!rows.aligned) return rescore_slowly(keys, count);
    const int lane = row_lane();
#pragma unroll 1
    for (int first = 0; first < most; first += 2 * kTogether) {
      float sums[kTogether] = {};
#pragma unroll 1
      for (int shift = 0; shift < rows.width; shift += 8 * kVector) {
        const int column = shift + lane % 8 * kVector;
        const bool inside = column < rows.width;
        const int place = inside ? column : 0;
        uint4 words[kTogether];
#pragma unroll
        for (int u = 0; u < kTogether; ++u) {
          const int at = max(min(first + 2 * u + lane / 8, count - 1), 0);
          words[u] = *reinterpret_cast<const uint4*>(rows.row(index_of(keys[at])) + place);
        }
        float factors[kVector];  // rows of whole 16 bytes: so are those of the means
#pragma unroll
        for (int i = 0; i < kVector; i += 4) {
          const float4 four = *reinterpret_cast<const float4*>(mean + place + i);
#pragma unroll
          for (int e = 0; e < 4; ++e) factors[i + e] = inside ? (&four.x)[e] : 0.0f;
        }
#pragma unroll
        for (int u = 0; u < kTogether; ++u)
#pragma unroll
          for (int i = 0; i < kVector; ++i)
            sums[u] = fmaf(factors[i], to_float(reinterpret_cast<const T*>(&words[u])[i]), sums[u]);
      }
      const float sum = eight_sums(sums) * sign;
      const int own = first + 2 * (lane % 8) + lane / 8;
      __syncwarp();  // all have read what is overwritten
      if (own < count) keys[own] = key_of(sum, index_of(keys[own]));
    }
    __syncwarp();
  }
  __device__ __forceinline__ void rescore_slowly(CandidateKey* keys, int count) const {
#pragma unroll 1
    for (int i = row_lane(); i < count; i += kRowLanes) {
      const int index = index_of(keys[i]);
      float sum = 0.0f;
#pragma unroll 1
      for (int d = 0; d < rows.width; ++d) sum = fmaf(mean[d], to_float(rows.row(index)[d]), sum);
      keys[i] = key_of(sum * sign, index);
    }
    __syncwarp();
  }
};

constexpr int kStaged = 320;  // candidates of a row that are kept on the chip

// Copies the first kStaged of a row's candidates, if it is `there`; returns how many there are. A
// lane takes two lists of a part, or every so manieth of their candidates; it loads the first ones
// before it knows how many there are.
template <class T>
__device__ __forceinline__ int stage_lists(const SelectArgs<T>& args, const RowLists& lists,
                                           bool there, CandidateKey* to) {
  constexpr int kTogether = 6;
  const int lane = row_lane(), units = lists.parts * (kLaneLists / 2);
  const int bits = units > 8 ? 0 : units > 4 ? 1 : units > 2 ? 2 : 3;  // of the lanes of a unit
  const int share = lane & ((1 << bits) - 1);
  int count = 0;
#pragma unroll 1
  for (int base = 0; base < units; base += kRowLanes) {
    const int unit = base + (lane >> bits);
    const int part = unit < units ? unit / 2 : 0, list = unit % 2 * 2;
    const auto* at = reinterpret_cast<const int4*>(args.candidates + lists.candidate(part, list));
    int2 listed = *reinterpret_cast<const int2*>(args.counts + lists.count(part, list));
    int4 pairs[kTogether];  // a candidate of each list
    const auto load = [&](int first) {
#pragma unroll
      for (int i = 0; i < kTogether; ++i)
        pairs[i] = at[min(((first + i) << bits) + share, args.capacity - 1) * (lists.pitch / 2)];
    };
    load(0);
    if (!there || unit >= units) listed = make_int2(0, 0);
    const int others = (1 << bits) - 1 - share;
    const int own = ((listed.x + others) >> bits) + ((listed.y + others) >> bits);
    int place = count + row_sum_before(own);
    count += row_sum(own);
    const auto put = [&](bool valid, int score, int index) {
      if (valid && place < kStaged) to[place] = candidate_key(__int_as_float(score), index);
      place += valid;
    };
#pragma unroll 1
    for (int first = 0;;) {
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int number = ((first + i) << bits) + share;
        put(number < listed.x, pairs[i].x, pairs[i].y);
        put(number < listed.y, pairs[i].z, pairs[i].w);
      }
      first += kTogether;
      if (!__any_sync(~0u, first << bits < max(listed.x, listed.y))) break;
      load(first);
    }
  }
  __syncwarp();
  return count;
}

// Leaves the best of keys[0, count), at least `least` and at most `most`, where there are more and
// none is repeated; returns how many, at most `most` in any case.
__device__ __forceinline__ int cut_keys(CandidateKey* keys, int count, int least, int most) {
  const int lane = row_lane();
  bool open = count > most;
  if (!__any_sync(~0u, open)) return count;
  CandidateKey largest = 0, smallest = 0;  // of the complements
#pragma unroll 2
  for (int i = lane; i < count; i += kRowLanes) {
    largest = max(largest, keys[i]);
    smallest = max(smallest, ~keys[i]);
  }
  __syncwarp();
  CandidateKey low = ~row_max(smallest), high = row_max(largest) + 1;  // too many; too few
  CandidateKey cut = 0;
  while (__any_sync(~0u, open)) {
    const CandidateKey middle = low + (high - low) / 2;
    int reached = 0;
#pragma unroll 4
    for (int i = lane; i < count; i += kRowLanes) count_greater(reached, keys[i], middle - 1);
    __syncwarp();
    reached = row_sum(reached);
    if (!open) continue;
    if (reached > most)
      low = middle;
    else
      high = middle;
    cut = high;
    open = (reached > most || reached < least) && high - low > 1;
  }
  int kept = 0;
  const int rounds = pair_max(count);
#pragma unroll 1
  for (int first = 0; first < rounds; first += kRowLanes) {
    const CandidateKey key = first + lane < count ? keys[first + lane] : 0;
    const bool keep = first + lane < count && key >= cut;
    const std::uint32_t votes = row_votes(keep);
    __syncwarp();
    if (keep) keys[kept + __popc(votes & ((1u << lane) - 1))] = key;
    kept += __popc(votes);
    __syncwarp();
  }
  return kept;
}

// The same for rows with more than kStaged candidates, straight from their lists and by the whole
// warp. Rare, and kept out of the way.
template <class T>
__device__ __noinline__ int cut_long_lists(const SelectArgs<T>& args, RowLists own, int count,
                                           int most, CandidateKey* own_keys) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int row = 0; row < 2; ++row) {
    const int source = row * kRowLanes;
    if (__shfl_sync(~0u, count, source) <= kStaged) continue;
    RowLists lists = own;
    lists.counts = __shfl_sync(~0u, own.counts, source);
    lists.candidates = __shfl_sync(~0u, own.candidates, source);
    auto* keys = reinterpret_cast<CandidateKey*>(
        __shfl_sync(~0u, reinterpret_cast<unsigned long long>(own_keys), source));
    const auto listed = [&](const auto& visit) {
#pragma unroll 1
      for (int i = lane; i < lists.parts * kLaneLists; i += 32) {
        const int part = i / kLaneLists, list = i % kLaneLists;
        const Candidate* at = args.candidates + lists.candidate(part, list);
        const int count = args.counts[lists.count(part, list)];
#pragma unroll 4
        for (int j = 0; j < count; ++j) visit(candidate_key(at[j * lists.pitch]));
      }
    };
    const CandidateKey cut = find_cut(listed, args.wanted, most);
    int above = 0;
    listed([&](CandidateKey key) { above += key >= cut; });
    int place = row_sum_before(above);
    const int low = __shfl_sync(~0u, place + above, kRowLanes - 1);
    if (lane >= kRowLanes) place += low;
    listed([&](CandidateKey key) {
      if (key >= cut) keys[place++] = key;
    });
    const int kept = __reduce_add_sync(~0u, above);
    if (lane / kRowLanes == row) count = kept;
  }
  __syncwarp();
  return count;
}

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
