// SPDX-License-Identifier: MIT
#pragma once

#include <cstdint>

namespace coterie::cuda {

// 32 elements of a centroid, chunk `chunk` of its kChunks, less the mean of all its `width`; zeros
// beyond them. By kChunks lanes that follow each other, in whole warps. Returns the square of its
// length.
template <int kChunks>
__device__ __forceinline__ float centre_part(const float* centroid, int width, int chunk,
                                             float (&value)[32]) {
  const int first = 32 * chunk;
  const bool vectors = width % 4 == 0 && reinterpret_cast<std::uintptr_t>(centroid) % 16 == 0;
#pragma unroll
  for (int i = 0; i < 32; i += 4) {
    float4 four = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (vectors && first + i < width) four = *reinterpret_cast<const float4*>(centroid + first + i);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      value[i + j] = (&four.x)[j];
      if (!vectors && first + i + j < width) value[i + j] = centroid[first + i + j];
    }
  }
  float sums[32];
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    sums[i] = 0.0f;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) sums[i] += __shfl_sync(~0u, value[i], c, kChunks);
  }
#pragma unroll
  for (int level = 4; level >= 0; --level)
#pragma unroll
    for (int i = 0; i < 16; ++i)
      if (i < 1 << level) sums[i] += sums[i + (1 << level)];
  const float mean = sums[0] / static_cast<float>(width);
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    value[i] = first + i < width ? value[i] - mean : 0.0f;
    squares = fmaf(value[i], value[i], squares);
  }
#pragma unroll
  for (int step = 1; step < kChunks; step *= 2) squares += __shfl_xor_sync(~0u, squares, step);
  return squares;
}

// Stores them, in a row of 32 kChunks floats.
__device__ __forceinline__ void store_part(float* row, int chunk, const float (&value)[32]) {
#pragma unroll
  for (int i = 0; i < 32; i += 4)
    *reinterpret_cast<float4*>(row + 32 * chunk + i) =
        make_float4(value[i], value[i + 1], value[i + 2], value[i + 3]);
}

}  // namespace coterie::cuda
