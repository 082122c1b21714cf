// SPDX-License-Identifier: MIT
// The backward pass of lists that fit a block as a whole (attend_whole_list_bwd_sm90a.cu): up to
// 256 queries and 256 keys, of rows of up to 64 elements. Its shared memory, and how it is filled.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/device/list_bwd_block.cuh"
#include "cuda/device/list_stream_copy.cuh"
#include "cuda/device/warp.cuh"

namespace coterie::cuda {

constexpr int kWholeTiles = 4;                          // of 64 ranks, of either side
constexpr int kWholeRanks = kWholeTiles * kStreamRows;  // of a list
constexpr int kTileBytes = kStreamRows * 128;           // of a tensor
constexpr int kQueryPlaces = 3, kKeyPlaces = 2;         // tiles of queries, lists of keys

// log2 of ListBackwardArgs::weight_scale.
template <class T>
__device__ constexpr float scale_bits() {
  return std::is_same_v<T, F16> ? kHalfWeightBits : 0.0f;
}

// A list, as computing warps need to know it.
struct WholeList {
  int queries, keys;
  int key_tiles[kWholeTiles];  // that a tile of queries sees, from the first on
  float score;                 // factor of scores
  std::int64_t q_slot, k_slot;
};
// 64 queries, beside their rows and output gradients.
struct alignas(16) QueryLimits {
  float shift[2];  // of logits in base 2; weights have that of the output gradient in them
  int end[2];      // of the ranks in sight; those beyond the list have that of its last one
};
struct WholeQueries {
  QueryLimits limits[kStreamRows / 2];  // of neighbours
  float2 score[kStreamRows];            // mean of the row and factor of its scores, in base 2
  float2 gradient[kStreamRows];         // inverse of the row, what makes a weighted sum its mean
};

struct WholeShape {
  static constexpr int kThreads = 3 * kWarpgroup;
  static constexpr int kKeysAt = kQueryPlaces * 2 * kTileBytes;
  static constexpr int kSlopesAt = kKeysAt + kKeyPlaces * 2 * kWholeTiles * kTileBytes;
  static constexpr int kQueryFactsAt = kSlopesAt + kWholeTiles * kTileBytes;
  static constexpr int kKeyFactsAt =
      kQueryFactsAt + kQueryPlaces * static_cast<int>(sizeof(WholeQueries));
  static constexpr int kPartsAt =
      kKeyFactsAt + kKeyPlaces * kWholeRanks * static_cast<int>(sizeof(RowStatistics));
  static constexpr int kListsAt = kPartsAt + 2 * 8 * 32 * 4;
  static constexpr int kBarriersAt = kListsAt + kKeyPlaces * static_cast<int>(sizeof(WholeList));
  static constexpr int kBytes = kBarriersAt + 2 * (kQueryPlaces + kKeyPlaces + 1) * 8;
  static_assert(kBytes <= 227 * 1024, "more than the shared memory of a block");
  unsigned char* memory;
  std::uint32_t base;

  __device__ explicit WholeShape(unsigned char* at) : memory(at), base(shared_address(at)) {}

  // Tensors: queries and output gradients; keys and values.
  __device__ std::uint32_t queries(int place, int tensor) const {
    return base + (2 * place + tensor) * kTileBytes;
  }
  __device__ std::uint32_t keys(int place, int tensor, int tile) const {
    return base + kKeysAt + ((2 * place + tensor) * kWholeTiles + tile) * kTileBytes;
  }
  // dS, a row for each key, of 64 queries.
  __device__ std::uint32_t slopes(int tile) const { return base + kSlopesAt + tile * kTileBytes; }
  __device__ WholeQueries& query_facts(int place) const {
    return reinterpret_cast<WholeQueries*>(memory + kQueryFactsAt)[place];
  }
  __device__ RowStatistics* key_stats(int place) const {
    return reinterpret_cast<RowStatistics*>(memory + kKeyFactsAt) + place * kWholeRanks;
  }
  // Sums of 32 queries over the keys of a warp, in turn.
  __device__ float* parts(int turn) const {
    return reinterpret_cast<float*>(memory + kPartsAt) + turn % 2 * 8 * 32;
  }
  __device__ WholeList& list(int place) const {
    return reinterpret_cast<WholeList*>(memory + kListsAt)[place];
  }
  __device__ std::uint32_t queries_full(int place) const { return base + kBarriersAt + place * 8; }
  __device__ std::uint32_t queries_empty(int place) const {
    return queries_full(place) + kQueryPlaces * 8;
  }
  __device__ std::uint32_t keys_full(int place) const {
    return base + kBarriersAt + (2 * kQueryPlaces + place) * 8;
  }
  __device__ std::uint32_t keys_empty(int place) const { return keys_full(place) + kKeyPlaces * 8; }
  // Both computing warpgroups meet: parts of delta are there, and slopes.
  __device__ PartBarrier<2 * kWarpgroup> deltas() const { return {3, keys_empty(kKeyPlaces)}; }
  __device__ PartBarrier<2 * kWarpgroup> slopes_there() const { return {4, deltas().memory + 8}; }

  __device__ void init() const {
    const int place = static_cast<int>(threadIdx.x);
    if (place < kQueryPlaces) {
      mbarrier_init(queries_full(place), 4 * (32 + kWarpArrivals));
      mbarrier_init(queries_empty(place), 8 * kWarpArrivals);
    }
    if (place < kKeyPlaces) {
      mbarrier_init(keys_full(place), 4 * (32 + kWarpArrivals));
      mbarrier_init(keys_empty(place), 8 * kWarpArrivals);
    }
    if (place == 0) {
      deltas().init();
      slopes_there().init();
    }
    __syncthreads();
  }
};

}  // namespace coterie::cuda
