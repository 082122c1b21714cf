// SPDX-License-Identifier: MIT
// Near keys of clustered attention (near.h): what the kernels of several files share.
#pragma once

#include <climits>
#include <cstdint>

#include "cuda/clustered/centroid.cuh"
#include "cuda/prim/row_chunk.cuh"

namespace coterie::cuda {

// Near pairs: a block of 4 warps owns 64 positions of one side and walks those of the other, 128 at
// a time, or 64 or 32 if rows have 256 or 512 bytes.
constexpr int kNearThreads = 128, kNearOwned = 64;
template <class T, int kDim>
constexpr int kNearWalked = Tile<T, kDim>::kRowBytes <= 128   ? 128
                            : Tile<T, kDim>::kRowBytes <= 256 ? 64
                                                              : 32;

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
  float* lse;  // of the weights, base 2; kLowestShift if there are none
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
// Whether one of `count` flags is set; by all threads of the block. Kernels of the heads that add
// ask first, because there usually are none.
__device__ __forceinline__ bool any_set(const std::int32_t* flags, int count) {
  int found = 0;
  for (int i = static_cast<int>(threadIdx.x); i < count; i += static_cast<int>(blockDim.x))
    found |= flags[i];
  return __syncthreads_or(found) != 0;
}

// Which of its cluster's top keys are near a query: ranks [first, first + count) of the list.
struct NearTopKeys {
  std::uint32_t bits;

  __device__ static NearTopKeys of(int first, int count) {
    return {static_cast<std::uint32_t>(first) | static_cast<std::uint32_t>(count) << 16};
  }
  // Calls body(key) for them.
  template <class Body>
  __device__ __forceinline__ void for_each(const std::int32_t* list, const Body& body) const {
    const int first = static_cast<int>(bits & 0xffffu), count = static_cast<int>(bits >> 16);
#pragma unroll 1
    for (int i = 0; i < count; ++i) body(list[first + i]);
  }
};
// Finds them for all queries, (B, H, N). near_forward.cu
void find_near_top_keys(const CentroidQueries& queries, const std::int32_t* labels,
                        const std::int32_t* top_keys, int items, int topk, int N, int near,
                        NearTopKeys* to, cudaStream_t stream);

// Sets the bits of those near top keys of kRows rows that are keys begin .. begin + 32 kWords - 1;
// the words must be 0. clusters: of the rows, -1 for none; lists: of the item's head; own: of the
// first row. By all threads of the block, one for each row.
template <int kRows, int kWords>
__device__ __forceinline__ void mark_top_keys(std::uint32_t* words, const std::int32_t* clusters,
                                              const std::int32_t* lists, int topk,
                                              const NearTopKeys* own, int begin) {
  static_assert(kRows <= kNearThreads, "a thread for each row");
  const int row = static_cast<int>(threadIdx.x);
  if (row >= kRows || clusters[row] < 0) return;
  own[row].for_each(lists + static_cast<std::int64_t>(clusters[row]) * topk, [&](int key) {
    const auto at = static_cast<unsigned>(key - begin);
    if (at < 32u * kWords) words[row * kWords + at / 32] |= 1u << at % 32;
  });
}

// The forward pass. Subtracting: for all heads; sets `cancels` for those that must add.
template <class T>
struct NearArgs {
  CentroidQueries queries;
  ItemChunks tiles;  // of queries
  Tensor4<const T> q, k, v;
  const std::int32_t *labels, *top_keys;
  const NearTopKeys* near_top;  // (B, H, N), with top keys
  int topk, N, near, pitch;
  const T* top;  // outputs of top keys that are not near (B, H, N, Dv), and their lse; or null
  const float* top_lse;
  const T* means;                // subtracting: (items, H, C, pitch)
  const float *mean_lse, *rest;  // and their attention over the keys that are not top keys
  FarSums<T> far;                // adding
  FarHeads heads;                // those that add
  std::int32_t* cancels;         // subtracting: set for heads that must add
  Tensor4<T> out;
  float* lse;
};

// The mean's sum over keys that are not top keys may be this many times the query's sum of weights.
constexpr float kMostCancelled = 8.0f;

// Two neighbouring elements of a row, aligned to their size.
template <class T>
__device__ __forceinline__ float2 load2(const T* from) {
  if constexpr (sizeof(T) == 4)
    return *reinterpret_cast<const float2*>(from);
  else
    return unpack2<T>(*reinterpret_cast<const std::uint32_t*>(from));
}

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

// The kernels of near_forward_sm90a.cu and near_backward_sm90a.cu, for 16-bit types: the near keys
// of all heads, and their gradients.
template <class T>
void attend_near_sm90a(const NearArgs<T>& args, cudaStream_t stream);
template <class T>
void near_query_gradients_sm90a(const BackwardArgs<T>& args, const CentroidQueries& queries,
                                cudaStream_t stream);
template <class T>
void near_key_gradients_sm90a(const BackwardArgs<T>& args, const CentroidQueries& queries,
                              cudaStream_t stream);

}  // namespace coterie::cuda
