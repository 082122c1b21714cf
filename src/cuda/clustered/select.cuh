// SPDX-License-Identifier: MIT
// Selection of the top keys of cluster means: arguments, samples and thresholds of select.cu, and
// the lists of candidates, which select_attend_sm90a.cu shares. Lists are in global memory, four
// for a row of means in every part of the keys, because four lanes hold the scores of a row.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>

#include "cuda/clustered/centroid.cuh"
#include "cuda/clustered/clustered.h"
#include "cuda/launch/dispatch.h"
#include "cuda/prim/candidates.cuh"
#include "cuda/prim/load.cuh"
#include "cuda/prim/team.cuh"

namespace coterie::cuda {

constexpr int kSamples = 8;      // parts of the sample, a block each
constexpr int kSampleShare = 4;  // one key tile in this many is in the sample
constexpr int kSelectKeys = 64;  // keys of a tile, 16 of them for each lane of a row's four
constexpr int kLaneLists = 4;    // of a row and chunk: one for each lane that holds scores of it

template <class T>
struct SelectArgs {
  CentroidQueries queries;
  Tensor4<const T> k;
  int topk;
  int wanted;              // candidates to find, some more than topk
  int capacity;            // of a list
  float* thresholds;       // (items, H, C, kSamples)
  std::int32_t* counts;    // (slots, H, C, kLaneLists)
  Candidate* candidates;   // (slots, H, C, capacity, kLaneLists)
  std::int32_t* top_keys;  // (items, H, C, topk)
  bool inputs_ready;       // no concurrent kernel writes the inputs of the call

  __device__ Rows<const T> keys(const ItemSpan& span, int head) const {
    return k.rows(span.batch, head / queries.group, span.begin);
  }
};

// The sample of one block: `tiles` whole tiles of kSelectKeys keys, the j-th at key(j). None if
// there are fewer tiles than parts.
struct KeySample {
  int part, all, tiles;

  __device__ KeySample(int keys, int number)
      : part(number),
        all(keys / kSelectKeys),
        tiles(max(all / (kSampleShare * kSamples), min(all / kSamples, 4))) {}
  __device__ int key(int j) const {
    const std::int64_t number = static_cast<std::int64_t>(part) * tiles + j;
    return static_cast<int>(number * all / (kSamples * tiles)) * kSelectKeys;
  }
};

// Writes the thresholds of a block's rows: `value`, or with maxima the rank-th largest of the 32
// group maxima of row r, maxima[r].
template <class T>
__device__ void write_thresholds(const SelectArgs<T>& args, const CentroidBlock& block, int item,
                                 int part, float value, int rank = 1,
                                 const float (*maxima)[33] = nullptr) {
  const int lane = threadIdx.x % 32;
  for (int r = threadIdx.x / 32; r < args.queries.block_rows; r += blockDim.x / 32) {
    if (maxima) value = warp_sort_descending(maxima[r][lane]);
    if (lane == rank - 1 && block.first + r < args.queries.clusters)
      args.thresholds[args.queries.row(item, block.head, block.first + r) * kSamples + part] =
          value;
  }
}

// The threshold of a row from those of the parts; none for rows without members, or beyond the last
// cluster.
template <class T>
__device__ float row_threshold(const SelectArgs<T>& args, int item, int head, int cluster) {
  if (cluster >= args.queries.clusters || args.queries.empty(item, head, cluster)) return INFINITY;
  const float* parts = args.thresholds + args.queries.row(item, head, cluster) * kSamples;
  float threshold = FLT_MAX;
#pragma unroll
  for (int i = 0; i < kSamples; ++i) threshold = fminf(threshold, parts[i]);
  return threshold;
}

// The lists of a row: kLaneLists of them in each of several parts. Candidates of different lists
// are interleaved, so that the first ones of all are read together.
struct RowLists {
  int parts, pitch;                  // from one candidate of a list to the next
  std::int64_t counts, counts_step;  // those of the first part; from part to part
  std::int64_t candidates, candidates_step;

