// SPDX-License-Identifier: MIT
// The one-kernel k-means of key_kmeans_sm90a.cu: its sizes, arguments and shared memory, and what
// keeps values out of registers.
#pragma once

#include <cstdint>

#include "cuda/device/nearest.cuh"
#include "cuda/device/team.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/device/wgmma.cuh"
#include "cuda/key_kmeans.h"

namespace coterie::cuda {

namespace key_kmeans_detail {

constexpr int kGroups = 4, kThreads = kGroups * kWarpgroup, kWarps = kThreads / 32;
constexpr int kWidth = 64, kClusters = 64 * kGroups;
constexpr int kOwn = kClusters / kWarps;          // clusters of a warp
constexpr int kRound = 64 * kGroups, kSlots = 4;  // rows; rounds in shared memory
constexpr int kTileBytes = 64 * 128, kSlotBytes = kGroups * kTileBytes;
constexpr int kBiasBytes = 32;        // of a centroid: hi, mid, lo, 1, and zeros
constexpr int kStep = 64;             // centroids at a time
constexpr int kMostParts = 8;         // of a problem's rows
constexpr int kSamples = 8 * kWidth;  // keys of the covariance, at most
// Of a table of centroids: rows, then biases; in global memory bounds of the blocks' warps behind.
constexpr int kTableBytes = kClusters * (128 + kBiasBytes);
constexpr int kSharedTableBytes = kTableBytes + kMostParts * kWarps * 8;

template <class T>
struct KeyKMeansArgs {
  ClusterShape shape;
  Teams teams;
  Tensor4<const T> q, k;
  float *covariance, *centroids, *sums;
  unsigned char* tables;
  std::int32_t *counts, *ranks;
  KeyKMeansRun run;
  int width;
  unsigned key_scale;  // 512, unknown to the compiler: see best_key
};

// Shared memory of a block, at a multiple of 1024 bytes.
struct Memory {
  unsigned char ring[kSlots * kSlotBytes];   // rows; before them keys and centroids
  unsigned char table[kTableBytes];          // m_c, and biases in bf16 parts; before, key products
  unsigned char metric[2][kTileBytes];       // the covariance in bf16: high parts, low parts
  std::uint32_t lists[kWarps][kRound + 16];  // rows of a warp's clusters
  std::uint8_t labels[kSlots][kRound];       // of row r at r % 32 * 8 + r / 32
  float column_sums[4][kWidth];              // of the keys, by warps
  alignas(16) float reference[kWidth];       // the fixed query
  uint2 bounds[kWarps];
  std::int32_t numbers[kSamples];       // rows of the sampled keys
  std::int32_t initial[kClusters + 1];  // rows of the first centroids; places of the clusters
  int2 scan[kWarps];
  std::uint64_t ready[kSlots], free[kSlots];
  RowRange share;  // of the centroids, for this block
  int poisoned;    // a row of cluster 0 is not finite
};

// The same value, but of unknown origin: what depends on it is no constant of the loops around, for
// which there are no registers. Local memory is far away here, with so little L1 left.
template <class Value>
__device__ __forceinline__ Value afresh(Value value) {
  if constexpr (sizeof(Value) == 8)
    asm volatile("" : "+l"(value));
  else
    asm volatile("" : "+r"(value));
  return value;
}

using cuda::uniform;  // beside the one below
__device__ __forceinline__ ItemSpan uniform(const ItemSpan& span) {
  return {uniform(span.batch), uniform(span.begin), uniform(span.length)};
}

// a / b in a few instructions, exact where the quotient is a float; `inverse` is 1 / b, rounded.
__device__ __forceinline__ float divide(float a, float b, float inverse) {
  const float quotient = a * inverse;
  return fmaf(fmaf(-quotient, b, a), inverse, quotient);
}

// The same rows, with what key_kmeans_serves has asked for known to the compiler.
template <class T>
__device__ __forceinline__ Rows<const T> aligned_rows(Rows<const T> rows) {
  rows.aligned = true;
  return rows;
}

}  // namespace key_kmeans_detail

}  // namespace coterie::cuda
