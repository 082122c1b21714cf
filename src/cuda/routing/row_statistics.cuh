// SPDX-License-Identifier: MIT
// Mean and 1 / sigma of rows, sigma = sqrt(variance + floor): four lanes share a row, in the order
// of RowWords, in registers. All kernels that compute statistics sum in this order, so that a row
// gets the same bits from each.
#pragma once

#include "cuda/lists/lists.h"
#include "cuda/prim/row_fragments.cuh"
#include "cuda/prim/row_lanes.cuh"

namespace coterie::cuda {

// Sum over the four lanes of a row.
__device__ __forceinline__ float sum_of_four(float value) {
  value += __shfl_xor_sync(0xffffffffu, value, 1);
  return value + __shfl_xor_sync(0xffffffffu, value, 2);
}

// This lane's elements of a row, in float.
template <class T, int kChunks>
__device__ __forceinline__ void unpack(const RowWords<T, kChunks>& row, float (&x)[8 * kChunks]) {
  constexpr int kVector = 16 / static_cast<int>(sizeof(T));
#pragma unroll
  for (int i = 0; i < 8 * kChunks; ++i) {
    const std::uint32_t word = (&row.word[i / kVector].x)[i % kVector * sizeof(T) / 4];
    if constexpr (std::is_same_v<T, float>)
      x[i] = __uint_as_float(word);
    else if constexpr (std::is_same_v<T, F16>)
      x[i] = to_float(F16{static_cast<std::uint16_t>(word >> i % 2 * 16)});
    else
      x[i] = __uint_as_float(i % 2 ? word & 0xffff0000u : word << 16);
  }
}

// Sums over a row of its elements and their squares: this lane's, or those of all four.
struct RowSums {
  float sum = 0.0f, squares = 0.0f;

  template <int kCount>
  __device__ explicit RowSums(const float (&x)[kCount]) {
    float sums[2] = {0.0f, 0.0f}, parts[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      sums[i % 2] += x[i];
      parts[i % 2] = fmaf(x[i], x[i], parts[i % 2]);
    }
    sum = sums[0] + sums[1];
    squares = parts[0] + parts[1];
  }

  // For a row of `width` elements. __fmul_rn keeps the compiler from fusing the products.
  __device__ float mean(int width) const {
    return __fmul_rn(sum, 1.0f / static_cast<float>(width));
  }
  // False if too many digits are lost, that is if the mean is large.
  __device__ bool variance(int width, float mean, float& variance) const {
    const float square = __fmul_rn(mean, mean);
    variance = __fmul_rn(squares, 1.0f / static_cast<float>(width)) - square;
    return square < variance;
  }
};

// This lane's sum of (x - mean)^2 over the first `width` elements of a row, over width.
template <int kChunks>
__device__ __forceinline__ float variance_part(const float (&x)[8 * kChunks], int width,
                                               float mean) {
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < 8 * kChunks; ++i) {
    const bool inside = i / 8 * 32 + static_cast<int>(threadIdx.x) % 4 * 8 + i % 8 < width;
    const float difference = inside ? x[i] - mean : 0.0f;
    squares = fmaf(difference, difference, squares);
  }
  return __fmul_rn(squares, 1.0f / static_cast<float>(width));
}

// Statistics of a row of `width` elements, zeros beyond them, that four lanes share; the bits
// depend on the row alone. Called by all lanes of the warp.
template <int kChunks>
__device__ __forceinline__ RowStatistics statistics_of(const float (&x)[8 * kChunks], int width) {
  RowSums sums(x);
  sums.sum = sum_of_four(sums.sum);
  sums.squares = sum_of_four(sums.squares);
  const float mean = sums.mean(width);
  float variance;
  const bool good = sums.variance(width, mean, variance);
  if (__any_sync(0xffffffffu, !good)) {
    const float exact = sum_of_four(variance_part<kChunks>(x, width, mean));
    if (!good) variance = exact;
  }
  return {mean, inverse_sigma(variance)};
}

}  // namespace coterie::cuda
