// SPDX-License-Identifier: MIT
// Exact scores of candidates for the top keys of a mean, two means of a warp side by side.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/device/candidates.cuh"
#include "cuda/device/half_warp.cuh"
#include "cuda/device/load.cuh"

namespace coterie::cuda {

// Values, not references: of a choice between two elements the compiler makes a local array.
__device__ __forceinline__ float exchange(bool upper, float low, float high, int step) {
  return (upper ? high : low) + __shfl_xor_sync(~0u, upper ? low : high, step);
}

// Sums over eight lanes side by side; lane l has that of sums[l % 8] afterwards.
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
  static constexpr int kTogether = 8;  // keys of a lane, whose loads are on their way together
  Rows<const T> rows;                  // the same for both rows of the warp
  const float* mean;
  float sign;

  __device__ static CandidateKey key_of(float sum, int index) {
    return candidate_key(isnan(sum) ? -INFINITY : sum, index);
  }
  // Replaces the scores of keys[0, count), of which the first one is a valid key at any rate.
  // `most`: the larger count of both rows.
  __device__ __forceinline__ void rescore(CandidateKey* keys, int count, int most) const {
    if (!rows.aligned) return rescore_slowly(keys, count);
    const int lane = row_lane();
#pragma unroll 1
    for (int first = 0; first < most; first += 2 * kTogether) {
      float sums[kTogether] = {};
#pragma unroll 1
      for (int shift = 0; shift < rows.width; shift += 8 * kVector) {
        const int column = shift + lane % 8 * kVector;
        const bool inside = column < rows.width;
        const int place = inside ? column : 0;
        uint4 words[kTogether];
#pragma unroll
        for (int u = 0; u < kTogether; ++u) {
          const int at = max(min(first + 2 * u + lane / 8, count - 1), 0);
          words[u] = *reinterpret_cast<const uint4*>(rows.row(index_of(keys[at])) + place);
        }
        float factors[kVector];  // rows of whole 16 bytes: so are those of the means
#pragma unroll
        for (int i = 0; i < kVector; i += 4) {
          const float4 four = *reinterpret_cast<const float4*>(mean + place + i);
#pragma unroll
          for (int e = 0; e < 4; ++e) factors[i + e] = inside ? (&four.x)[e] : 0.0f;
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
    for (int i = row_lane(); i < count; i += kRowLanes) {
      const int index = index_of(keys[i]);
      float sum = 0.0f;
#pragma unroll 1
      for (int d = 0; d < rows.width; ++d) sum = fmaf(mean[d], to_float(rows.row(index)[d]), sum);
      keys[i] = key_of(sum * sign, index);
    }
    __syncwarp();
  }
};

}  // namespace coterie::cuda
