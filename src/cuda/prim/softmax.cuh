// SPDX-License-Identifier: MIT
// Running softmax of the rows of a 16 x 16 m accumulator, base 2. A lane holds rows l/4 and l/4 +
// 8; the four lanes of a row agree on its shift.
#pragma once

#include <cmath>
#include <cstdint>

namespace coterie::cuda {

constexpr float kLog2e = 1.44269504088896f, kLn2 = 0.693147180559945f;

// The natural log-sum-exp of a row whose weights are 2^(score - shift); -inf without keys.
__device__ __forceinline__ float row_lse(float shift, float sum) {
  return sum == 0.0f ? -INFINITY : (shift + log2f(sum)) * kLn2;
}

__device__ __forceinline__ float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float log2_approximate(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float reciprocal_approximate(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

// Below all other shifts, but finite: scores of -inf have weight 0 from the start.
constexpr float kLowestShift = -3e38f;

// 2^(score * exponent - shift), with the product rounded as shifts are: beyond 2^24 an exact
// product minus a rounded shift would be far from 0 even for the largest score.
__device__ __forceinline__ float shifted_weight(float score, float exponent, float shift) {
  return exp2_approximate(__fmul_rn(score, exponent) - shift);
}

// Weights are shifted_weight(score, exponent, shift). The shift follows the largest score only when
// that is kSlack above it: sums stay far from overflow, and rows are rarely rescaled.
struct RowSoftmax {
  static constexpr float kSlack = 8.0f;
  float shift = -INFINITY;
  float sum = 0.0f;  // of this lane's weights

  // The largest score that needs no new shift; `inverse` is 1 / exponent.
  __device__ float limit(float inverse) const { return (shift + kSlack) * inverse; }

  // For a new largest score of the row; returns the factor of everything summed so far. If all
  // scores are -inf (rows that see infinities), the shift becomes 0 and all weights are 0.
  __device__ float raise(float largest, float exponent) {
    const float old = shift;
    shift = fmaxf(shift, largest * exponent);
    if (shift == -INFINITY) shift = 0.0f;
    const float factor = exp2_approximate(old - shift);
    sum *= factor;
    return factor;
  }
  // The same for sums from which weights of other kernels are subtracted: shifts are whole numbers,
  // so that a weight that was rounded under another one differs only by a power of two. Scores of
  // -inf alone give a shift below all others.
  __device__ float raise_whole(float largest, float exponent) {
    const float old = shift;
    shift = fmaxf(fmaxf(shift, ceilf(largest * exponent)), kLowestShift);
    const float factor = exp2_approximate(old - shift);
    sum *= factor;
    return factor;
  }
  __device__ float weight(float score, float exponent) {
    const float p = shifted_weight(score, exponent, shift);
    sum += p;
    return p;
  }
};

}  // namespace coterie::cuda
