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

  __device__ uint4 load(int key, int column) const {
    if (column >= rows.width) return make_uint4(0, 0, 0, 0);
    const T* row = rows.row(key);
    return rows.aligned ? *reinterpret_cast<const uint4*>(row + column)
                        : load_chunk(row, column, rows.width);
  }
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
  // Replaces keys' scores; mean has zeros up to kMaxHeadDim.
  __device__ void rescore(CandidateKey* keys, int count) const {
    constexpr int kUnroll = 8;
    const int lane = threadIdx.x % 32, column = lane % 8 * kVector;
    for (int first = 0; first < count; first += 4 * kUnroll) {
      float sums[kUnroll] = {};
      int indices[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u)
        indices[u] = index_of(keys[min(first + 4 * u + lane / 8, count - 1)]);
      for (int shift = 0; shift < rows.width; shift += 8 * kVector) {
        uint4 words[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) words[u] = load(indices[u], shift + column);
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) sums[u] += dot(words[u], shift + column);
      }
      __syncwarp();
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        float sum = sums[u];
#pragma unroll
        for (int step = 4; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
        const int i = first + 4 * u + lane / 8;
        if (lane % 8 == 0 && i < count)
          keys[i] = candidate_key(isnan(sum) ? -INFINITY : sum, indices[u]);
      }
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

// Writes the top keys of a cluster from `total` lists; list(i) is the number of the i-th.
template <class T, class List>
__device__ __forceinline__ void merge_lists(const SelectArgs<T>& args, int item, int head,
                                            int cluster, int total, const List& list,
                                            MergeMemory& memory) {
  const CentroidQueries& queries = args.queries;
  const int lane = threadIdx.x % 32;
  const std::int64_t row = queries.row(item, head, cluster);
  const float* mean = queries.centroids + row * queries.width;
  for (int d = lane; d < kMaxHeadDim; d += 32)
    memory.mean[d] = d < queries.width ? mean[d] * queries.sign : 0.0f;
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
    listed([&](CandidateKey key) { to[place++] = key; });
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
  write_best(memory.ranked, count, args.topk, memory.staged, args.top_keys + row * args.topk);
  __syncwarp();
}

}  // namespace coterie::cuda
