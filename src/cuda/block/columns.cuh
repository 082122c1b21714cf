// SPDX-License-Identifier: MIT
// The last step of column sums.
#pragma once

#include <cstdint>

namespace coterie::cuda {

// out[c] = sum over s of partial[s * pitch + c], in a fixed order. A block of 32 x 8 threads has
// 32 columns; thread y adds slices y, y + 8, ..., then thread 0 of a column adds the eight sums.
// The grid has a block for every 32 columns.
static __global__ void __launch_bounds__(256)
    add_slices(const float* partial, int slices, int columns, int pitch, float* out) {
  __shared__ float sums[8][32];
  const int lane = threadIdx.x % 32, part = threadIdx.x / 32;
  const int column = blockIdx.x * 32 + lane;
  float sum = 0;
  if (column < columns) {
    for (int s = part; s < slices; s += 8) {
      sum += partial[static_cast<std::int64_t>(s) * pitch + column];
    }
  }
  sums[part][lane] = sum;
  __syncthreads();
  if (part != 0 || column >= columns) return;
  for (int other = 1; other < 8; ++other) sum += sums[other][lane];
  out[column] = sum;
}

}  // namespace coterie::cuda
