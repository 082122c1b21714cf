// SPDX-License-Identifier: MIT
// Rows as 16-byte vectors of floats to add up.
#pragma once

#include <cstdint>

#include "cuda/device/element.cuh"
#include "cuda/device/load.cuh"
#include "cuda/device/problem.cuh"

namespace coterie::cuda {

// kVector neighbouring elements of a row and their sum.
template <class T>
struct VectorSum {
  static constexpr int kVector = 16 / static_cast<int>(sizeof(T));
  float sum[kVector] = {};

  __device__ __forceinline__ static uint4 load(const Rows<const T>& rows, std::int64_t row,
                                               int column) {
    const T* from = rows.row(row);
    return rows.aligned ? *reinterpret_cast<const uint4*>(from + column)
                        : load_chunk(from, column, rows.width);
  }

  __device__ __forceinline__ void add(const uint4& words) {
    const T* elements = reinterpret_cast<const T*>(&words);
#pragma unroll
    for (int i = 0; i < kVector; ++i) sum[i] += to_float(elements[i]);
  }
};

}  // namespace coterie::cuda
