// SPDX-License-Identifier: MIT
// Exact scores of candidates for the top keys of a mean, by a warp.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/device/candidates.cuh"
#include "cuda/device/load.cuh"

namespace coterie::cuda {

// Sums over eight lanes side by side; lane l has that of sums[l % 8] afterwards.
__device__ __forceinline__ float eight_sums(const float (&sums)[8]) {
  const int lane = threadIdx.x % 32;
  float four[4], two[2];
#pragma unroll
  for (int u = 0; u < 4; ++u) {
    const float other = __shfl_xor_sync(~0u, lane & 4 ? sums[u] : sums[u + 4], 4);
    four[u] = (lane & 4 ? sums[u + 4] : sums[u]) + other;
  }
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    const float other = __shfl_xor_sync(~0u, lane & 2 ? four[u] : four[u + 2], 2);
    two[u] = (lane & 2 ? four[u + 2] : four[u]) + other;
  }
  const float other = __shfl_xor_sync(~0u, lane & 1 ? two[0] : two[1], 1);
  return (lane & 1 ? two[1] : two[0]) + other;
}

// sign * mean . key for 32 keys at a time, by 8 lanes each.
template <class T>
struct ExactScores {
  static constexpr int kVector = 16 / sizeof(T);
  Rows<const T> rows;
  const float* mean;

  __device__ static CandidateKey key_of(float sum, int index) {
    return candidate_key(isnan(sum) ? -INFINITY : sum, index);
  }
  // Replaces keys' scores; mean has zeros up to kMaxHeadDim. No branches around loads: those of
  // many keys are on their way together.
  __device__ void rescore(CandidateKey* keys, int count) const {
    const int lane = threadIdx.x % 32, column = lane % 8 * kVector;
    if (!rows.aligned) return rescore_slowly(keys, count);
#pragma unroll 1
    for (int first = 0; first < count; first += 32) {
      float sums[8] = {};
#pragma unroll 1
      for (int shift = 0; shift < rows.width; shift += 8 * kVector) {
        const bool inside = shift + column < rows.width;
        uint4 words[8];
#pragma unroll
        for (int u = 0; u < 8; ++u) {
          const int index = index_of(keys[min(first + 4 * u + lane / 8, count - 1)]);
          words[u] =
              *reinterpret_cast<const uint4*>(rows.row(index) + (inside ? shift + column : 0));
        }
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          const float factor = inside ? mean[shift + column + i] : 0.0f;
#pragma unroll
          for (int u = 0; u < 8; ++u)
            sums[u] = fmaf(factor, to_float(reinterpret_cast<const T*>(&words[u])[i]), sums[u]);
        }
      }
      const float sum = eight_sums(sums);
      const int own = first + 4 * (lane % 8) + lane / 8;
      const int index = index_of(keys[min(own, count - 1)]);
      __syncwarp();
      if (own < count) keys[own] = key_of(sum, index);
    }
    __syncwarp();
  }
  __device__ void rescore_slowly(CandidateKey* keys, int count) const {
    for (int i = threadIdx.x % 32; i < count; i += 32) {
      const int index = index_of(keys[i]);
      float sum = 0.0f;
#pragma unroll 1
      for (int d = 0; d < rows.width; ++d) sum = fmaf(mean[d], to_float(rows.row(index)[d]), sum);
      keys[i] = key_of(sum, index);
    }
    __syncwarp();
  }
};

}  // namespace coterie::cuda
