// SPDX-License-Identifier: MIT
// Copies of rows from global memory to tiles in shared memory: cp.async where rows are aligned to
// 16 bytes, else element by element. Columns beyond the row and rows beyond the count become 0.
#pragma once

#include <cstdint>

#include "cuda/prim/element.cuh"
#include "cuda/prim/tensor.cuh"
#include "cuda/prim/tile.cuh"

namespace coterie::cuda {

// Copies `bytes` (0 to 16) and fills up with zeros to 16.
__device__ __forceinline__ void cp_async16(std::uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits until at most `kPending` of this thread's latest groups are in flight.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ uint4 load_shared16(std::uint32_t from) {
  uint4 words;
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "r"(from)
               : "memory");
  return words;
}
__device__ __forceinline__ void store_shared16(std::uint32_t to, const uint4& value) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(value.x), "r"(value.y),
               "r"(value.z), "r"(value.w)
               : "memory");
}

// Columns [column, column + kVector) of a row of `width` elements, zeros beyond it.
template <class T>
__device__ __forceinline__ uint4 load_chunk(const T* row, int column, int width) {
  union {
    T elements[16 / sizeof(T)];
    uint4 words;
  } chunk;
  chunk.words = make_uint4(0, 0, 0, 0);
#pragma unroll
  for (int i = 0; i < static_cast<int>(16 / sizeof(T)); ++i)
    if (column + i < width) chunk.elements[i] = row[column + i];
  return chunk.words;
}

// Fills `kRows` rows of the tile with `kThreads` threads: row r of the tile is row index[r] of
// `rows`, or first + r without an index. It is zero when r >= count or index[r] is negative.
// Columns beyond rows.width are zero. The caller commits and waits, then synchronises the threads.
template <int kRows, int kThreads, class T, int kWidth>
__device__ __forceinline__ void load_tile(const Tile<T, kWidth>& tile, const Rows<const T>& rows,
                                          std::int64_t first, int count,
                                          const std::int32_t* index = nullptr) {
  // Neighbouring threads read a row's chunks. With enough threads, steps are multiples of 8 rows,
  // which keeps the permutation of chunks the same.
  constexpr int kChunks = Tile<T, kWidth>::kChunks;
  constexpr bool kEights = kThreads / kChunks >= 8;
  constexpr int kStep = kEights ? kThreads / kChunks / 8 * 8 : kThreads / kChunks;
  static_assert(kStep > 0, "at least a row at a time");
  const int thread = static_cast<int>(threadIdx.x) % kThreads;
  const int r = thread / kChunks, chunk = thread % kChunks;
  if (r >= kStep) return;
  const int column = chunk * Tile<T, kWidth>::kVector;
  const bool inside = column < rows.width;
  const std::uint32_t to = tile.chunk(r, chunk);
  const T* from = rows.row(first + r) + column;
  // One branch around all copies; the path for unaligned rows is kept short.
  if (!rows.aligned) {
#pragma unroll 1
    for (int row = r; row < kRows; row += kStep) {
      bool there = inside && row < count;
      std::int64_t source = first + row;
      if (index && there) {
        source = index[row];
        there = source >= 0;
      }
      uint4 words = make_uint4(0, 0, 0, 0);
      if (there) words = load_chunk(rows.row(source), column, rows.width);
      store_shared16(tile.chunk(row, chunk), words);
    }
    return;
  }
  const auto copy = [&](int step) {
    bool there = inside && r + step < count;
    const T* source = from + step * rows.pitch;
    const std::uint32_t target =
        kEights ? to + step * Tile<T, kWidth>::kRowBytes : tile.chunk(r + step, chunk);
    if (index) {
      const int row = r + step < count ? index[r + step] : -1;
      there = inside && row >= 0;
      source = rows.row(row) + column;
    }
    cp_async16(target, there ? source : rows.data, there ? 16 : 0);
  };
  if constexpr (sizeof(T) == 2) {
#pragma unroll
    for (int step = 0; step < kRows; step += kStep)
      if (kRows % kStep == 0 || r + step < kRows) copy(step);
  } else {  // twice as many copies: too many instructions to unroll
#pragma unroll 4
    for (int step = 0; step < kRows; step += kStep)
      if (kRows % kStep == 0 || r + step < kRows) copy(step);
  }
}

// Copies four bytes asynchronously, or zeros if `there` is false.
__device__ __forceinline__ void cp_async4(std::uint32_t to, const void* from, bool there) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from),
               "r"(there ? 4 : 0)
               : "memory");
}

}  // namespace coterie::cuda