  __device__ std::int64_t count(int part, int list) const {
    return counts + part * counts_step + list;
  }
  __device__ std::int64_t candidate(int part, int list) const {
    return candidates + part * candidates_step + list;
  }
};

// Lists with all parts of a row interleaved.
__device__ __forceinline__ RowLists joined_lists(std::int64_t row, int parts, int capacity) {
  const int width = parts * kLaneLists;
  return {parts, width, row * width, kLaneLists, row * capacity * width, kLaneLists};
}
// Lists of a row in separate parts, `step` rows apart.
__device__ __forceinline__ RowLists separate_lists(std::int64_t row, int parts, std::int64_t step,
                                                   int capacity) {
  return {parts,
          kLaneLists,
          row * kLaneLists,
          step * kLaneLists,
          row * kLaneLists * capacity,
          step * kLaneLists * capacity};
}

// One row of means in a warp: four lanes hold its scores, each keeps its own list, so nothing is
// shared while scores stream by. After every check, a list can take one more tile.
struct LaneList {
  Candidate* list;
  std::uint32_t pitch;  // bytes from one candidate to the next
  int count;
  float floor;  // scores below it are not candidates

  LaneList() = default;
  __device__ LaneList(Candidate* candidates, const RowLists& lists, int part, int lane, float least)
      : list(candidates + lists.candidate(part, lane)),
        pitch(lists.pitch * sizeof(Candidate)),
        count(0),
        floor(least) {}
  __device__ Candidate* at(int i) const {
    return reinterpret_cast<Candidate*>(reinterpret_cast<char*>(list) +
                                        static_cast<std::uint64_t>(static_cast<unsigned>(i)) *
                                            pitch);
  }
  __device__ bool filling(int capacity) const { return count > capacity - kSelectKeys / 4; }
};

// Moves the candidates that are not below `cut` to the front of a list; returns their number.
__device__ __forceinline__ int keep_above(const LaneList& list, CandidateKey cut) {
  const int lane = threadIdx.x % 32;
  int kept = 0;
#pragma unroll 1
  for (int first = 0; first < list.count; first += 32) {
    const bool there = first + lane < list.count;
    const Candidate candidate = there ? *list.at(first + lane) : Candidate{};
    const bool keep = there && candidate_key(candidate) >= cut;
    const std::uint32_t votes = __ballot_sync(~0u, keep);
    if (keep) *list.at(kept + __popc(votes & ((1u << lane) - 1))) = candidate;
    kept += __popc(votes);
    __syncwarp();
  }
  return kept;
}

// Called by all lanes of a warp, for the row of lanes 4 * quad .. 4 * quad + 3: keeps the best
// `wanted` of its lists and raises its floor. Later keys have indices from `next` on. Rare; not
// inlined, to keep register pressure in the kernels low.
static __device__ __noinline__ LaneList prune(LaneList own, int quad, int wanted, int next) {
  const int lane = threadIdx.x % 32;
  // The row's lists, one in each of four neighbouring lanes.
  LaneList lists[4];
  const auto address = reinterpret_cast<unsigned long long>(own.list);
  int total = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    lists[i] = own;
    lists[i].list = reinterpret_cast<Candidate*>(__shfl_sync(~0u, address, 4 * quad + i));
    lists[i].count = __shfl_sync(~0u, own.count, 4 * quad + i);
    total += lists[i].count;
  }
  if (total <= wanted) return own;
  const auto for_each = [&](const auto& visit) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll 1
      for (int j = lane; j < lists[i].count; j += 32) visit(candidate_key(*lists[i].at(j)));
  };
  const CandidateKey cut = find_cut(for_each, wanted, wanted);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int kept = keep_above(lists[i], cut);
    if (lane == 4 * quad + i) own.count = kept;
  }
  // A later key with the cut's score counts only if its index is low enough to beat the cut.
  const float score = score_of(cut);
  const bool ties = ~static_cast<std::uint32_t>(next) > static_cast<std::uint32_t>(cut);
  if (lane / 4 == quad) own.floor = ties ? score : from_ordered(ordered(score) + 1);
  return own;
}

