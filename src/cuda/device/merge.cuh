// SPDX-License-Identifier: MIT
// Last step of the selection of top keys: from the lists of candidates of a row to its top keys, by
// a warp (attend_centroid_select.cu).
#pragma once

#include <cstdint>

#include "cuda/device/candidates.cuh"
#include "cuda/device/select.cuh"
#include "cuda/tuning.h"

namespace coterie::cuda {

constexpr int kRankedSpare = 16;  // the cut before the ranking may leave so many more than wanted
constexpr int kMaxRanked = 176;
constexpr int kStaged = 512;  // candidates of a row that are kept on the chip

// Candidates beyond those asked for that are scored again.
constexpr int spare_keys(std::int64_t topk) { return static_cast<int>(topk / 8) + 4; }
static_assert(kMaxTopKeys + spare_keys(kMaxTopKeys) + kRankedSpare <= kMaxRanked, "room to rank");

// Shared memory of a warp.
struct MergeMemory {
  CandidateKey staged[kStaged], ranked[kMaxRanked];
  float mean[kMaxHeadDim];
};

// sign * mean . key for 4 keys at a time, by 8 lanes each.
template <class T>
struct ExactScores {
  static constexpr int kVector = 16 / sizeof(T);
  Rows<const T> rows;
  const float* mean;

  __device__ float dot(const uint4& words, int column) const {
    union {
      uint4 words;
      T elements[kVector];
    } chunk;
    chunk.words = words;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kVector; ++i)
      sum = fmaf(mean[column + i], to_float(chunk.elements[i]), sum);
    return sum;
  }
  // The sum of eight lanes' parts becomes the score of key i.
  __device__ void write(CandidateKey* keys, int i, int count, float sum, int index) const {
#pragma unroll
    for (int step = 4; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (threadIdx.x % 8 == 0 && i < count)
      keys[i] = candidate_key(isnan(sum) ? -INFINITY : sum, index);
  }
  // Replaces keys' scores; mean has zeros up to kMaxHeadDim. No branches around loads: those of
  // many keys are on their way together.
  __device__ void rescore(CandidateKey* keys, int count) const {
    constexpr int kUnroll = 8;
    const int lane = threadIdx.x % 32, column = lane % 8 * kVector;
    if (!rows.aligned) return rescore_slowly(keys, count);
    for (int first = 0; first < count; first += 4 * kUnroll) {
      float sums[kUnroll] = {};
      int indices[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u)
        indices[u] = index_of(keys[min(first + 4 * u + lane / 8, count - 1)]);
      __syncwarp();
      for (int shift = 0; shift < rows.width; shift += 8 * kVector) {
        const bool inside = shift + column < rows.width;
        uint4 words[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u)
          words[u] =
              *reinterpret_cast<const uint4*>(rows.row(indices[u]) + (inside ? shift + column : 0));
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) sums[u] += inside ? dot(words[u], shift + column) : 0.0f;
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u)
        write(keys, first + 4 * u + lane / 8, count, sums[u], indices[u]);
      __syncwarp();
    }
  }
  __device__ void rescore_slowly(CandidateKey* keys, int count) const {
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int first = 0; first < count; first += 4) {
      const int index = index_of(keys[min(first + lane / 8, count - 1)]);
      __syncwarp();
      float sum = 0.0f;
#pragma unroll 1
      for (int d = lane % 8; d < rows.width; d += 8)
        sum = fmaf(mean[d], to_float(rows.row(index)[d]), sum);
      write(keys, first + lane / 8, count, sum, index);
      __syncwarp();
    }
  }
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

// Writes the indices of the best `topk` of `count` keys, ascending, -1 beyond them; `kept` is room
// for topk keys.
__device__ __forceinline__ void write_best(const CandidateKey* keys, int count, int topk,
                                           CandidateKey* kept, std::int32_t* top) {
  const int lane = threadIdx.x % 32;
  const auto each = [&](const auto& visit) {
    for (int i = lane; i < count; i += 32) visit(keys[i]);
  };
  const int number = collect(each, count > topk ? find_cut(each, topk, topk) : 0, kept);
  for (int i = lane; i < number; i += 32) {
    const int index = index_of(kept[i]);
    int place = 0;
#pragma unroll 8
    for (int j = 0; j < number; ++j) place += index_of(kept[j]) < index;
    top[place] = index;
  }
  for (int i = number + lane; i < topk; i += 32) top[i] = -1;
}

