// SPDX-License-Identifier: MIT
// Rows in 16-byte chunks, a few lanes for each row.
#pragma once

#include <cstdint>

#include "cuda/device/element.cuh"
#include "cuda/device/load.cuh"
#include "cuda/device/problem.cuh"

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

// Up to 16 bytes of a row, of which the first `count` elements are there.
template <class T>
__device__ __forceinline__ uint4 load_elements(const T* from, int count, bool aligned) {
  return aligned ? *reinterpret_cast<const uint4*>(from) : load_chunk(from, 0, count);
}
template <class T>
__device__ __forceinline__ void store_elements(T* to, const float (&values)[16 / sizeof(T)],
                                               int count, bool aligned) {
  union {
    uint4 words;
    T element[16 / sizeof(T)];
  } chunk;
#pragma unroll
  for (int i = 0; i < static_cast<int>(16 / sizeof(T)); ++i)
    chunk.element[i] = from_float<T>(values[i]);
  if (aligned)
    *reinterpret_cast<uint4*>(to) = chunk.words;
  else
    for (int i = 0; i < count; ++i) to[i] = from_float<T>(values[i]);
}

// A row in 16-byte chunks, one per lane of a group of 4 to 32 lanes; kVector numbers a lane.
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
  __device__ uint4 load(const Rows<const T>& rows, int row) const {
    if (row < 0 || column() >= rows.width) return make_uint4(0, 0, 0, 0);
    return load_elements(rows.row(row) + column(), rows.width - column(), rows.aligned);
  }
  __device__ float sum(float value) const {
    for (int step = lanes / 2; step > 0; step /= 2)
      value += __shfl_xor_sync(0xffffffffu, value, step);
    return value;
  }
  // Over the groups of the warp.
  __device__ float sum_groups(float value) const {
    for (int step = lanes; step < 32; step *= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
    return value;
  }
};

}  // namespace coterie::cuda
