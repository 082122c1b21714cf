// SPDX-License-Identifier: MIT
// Selection of the top keys of cluster means: arguments, samples and thresholds of select.cu, and
// the lists of candidates, which select_attend_sm90a.cu shares. Lists are in global memory, four
// for a row of means in every part of the keys, as four lanes hold the scores of a row.
#pragma once

#include <cfloat>
#include <cstdint>

#include "cuda/clustered/centroid_attend.cuh"
#include "cuda/clustered/clustered.h"
#include "cuda/prim/candidates.cuh"
#include "cuda/prim/team.cuh"

namespace coterie::cuda {

constexpr int kSamples = 8;      // parts of the sample, a block each
constexpr int kSampleShare = 4;  // one key tile in so many is in the sample
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
  bool inputs_ready;       // nothing that runs beside this kernel writes the inputs of the call

  __device__ Rows<const T> keys(const ItemSpan& span, int head) const {
    return k.rows(span.batch, head / queries.group, span.begin);
  }
};

// The sample of one block: `tiles` whole tiles of kSelectKeys keys, the j-th at key(j). None where
// the parts would not have a tile each.
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

// Writes the thresholds of a block's rows: `value`, or where there are maxima the rank-th largest
// of the 32 group maxima of row r, maxima[r].
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
// lie side by side, so that the first ones of all are read together.
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

// Lists with all parts of a row side by side.
__device__ __forceinline__ RowLists joined_lists(std::int64_t row, int parts, int capacity) {
  const int width = parts * kLaneLists;
  return {parts, width, row * width, kLaneLists, row * capacity * width, kLaneLists};
}
// Lists of a row in parts of their own, `step` rows apart.
__device__ __forceinline__ RowLists separate_lists(std::int64_t row, int parts, std::int64_t step,
                                                   int capacity) {
  return {parts,
          kLaneLists,
          row * kLaneLists,
          step * kLaneLists,
          row * kLaneLists * capacity,
          step * kLaneLists * capacity};
}

// One row of means in a warp: four lanes hold its scores, each keeps a list of its own, so that
// nothing is shared while scores stream by. A list has room for one tile after every check.
struct LaneList {
  Candidate* list;
  std::uint32_t pitch;  // bytes from one candidate to the next
  int count;
  float floor;  // scores below are no candidates

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

// By all lanes of a warp, for the row of lanes 4 * quad .. 4 * quad + 3: keeps the best `wanted` of
// its lists and raises its floor. Keys to come have indices from `next` on. Rare, and kept out of
// the registers of the kernels.
static __device__ __noinline__ LaneList prune(LaneList own, int quad, int wanted, int next) {
  const int lane = threadIdx.x % 32;
  // Of the row's lists, whose lanes are neighbours.
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

// Cuts back the lists that may overflow with the next tile.
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

// 4 scores of a row, the largest of them and where they stand: keys first, first + 1, first + 8,
// first + 9.
__device__ __forceinline__ void offer4(LaneList& list, float largest, float s0, float s1, float s2,
                                       float s3, int first) {
  if (!(largest >= list.floor)) return;
  // No branches: in most warps some lane has a candidate, and lanes would go one by one.
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

// Top keys, and with outputs the attention too, by Hopper's warpgroup products; 16-bit types only.
template <class T>
void select_sm90a(const SelectArgs<T>& args, const SelectTeams& teams, const MeanOutputs<T>* to,
                  cudaStream_t stream);

}  // namespace coterie::cuda
