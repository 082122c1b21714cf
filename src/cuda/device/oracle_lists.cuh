// SPDX-License-Identifier: MIT
// Candidates for the top keys of queries: four lanes hold the scores of a row, and each keeps a
// list (attend_oracle_select.cu).
#pragma once

#include <cfloat>
#include <cstdint>

#include "cuda/device/candidates.cuh"
#include "cuda/tuning.h"

namespace coterie::cuda {

constexpr int kOracleKeys = 64;  // of a tile
constexpr int kOracleLists = 4;  // of a row: one for each lane that holds scores of it
constexpr int kOracleOffered =
    kOracleKeys / kOracleLists;  // scores of a row that a lane has of a tile

// Of a list: a cut leaves a quarter of the top keys in each, and the next one should come late.
constexpr int oracle_capacity(int topk) {
  return (topk + kOracleLists - 1) / kOracleLists + 64 + kOracleOffered;
}
constexpr int kOracleMostOfLane = (kOracleLists * oracle_capacity(kMaxTopKeys) + 31) / 32;

// A lane's list of one row.
struct OracleList {
  CandidateKey* list;
  int count;
  float floor;  // scores below are no candidates

  __device__ bool filling(int capacity) const { return count > capacity - kOracleOffered; }

  // 4 scores: keys first, first + 1, first + 8, first + 9, those that admitted(key). NaN ranks
  // last.
  template <class Admitted>
  __device__ __forceinline__ void offer(float s0, float s1, float s2, float s3, int first,
                                        const Admitted& admitted) {
    if (fmaxf(fmaxf(s0, s1), fmaxf(s2, s3)) < floor) return;
    unsigned left = (s0 < floor ? 0u : 1u) | (s1 < floor ? 0u : 2u) | (s2 < floor ? 0u : 4u) |
                    (s3 < floor ? 0u : 8u);
    while (left) {
      const int i = __ffs(static_cast<int>(left)) - 1, key = first + (i & 1) + (i & 2) * 4;
      left &= left - 1;
      float score = i & 2 ? (i & 1 ? s3 : s2) : (i & 1 ? s1 : s0);
      if (isnan(score)) score = -FLT_MAX;
      if (score >= floor && admitted(key)) list[count++] = candidate_key(score, key);
    }
  }
};

// All candidates of the row of lanes 4 * quad .. 4 * quad + 3, spread over the lanes of the warp.
struct RowCandidates {
  CandidateKey keys[kOracleMostOfLane];  // 0: none
  CandidateKey* lists[kOracleLists];
  int total = 0;

  __device__ RowCandidates(const OracleList& own, int quad) {
    const auto address = reinterpret_cast<unsigned long long>(own.list);
    int ends[kOracleLists];
#pragma unroll
    for (int i = 0; i < kOracleLists; ++i) {
      lists[i] = reinterpret_cast<CandidateKey*>(__shfl_sync(~0u, address, 4 * quad + i));
      ends[i] = total += __shfl_sync(~0u, own.count, 4 * quad + i);
    }
#pragma unroll
    for (int t = 0; t < kOracleMostOfLane; ++t) {
      const int place = 32 * t + static_cast<int>(threadIdx.x) % 32;
      keys[t] = 0;
      if (place >= total) continue;
      const CandidateKey* from = lists[0] + place;
#pragma unroll
      for (int i = 1; i < kOracleLists; ++i)
        if (place >= ends[i - 1]) from = lists[i] + place - ends[i - 1];
      keys[t] = *from;
    }
  }
  // The worst of the best `wanted`, or 1, which is below all, where there are no more.
  __device__ CandidateKey cut(int wanted) const {
    if (total <= wanted) return 1;
    return find_cut(
        [&](const auto& visit) {
#pragma unroll
          for (int t = 0; t < kOracleMostOfLane; ++t)
            if (32 * t < total && keys[t] != 0) visit(keys[t]);
        },
        wanted, wanted);
  }
  // Calls keep(place, key) for the keys not below `cut`, places 0, 1, ...; returns their number.
  template <class Keep>
  __device__ int for_best(CandidateKey cut, const Keep& keep) const {
    int kept = 0;
#pragma unroll
    for (int t = 0; t < kOracleMostOfLane; ++t) {
      if (32 * t >= total) break;
      const unsigned votes = __ballot_sync(~0u, keys[t] >= cut);
      if (keys[t] >= cut) keep(kept + __popc(votes & ((1u << threadIdx.x % 32) - 1)), keys[t]);
      kept += __popc(votes);
    }
    __syncwarp();
    return kept;
  }
};

// Keeps the best `wanted` candidates of a row, dealt evenly to its lists, and raises its floor:
// keys to come have higher indices, so they must be strictly better than the worst. By all lanes;
// kept out of the registers of the kernel.
static __device__ __noinline__ OracleList cut_back(OracleList own, int quad, int wanted) {
  const RowCandidates row(own, quad);
  if (row.total <= wanted) return own;
  const CandidateKey cut = row.cut(wanted);
  row.for_best(cut, [&](int place, CandidateKey key) {
    row.lists[place % kOracleLists][place / kOracleLists] = key;
  });
  const int lane = threadIdx.x % 32;
  if (lane / 4 != quad) return own;
  own.count = (wanted - lane % 4 + kOracleLists - 1) / kOracleLists;
  own.floor = from_ordered(ordered(score_of(cut)) + 1);
  return own;
}

// Writes the indices of the best `topk` candidates of a row, ascending, -1 beyond them. By all
// lanes; `staged` is the warp's own room for kMaxTopKeys.
static __device__ __noinline__ void write_row(OracleList own, int quad, int topk,
                                              std::int32_t* staged, std::int32_t* to) {
  const int lane = threadIdx.x % 32;
  const RowCandidates row(own, quad);
  const int count = row.for_best(
      row.cut(topk), [&](int place, CandidateKey key) { staged[place] = index_of(key); });
  for (int i = lane; i < count; i += 32) {
    int place = 0;
    for (int j = 0; j < count; ++j) place += staged[j] < staged[i];
    to[place] = staged[i];
  }
  for (int i = count + lane; i < topk; i += 32) to[i] = -1;
  __syncwarp();
}

// Cuts back the lists that may overflow with the next tile.
__device__ __forceinline__ void make_room(OracleList (&lists)[4], int capacity, int wanted) {
  bool filling = false;
#pragma unroll
  for (int r = 0; r < 4; ++r) filling |= lists[r].filling(capacity);
  if (!__any_sync(~0u, filling)) return;
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const unsigned full = __ballot_sync(~0u, lists[r].filling(capacity));
#pragma unroll 1
    for (int quad = 0; quad < 8; ++quad)
      if (full >> (4 * quad) & 15u) lists[r] = cut_back(lists[r], quad, wanted);
  }
}

}  // namespace coterie::cuda
