// SPDX-License-Identifier: MIT
// Rows of up to kWidth elements held by neighbouring lanes as floats: 16 bytes of the row's type
// per lane, several rows per warp.
#pragma once

#include <cstdint>

#include "cuda/prim/element.cuh"
#include "cuda/prim/load.cuh"
#include "cuda/prim/tensor.cuh"

namespace coterie::cuda {

constexpr float kVarianceFloor = 1e-6f;  // src/cpu/cluster/normalise.cc

__device__ __forceinline__ float inverse_sigma(float variance) {
  return rsqrtf(variance + kVarianceFloor);
}

template <class T, int kWidth>
struct RowLanes {
  static constexpr int kVector = 16 / static_cast<int>(sizeof(T));
  static constexpr int kNeeded = kWidth / kVector;
  static constexpr int kLanes = kNeeded <= 4 ? 4 : kNeeded <= 8 ? 8 : kNeeded <= 16 ? 16 : 32;
  using Values = float[kVector];

  __device__ static int column() { return static_cast<int>(threadIdx.x) % kLanes * kVector; }

  // This lane's elements of a row, zeros beyond its end or if `there` is false.
  __device__ static void load(const Rows<const T>& rows, std::int64_t row, bool there, Values& x) {
    union {
      uint4 words;
      T elements[kVector];
    } chunk;
    chunk.words = make_uint4(0, 0, 0, 0);
    if (there && column() < rows.width) {
      const T* from = rows.row(row);
      chunk.words = rows.aligned ? *reinterpret_cast<const uint4*>(from + column())
                                 : load_chunk(from, column(), rows.width);
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) x[i] = to_float(chunk.elements[i]);
  }

  // The same for a row of `width` floats.
  __device__ static void load_floats(const float* row, int width, Values& x) {
    if (width % 4 == 0) {
#pragma unroll
      for (int i = 0; i < kVector; i += 4) {
        const float4 four = column() + i < width
                                ? *reinterpret_cast<const float4*>(row + column() + i)
                                : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kVector; ++i) x[i] = column() + i < width ? row[column() + i] : 0.0f;
    }
  }

  __device__ static void store(const Rows<T>& rows, std::int64_t row, const Values& x) {
    if (column() >= rows.width) return;
    union {
      uint4 words;
      T elements[kVector];
    } chunk;
#pragma unroll
    for (int i = 0; i < kVector; ++i) chunk.elements[i] = from_float<T>(x[i]);
    T* to = rows.row(row) + column();
    if (rows.aligned) {
      *reinterpret_cast<uint4*>(to) = chunk.words;
    } else {
#pragma unroll
      for (int i = 0; i < kVector; ++i)
        if (column() + i < rows.width) to[i] = chunk.elements[i];
    }
  }

  // Butterfly sum over the lanes of a row.
  __device__ static float sum(float value) {
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2) value += __shfl_xor_sync(~0u, value, step);
    return value;
  }
  __device__ static float dot(const Values& x, const Values& y) {
    float product = 0.0f;
#pragma unroll
    for (int i = 0; i < kVector; ++i) product = fmaf(x[i], y[i], product);
    return sum(product);
  }

  // Sum over all elements of a row.
  __device__ static float total(const Values& x) {
    float part = 0.0f;
#pragma unroll
    for (int i = 0; i < kVector; ++i) part += x[i];
    return sum(part);
  }
  // Normalises a row of `width` elements to mean 0 and variance 1; returns 1 / sigma.
  __device__ static float normalise(int width, Values& x) {
    const float mean = total(x) / static_cast<float>(width);
#pragma unroll
    for (int i = 0; i < kVector; ++i) x[i] = column() + i < width ? x[i] - mean : 0.0f;
    const float inverse = inverse_sigma(dot(x, x) / static_cast<float>(width));
#pragma unroll
    for (int i = 0; i < kVector; ++i) x[i] *= inverse;
    return inverse;
  }
};

}  // namespace coterie::cuda