// Prunes the lists that may overflow with the next tile.
template <int kRows>
__device__ __forceinline__ void make_room(LaneList (&lists)[kRows], int capacity, int wanted,
                                          int next) {
  bool filling = false;
#pragma unroll
  for (int r = 0; r < kRows; ++r) filling |= lists[r].filling(capacity);
  if (!__any_sync(~0u, filling)) return;
  __syncwarp();
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const std::uint32_t full = __ballot_sync(~0u, lists[r].filling(capacity));
#pragma unroll 1
    for (int quad = 0; quad < 8; ++quad)
      if (full >> (4 * quad) & 15u) lists[r] = prune(lists[r], quad, wanted, next);
  }
}

// Offers 4 scores of a row, of which `largest` is the maximum: those of keys first, first + 1,
// first + 8, first + 9.
__device__ __forceinline__ void offer4(LaneList& list, float largest, float s0, float s1, float s2,
                                       float s3, int first) {
  if (!(largest >= list.floor)) return;
  // No branches: in most warps some lane has a candidate, and the warp would diverge.
  const auto offer = [&](float score, int key) {
    asm volatile(
        "{.reg .pred p;\n"
        "setp.ge.f32 p, %2, %3;\n"
        "@p st.global.v2.b32 [%1], {%4,%5};\n"
        "@p add.s32 %0, %0, 1;}"
        : "+r"(list.count)
        : "l"(list.at(list.count)), "f"(score), "f"(list.floor), "r"(__float_as_uint(score)),
          "r"(key)
        : "memory");
  };
  offer(s0, first);
  offer(s1, first + 1);
  offer(s2, first + 8);
  offer(s3, first + 9);
}

// Last step of the selection (select.cu): finds the top keys of a row in its lists of candidates,
// two rows per warp.
//
// Candidates have the scores of means rounded to the element type. Ranked by these, the first ones
// are top keys regardless of rounding, those after the first `wanted` are not, and those in between
// are scored again in f32.

// Two rows per warp, 16 lanes each. All lanes of the warp call these together.

constexpr int kRowLanes = 16;

__device__ __forceinline__ int lane_of_row() { return static_cast<int>(threadIdx.x) % kRowLanes; }

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

// Bit l: the vote of lane l of the row.
__device__ __forceinline__ std::uint32_t row_votes(bool vote) {
  return __ballot_sync(~0u, vote) >> (threadIdx.x & kRowLanes) & 0xffffu;
}

// The sum over the lanes before this one.
__device__ __forceinline__ int row_sum_before(int value) {
  int sum = value;
#pragma unroll
  for (int step = 1; step < kRowLanes; step *= 2) {
    const int other = __shfl_up_sync(~0u, sum, step, kRowLanes);
    if (lane_of_row() >= step) sum += other;
  }
  return sum - value;
}

// The larger of both rows' values.
__device__ __forceinline__ int pair_max(int value) { return __reduce_max_sync(~0u, value); }

// Exact scores of candidates for the top keys of a mean, two means per warp.

// Values, not references: for a choice between two elements the compiler would use a local array.
__device__ __forceinline__ float exchange(bool upper, float low, float high, int step) {
  return (upper ? high : low) + __shfl_xor_sync(~0u, upper ? low : high, step);
}