// The same for up to 64 keys, two of each lane in registers.
__device__ __forceinline__ void write_best_few(const CandidateKey* keys, int count, int topk,
                                               std::int32_t* kept, std::int32_t* top) {
  const int lane = threadIdx.x % 32;
  std::uint32_t scores[2];
  int indices[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const CandidateKey key = lane + 32 * i < count ? keys[lane + 32 * i] : 0;
    scores[i] = static_cast<std::uint32_t>(key >> 32);
    indices[i] = index_of(key);
  }
  const auto reached = [&](std::uint32_t cut) {
    return __popc(__ballot_sync(~0u, scores[0] >= cut)) +
           __popc(__ballot_sync(~0u, scores[1] >= cut));
  };
  // The largest cut that enough reach; only keys that are equal to it may then be too many.
  std::uint32_t cut = 0;
  if (count > topk) {
    for (std::uint32_t bit = 1u << 31; bit > 0; bit >>= 1) {
      const int number = reached(cut | bit);
      if (number >= topk) cut |= bit;
      if (number == topk) break;
    }
  }
  bool keep[2] = {lane < count && scores[0] >= cut, lane + 32 < count && scores[1] >= cut};
  if (const int spare = reached(max(cut, 1u)) - topk; spare > 0 && count > topk) {
    // Of those equal to the cut the ones with the largest indices go.
    int behind[2] = {};
    for (int j = 0; j < count; ++j) {
      const bool ties = static_cast<std::uint32_t>(keys[j] >> 32) == cut;
      const int index = index_of(keys[j]);
#pragma unroll
      for (int i = 0; i < 2; ++i) behind[i] += ties && index > indices[i];
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) keep[i] = keep[i] && (scores[i] > cut || behind[i] >= spare);
  }
  const std::uint32_t votes[2] = {__ballot_sync(~0u, keep[0]), __ballot_sync(~0u, keep[1])};
  const std::uint32_t before = (1u << lane) - 1;
  const int number = __popc(votes[0]) + __popc(votes[1]);
  if (keep[0]) kept[__popc(votes[0] & before)] = indices[0];
  if (keep[1]) kept[__popc(votes[0]) + __popc(votes[1] & before)] = indices[1];
  __syncwarp();
  for (int i = lane; i < number; i += 32) {
    const int index = kept[i];
    int place = 0;
#pragma unroll 8
    for (int j = 0; j < number; ++j) place += kept[j] < index;
    top[place] = index;
  }
  for (int i = number + lane; i < topk; i += 32) top[i] = -1;
}

// Writes the top keys of a cluster from `total` lists; list(i) is the number of the i-th.
template <class T, class List>
__device__ __forceinline__ void merge_lists(const SelectArgs<T>& args, int item, int head,
                                            int cluster, int total, const List& list,
                                            MergeMemory& memory) {
  const CentroidQueries& queries = args.queries;
  const int lane = threadIdx.x % 32;
  const std::int64_t row = queries.row(item, head, cluster);
  const float* mean = queries.centroids + row * queries.width;
#pragma unroll
  for (int d = lane; d < kMaxHeadDim; d += 32)
    memory.mean[d] = (d < queries.width ? mean[d] : 0.0f) * queries.sign;
  const auto listed = [&](const auto& visit) {
    for (int number = lane; number < total; number += 32) {
      const std::int64_t at = list(number);
      const int count = args.counts[at];
#pragma unroll 4
      for (int i = 0; i < count; ++i) visit(candidate_key(args.candidates[at * args.capacity + i]));
    }
  };
  int own = 0;
  for (int number = lane; number < total; number += 32) own += args.counts[list(number)];
  const int all = __reduce_add_sync(~0u, own), most = args.wanted + kRankedSpare;
  const auto copy = [&](CandidateKey* to) {
    int place = sum_before(own);
    for (int number = lane; number < total; number += 32) {
      const std::int64_t at = list(number);
      const int count = args.counts[at];
      constexpr int kBatch = 8;  // loads on their way
      for (int first = 0; first < count; first += kBatch) {
        Candidate batch[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
          batch[i] = args.candidates[at * args.capacity + min(first + i, count - 1)];
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
          if (first + i < count) to[place++] = candidate_key(batch[i]);
      }
    }
    __syncwarp();
  };
  int count = all;
  if (all <= most) {
    copy(memory.ranked);
  } else if (all <= kStaged) {
    copy(memory.staged);
    const auto staged = [&](const auto& visit) {
      for (int i = lane; i < all; i += 32) visit(memory.staged[i]);
    };
    count = collect(staged, find_cut(staged, args.wanted, most), memory.ranked);
  } else {
    count = collect(listed, find_cut(listed, args.wanted, most), memory.ranked);
  }
  const ExactScores<T> exact{args.keys(queries.spans.k.span(item), head), memory.mean};
  exact.rescore(memory.ranked, count);
  std::int32_t* top = args.top_keys + row * args.topk;
  if (count <= 64)
    write_best_few(memory.ranked, count, args.topk, reinterpret_cast<std::int32_t*>(memory.staged),
                   top);
  else
    write_best(memory.ranked, count, args.topk, memory.staged, top);
  __syncwarp();
}

}  // namespace coterie::cuda
