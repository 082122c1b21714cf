// SPDX-License-Identifier: MIT
// Near keys of clustered attention (near.h): what the kernels of several files share.
#pragma once

#include <climits>
#include <cstdint>

#include "cuda/clustered/centroid.cuh"

namespace coterie::cuda {

// Below all other shifts, but finite: scores of -inf have weight 0 from the start.
constexpr float kLowestFar = -3e38f;

// Near pairs: a block of 4 warps owns 64 positions of one side and walks those of the other, 128 at
// a time, or 64 if rows have more than 128 bytes.
constexpr int kNearThreads = 128, kNearOwned = 64;
template <class T, int kDim>
constexpr int kNearWalked = Tile<T, kDim>::kRowBytes <= 128 ? 128 : 64;

// Positions that are near a position, of a sequence of `length`. As blocks have a multiple of 16
// positions, 16 positions from a multiple of 16 on have the same ones.
struct NearRange {
  int begin, end;

  __device__ NearRange(int position, int near, int length) {
    const int block = position / near;
    begin = max(block - 1, 0) * near;
    end = min((block + 2) * near, length);
  }
};

// Sums relative to a shift in base 2, for rows of floats.
struct RowSums {
  float2* rows;  // shift, sum
  float* outs;   // (.., pitch)
};

// Sums of a member's far keys on one side of its near ones, divided by their weights.
template <class T>
struct MemberRows {
  float* lse;  // of the weights, base 2; kLowestFar if there are none
  T* outs;     // (.., pitch)
};

// Far keys of heads that add: for every query, those of the chunk of keys that its near keys begin
// or end in, and for every cluster those of all chunks before and after a chunk.
template <class T>
struct FarSums {
  ItemChunks chunks;
  MemberRows<T> before, after;                  // (B, H, N)
  RowSums totals, chunks_before, chunks_after;  // (slots, H, C)
};

// Which heads of an item add: those of a key head all do, or none.
struct FarHeads {
  const std::int32_t* cancels;  // (items, key heads): not 0 for heads that add; null: all add
  int key_heads, group;

  __device__ bool add(int item, int head) const {
    return !cancels || cancels[item * key_heads + head / group] != 0;
  }
};

// far_forward.cu
template <class T>
struct FarForward {
  CentroidQueries queries;
  Tensor4<const T> k, v;
  const std::int32_t *top_keys, *order;
  int topk, N, near, pitch;
  FarHeads heads;
  FarSums<T> sums;
};
template <class T>
void sum_far_keys(const FarForward<T>& args, cudaStream_t stream);

// The means rounded to T, rows of `pitch` elements: the right size for a gather. near_forward.cu
template <class T>
void round_means(const CentroidQueries& queries, int items, T* to, int pitch, cudaStream_t stream);

// Sets the bits of those keys begin .. begin + 32 kWords - 1 that are top keys of a row's cluster;
// the words must be 0. clusters: of kRows rows, -1 for none; lists: of the item's head. By all
// threads of the block.
template <int kRows, int kWords>
__device__ __forceinline__ void mark_top_keys(std::uint32_t* words, const std::int32_t* clusters,
                                              const std::int32_t* lists, int topk, int begin) {
  const auto mark = [&](int row, int key) {
    const auto at = static_cast<unsigned>(key - begin);
    if (key >= 0 && at < 32u * kWords) atomicOr(words + row * kWords + at / 32, 1u << at % 32);
  };
  if (topk % 4 == 0 && reinterpret_cast<std::uintptr_t>(lists) % 16 == 0) {
    const int fours = topk / 4;
#pragma unroll 4
    for (int i = threadIdx.x; i < kRows * fours; i += kNearThreads) {
      const int row = i / fours;
      if (clusters[row] < 0) continue;
      const int4 keys = *reinterpret_cast<const int4*>(
          lists + static_cast<std::int64_t>(clusters[row]) * topk + i % fours * 4);
      mark(row, keys.x), mark(row, keys.y), mark(row, keys.z), mark(row, keys.w);
    }
    return;
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < kRows * topk; i += kNearThreads)
    if (const int row = i / topk; clusters[row] >= 0)
      mark(row, lists[static_cast<std::int64_t>(clusters[row]) * topk + i % topk]);
}

}  // namespace coterie::cuda
