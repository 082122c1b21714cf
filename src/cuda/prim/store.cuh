// SPDX-License-Identifier: MIT
// Stores of accumulators (mma.cuh) to rows in global memory: 16 bytes per lane where rows are
// aligned.
#pragma once

#include <cstdint>

#include "cuda/prim/element.cuh"
#include "cuda/prim/mma.cuh"
#include "cuda/prim/tensor.cuh"

namespace coterie::cuda {

// To global memory: the address space of a pointer read from shared memory is unknown.
__device__ __forceinline__ void store_global(float* to, float value) {
  asm volatile("st.global.f32 [%0], %1;" ::"l"(to), "f"(value) : "memory");
}
__device__ __forceinline__ void store_global(void* to, const uint4& value) {
  asm volatile("st.global.v4.b32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(value.x), "r"(value.y),
               "r"(value.z), "r"(value.w)
               : "memory");
}
__device__ __forceinline__ void store_global(void* to, const std::uint32_t (&word)[4]) {
  store_global(to, make_uint4(word[0], word[1], word[2], word[3]));
}

// Transposes the words of four lanes: word[j] of lane t becomes word[t] of lane j.
__device__ __forceinline__ void transpose_quad(std::uint32_t (&word)[4]) {
  const int lane = threadIdx.x % 4;
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool upper = lane & bit;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
      const std::uint32_t sent = upper ? word[i] : word[i + bit];
      const std::uint32_t got = __shfl_xor_sync(0xffffffffu, sent, bit);
      if (upper)
        word[i] = got;
      else
        word[i + bit] = got;
    }
  }
}

// Columns column .. column+31 of the row that this lane holds in the upper (side 0) or lower half
// (side 1) of two neighbouring accumulators. All lanes of the warp call; lanes with `there` write.
template <class T>
__device__ __forceinline__ void store_columns(const Rows<T>& rows, std::int64_t row, bool there,
                                              int column, const Accumulator* acc, int side) {
  const int lane = threadIdx.x % 4;
  T* to = rows.row(there ? row : 0);
  if constexpr (sizeof(T) == 2) {
    std::uint32_t word[4];
#pragma unroll
    for (int n = 0; n < 4; ++n)
      word[n] = pack2<T>(acc[n / 2][n % 2][2 * side], acc[n / 2][n % 2][2 * side + 1]);
    transpose_quad(word);
    const int first = column + 8 * lane;
    if (!there || first >= rows.width) return;
    if (rows.aligned) {
      *reinterpret_cast<uint4*>(to + first) = make_uint4(word[0], word[1], word[2], word[3]);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i)
        if (first + i < rows.width) {
          const std::uint32_t bits = word[i / 2] >> (16 * (i % 2));
          reinterpret_cast<std::uint16_t*>(to)[first + i] = static_cast<std::uint16_t>(bits);
        }
    }
  } else {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int first = column + 8 * n + 2 * lane;
      const float low = acc[n / 2][n % 2][2 * side], high = acc[n / 2][n % 2][2 * side + 1];
      if (!there) continue;
      if (rows.aligned) {
        if (first < rows.width) store2(to + first, low, high);
      } else {
        if (first < rows.width) to[first] = low;
        if (first + 1 < rows.width) to[first + 1] = high;
      }
    }
  }
}

// Adds the values that are there to those that store_columns would write.
template <class T>
__device__ __forceinline__ void add_columns(const Rows<T>& rows, std::int64_t row, bool there,
                                            int column, Accumulator* acc, int side) {
  if (!there) return;
  const T* from = rows.row(row);
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const int first = column + 8 * n + 2 * (static_cast<int>(threadIdx.x) % 4);
    float* to = acc[n / 2][n % 2] + 2 * side;
    if (first < rows.width) to[0] += to_float(from[first]);
    if (first + 1 < rows.width) to[1] += to_float(from[first + 1]);
  }
}

}  // namespace coterie::cuda
