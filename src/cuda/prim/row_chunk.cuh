// SPDX-License-Identifier: MIT
// Rows as 16-byte chunks, one chunk per lane: loads, stores and sums in float.
#pragma once

#include <cstdint>

#include "cuda/prim/element.cuh"
#include "cuda/prim/load.cuh"
#include "cuda/prim/tensor.cuh"

namespace coterie::cuda {

// The two 16-bit elements of a register, the lower half first.
template <class T>
__device__ __forceinline__ float2 unpack2(std::uint32_t word) {
  union {
    std::uint32_t word;
    T element[2];
  } two{word};
  return make_float2(to_float(two.element[0]), to_float(two.element[1]));
}

// base + number * pitch bytes, in one instruction.
template <class T>
__device__ __forceinline__ T* row_address(T* base, int number, int pitch) {
  T* address;
  asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(address) : "r"(number), "r"(pitch), "l"(base));
  return address;
}
// Whether rows can be read and written 16 bytes at a time, with a pitch in bytes that fits 32 bits.
template <class T>
__device__ __forceinline__ bool in_vectors(const Rows<T>& rows) {
  return rows.aligned && rows.pitch < 1 << 28 && rows.pitch > -(1 << 28);
}
template <class T>
__device__ __forceinline__ int pitch_bytes(const Rows<T>& rows) {
  return static_cast<int>(rows.pitch) * static_cast<int>(sizeof(T));
}

// The first `count` elements of 16 bytes, one at a time, for unaligned rows: few instructions, to
// keep this rare path out of the way of the others.
template <class T>
__device__ __forceinline__ uint4 load_slowly(const T* from, int count) {
  constexpr int kVector = 16 / sizeof(T), kBits = 8 * sizeof(T);
  uint4 words = make_uint4(0, 0, 0, 0);
#pragma unroll 1
  for (int i = 0; i < kVector; ++i) {
    const T element = i < count ? from[i] : from_float<T>(0.0f);
    std::uint32_t bits;
    if constexpr (kBits == 16)
      bits = *reinterpret_cast<const std::uint16_t*>(&element);
    else
      bits = __float_as_uint(element);
    if constexpr (kBits == 16) {
      words.x = __funnelshift_r(words.x, words.y, 16);
      words.y = __funnelshift_r(words.y, words.z, 16);
      words.z = __funnelshift_r(words.z, words.w, 16);
      words.w = words.w >> 16 | bits << 16;
    } else {
      words = make_uint4(words.y, words.z, words.w, bits);
    }
  }
  return words;
}
template <class T>
__device__ __forceinline__ void store_slowly(T* to, uint4 words, int count) {
  constexpr int kVector = 16 / sizeof(T), kBits = 8 * sizeof(T);
#pragma unroll 1
  for (int i = 0; i < min(count, kVector); ++i) {
    if constexpr (kBits == 16) {
      reinterpret_cast<std::uint16_t*>(to)[i] = static_cast<std::uint16_t>(words.x);
      words.x = __funnelshift_r(words.x, words.y, 16);
      words.y = __funnelshift_r(words.y, words.z, 16);
      words.z = __funnelshift_r(words.z, words.w, 16);
      words.w >>= 16;
    } else {
      to[i] = __uint_as_float(words.x);
      words = make_uint4(words.y, words.z, words.w, 0);
    }
  }
}

// 16 bytes of floats rounded to T.
template <class T>
__device__ __forceinline__ uint4 pack_chunk(const float (&values)[16 / sizeof(T)]) {
  union {
    uint4 words;
    T element[16 / sizeof(T)];
  } chunk;
#pragma unroll
  for (int i = 0; i < static_cast<int>(16 / sizeof(T)); ++i)
    chunk.element[i] = from_float<T>(values[i]);
  return chunk.words;
}
// sum += the elements of 16 bytes.
template <class T>
__device__ __forceinline__ void add_chunk(float (&sum)[16 / sizeof(T)], const uint4& chunk) {
  const std::uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if constexpr (sizeof(T) == 2) {
      const float2 two = unpack2<T>(words[i]);
      sum[2 * i] += two.x;
      sum[2 * i + 1] += two.y;
    } else {
      sum[i] += __uint_as_float(words[i]);
    }
}

// A row in 16-byte chunks, one per lane of a group of 4 to 32 lanes; kVector elements per lane.
template <class T>
struct ChunkLane {
  static constexpr int kVector = 16 / static_cast<int>(sizeof(T));
  int lanes, group, lane;  // lanes of a group, number of the group in the warp, lane in the group

  __device__ explicit ChunkLane(int pitch) : lanes(4) {
    while (lanes * kVector < pitch) lanes *= 2;
    group = threadIdx.x % 32 / lanes;
    lane = threadIdx.x % lanes;
  }
  __device__ int column() const { return lane * kVector; }
  // Sum over the groups of the warp.
  __device__ float sum_groups(float value) const {
    for (int step = lanes; step < 32; step *= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
    return value;
  }
};

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
