// SPDX-License-Identifier: MIT
// How tiles of a stream of steps (stream.cuh) are filled: rows of lists, copied by a warp.
#pragma once

#include <cstdint>

#include "cuda/lists/plan.h"
#include "cuda/prim/load.cuh"
#include "cuda/prim/wgmma.cuh"

namespace coterie::cuda {

// Rows of 64 ranks from `at` on of a side's lists, of which `left` are there: this lane's are those
// of ranks lane and lane + 32, -1 beyond the last.
__device__ __forceinline__ void list_rows(int (&row)[2], const SlotSide& side, int at, int left) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int rank = static_cast<int>(threadIdx.x) % 32 + 32 * half;
    row[half] = rank >= left ? -1 : side.index ? side.index[at + rank] : at + rank * side.lists;
  }
}

// Row `number` of rows that are `pitch` bytes apart: one instruction.
template <class T>
__device__ __forceinline__ T* row_at(T* base, int number, std::uint32_t pitch) {
  std::uint64_t address;
  asm("mad.wide.u32 %0, %1, %2, %3;"
      : "=l"(address)
      : "r"(number), "r"(pitch), "l"(reinterpret_cast<std::uint64_t>(base)));
  return reinterpret_cast<T*>(address);
}

// Copies 64 rows of an item, as list_rows left them, of one or more tensors into tiles; zeros for
// rows of -1. By a warp. Rows are aligned (Rows::aligned) and less than 2 GiB apart. kUnroll: turns
// of the loop, four rows each, that stand one behind the other in the code.
template <int kDim, int kUnroll = kStreamRows / 4, class T, int kTensors>
__device__ __forceinline__ void load_list_rows(const std::uint32_t (&to)[kTensors],
                                               const Rows<const T> (&rows)[kTensors],
                                               const int (&row)[2]) {
  const int lane = static_cast<int>(threadIdx.x) % 32, r = lane / 8, chunk = lane % 8;
  const bool inside = chunk * 8 < rows[0].width;
  const unsigned char* from[kTensors];  // a valid address, where columns are beyond the width
  std::uint32_t pitch[kTensors], even[kTensors];
#pragma unroll
  for (int x = 0; x < kTensors; ++x) {
    from[x] = reinterpret_cast<const unsigned char*>(rows[x].data + (inside ? chunk * 8 : 0));
    pitch[x] = static_cast<std::uint32_t>(rows[x].pitch * 2);
    even[x] = to[x] + r * 128 + ((chunk ^ r) << 4);
  }
#pragma unroll kUnroll
  for (int i = 0; i < kStreamRows / 4; ++i) {
    const int number = __shfl_sync(~0u, i < 8 ? row[0] : row[1], i % 8 * 4 + r);
    const int valid = max(number, 0);
#pragma unroll
    for (int x = 0; x < kTensors; ++x) {
      const unsigned char* source = row_at(from[x], valid, pitch[x]);
      // Chunks of every second four rows are permuted differently.
      const std::uint32_t target = (even[x] ^ i % 2 * 64) + i * 512;
      cp_async16(target, source, number >= 0 && inside ? 16 : 0);
#pragma unroll
      for (int band = 1; band < kDim / 64; ++band) {
        const bool there = number >= 0 && 64 * band + chunk * 8 < rows[0].width;
        cp_async16(target + band * kStreamRows * 128, there ? source + band * 128 : source,
                   there ? 16 : 0);
      }
    }
  }
}
template <int kDim, int kUnroll = kStreamRows / 4, class T>
__device__ __forceinline__ void load_list_rows(std::uint32_t to, const Rows<const T>& rows,
                                               const int (&row)[2]) {
  const std::uint32_t tiles[1] = {to};
  const Rows<const T> tensors[1] = {rows};
  load_list_rows<kDim, kUnroll>(tiles, tensors, row);
}

// 4 or 8 bytes, or zeros.
template <class Value>
__device__ __forceinline__ void cp_async_value(Value* to, const Value* from, bool there) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(to)), "l"(from),
               "n"(sizeof(Value)), "r"(there ? static_cast<int>(sizeof(Value)) : 0)
               : "memory");
}

// Statistics of a row, zeros if it is not there; none: those that change nothing.
__device__ __forceinline__ void copy_statistics(RowStatistics& to, const RowStatistics* stats,
                                                std::int64_t row, bool there) {
  if (stats)
    cp_async_value(reinterpret_cast<float2*>(&to), reinterpret_cast<const float2*>(stats + row),
                   there);
  else
    to = kNoStatistics;
}

}  // namespace coterie::cuda