// Sums over eight neighbouring lanes; lane l gets that of sums[l % 8].
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
  // Replaces the scores of keys[0, count), of which the first is a valid key even if count is 0.
  // `most`: the larger count of both rows.
  __device__ __forceinline__ void rescore(CandidateKey* keys, int count, int most) const {
    if (!rows.aligned) return rescore_slowly(keys, count);
    const int lane = lane_of_row();
#pragma unroll 1
    for (int first = 0; first < most; first += 2 * kTogether) {
      float sums[kTogether] = {};
#pragma unroll 1
      for (int shift = 0; shift < rows.width; shift += 8 * kVector) {
        const int column = shift + lane % 8 * kVector;
        const bool inside = column < rows.width;  // else both factors are 0: 0 times inf is NaN
        uint4 words[kTogether];
#pragma unroll
        for (int u = 0; u < kTogether; ++u) {
          const int at = max(min(first + 2 * u + lane / 8, count - 1), 0);
          const T* row = rows.row(index_of(keys[at]));
          words[u] =
              inside ? *reinterpret_cast<const uint4*>(row + column) : make_uint4(0, 0, 0, 0);
        }
        float factors[kVector];  // rows of whole 16 bytes, in the means as well
#pragma unroll
        for (int i = 0; i < kVector; i += 4) {
          const float4 four = inside ? *reinterpret_cast<const float4*>(mean + column + i)
                                     : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
          for (int e = 0; e < 4; ++e) factors[i + e] = (&four.x)[e];
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
    for (int i = lane_of_row(); i < count; i += kRowLanes) {
      const int index = index_of(keys[i]);
      float sum = 0.0f;
#pragma unroll 1
      for (int d = 0; d < rows.width; ++d) sum = fmaf(mean[d], to_float(rows.row(index)[d]), sum);
      keys[i] = key_of(sum * sign, index);
    }
    __syncwarp();
  }
};

constexpr int kStaged = 320;  // candidates of a row that are kept in shared memory

// Copies the first kStaged of a row's candidates if `there`; returns how many the row has. A lane
// takes two lists of a part, or every 2nd, 4th or 8th of their candidates; it loads the first ones
// before it knows how many there are.
template <class T>
__device__ __forceinline__ int stage_lists(const SelectArgs<T>& args, const RowLists& lists,
                                           bool there, CandidateKey* to) {
  constexpr int kTogether = 6;
  const int lane = lane_of_row(), units = lists.parts * (kLaneLists / 2);
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

// If there are more than `most`, keeps the best of keys[0, count): at most `most`, and at least
// `least` if none is repeated. Returns how many are left.
__device__ __forceinline__ int cut_keys(CandidateKey* keys, int count, int least, int most) {
  const int lane = lane_of_row();
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

// The same for rows with more than kStaged candidates, directly from their lists and by the whole
// warp. Rare, so not inlined.
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

constexpr int kRankedSpare = 16;  // the cut before the ranking may leave this many more than wanted
constexpr int kLeastCut = 64;     // up to this many are ranked without a cut
constexpr int kMaxFresh = 40;

// How many ranks rounding may move a key.
__host__ __device__ constexpr int spare_keys(std::int64_t topk) {
  return static_cast<int>(topk / 8) + 4;
}
static_assert(kMaxTopKeys + spare_keys(kMaxTopKeys) + kRankedSpare + 4 <= kStaged, "room to rank");
static_assert(2 * spare_keys(kMaxTopKeys) <= kMaxFresh, "room to score again");

// Shared memory of a row. At the end, index and score are those of its top keys, unordered.
struct alignas(16) MergeMemory {
  CandidateKey keys[kStaged];
  CandidateKey fresh[kMaxFresh + 2];
  std::uint32_t index[kMaxTopKeys + 4];  // complements: the larger, the lower the index
  float score[kMaxTopKeys];              // of the rounded mean
  float rounded[kMaxFresh];              // the previous scores of the fresh ones
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

// The word that decides between most keys: the score of a candidate.
__device__ __forceinline__ std::uint32_t first_word(CandidateKey key) {
  return static_cast<std::uint32_t>(key >> 32);
}
__device__ __forceinline__ std::uint32_t first_word(std::uint32_t key) { return key; }

// How many of keys[0, most) are larger than each of `own`, by all bits or by the first word.
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
// distinct and not 0. `most`: the larger count of both rows. The array has space for three more.
template <int kSlots, class Key, class Visit>
__device__ __forceinline__ void rank_keys(Key* keys, int count, int most, const Visit& visit) {
  constexpr int kWide = 16 / sizeof(Key), kStep = kSlots * kRowLanes;
  const int lane = lane_of_row();
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
      // Ranks add up to count (count - 1) / 2 unless scores are equal.
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

// Writes the top keys of memory.keys[0, count), all of them if count <= topk, to memory.index and
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
    if (open == 0 && lane_of_row() == 0) memory.fresh[0] = candidate_key(0.0f, 0);
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
    for (int i = found + lane_of_row(); i < args.topk; i += kRowLanes) top[i] = -1;
  return found;
}

// Top keys, and with outputs also the attention, by Hopper's warpgroup products; 16-bit types only.
template <class T>
void select_sm90a(const SelectArgs<T>& args, const SelectTeams& teams, const MeanOutputs<T>* to,
                  cudaStream_t stream);

}  // namespace coterie::cuda
