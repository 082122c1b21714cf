// SPDX-License-Identifier: MIT
// Tiles of rows in shared memory. The 16-byte chunks of a row are permuted by the row's number, so
// that the 8 rows of an ldmatrix and neighbouring chunks of one row fall into different banks.
#pragma once

#include <cstdint>

namespace coterie::cuda {

// `kWidth` elements a row: 32, 64, 96 or 128. `base` is a shared-memory address, a multiple of 128.
template <class T, int kWidth>
struct Tile {
  static constexpr int kVector = 16 / static_cast<int>(sizeof(T));  // elements of a chunk
  static constexpr int kChunks = kWidth / kVector;                  // of a row
  static constexpr int kRowBytes = kWidth * static_cast<int>(sizeof(T));
  static_assert(kWidth % kVector == 0 && kChunks % 4 == 0, "rows of whole 64-byte pieces");

  std::uint32_t base;

  // With 4, 12, ... chunks per row, neighbouring rows already fall into different banks.
  __device__ static constexpr int swizzle(int row) {
    return kChunks % 8 == 0 ? row & 7 : (row >> 1) & 3;
  }
  // The tile from `row` on, a multiple of 8. Unrolled loops load through it: the permutation of
  // their addresses is then the same in all steps.
  __device__ Tile below(int row) const { return {base + row * kRowBytes}; }
  __device__ std::uint32_t chunk(int row, int index) const {
    return base + row * kRowBytes + ((index ^ swizzle(row)) << 4);
  }
  __device__ std::uint32_t address(int row, int column) const {
    return chunk(row, column / kVector) + column % kVector * static_cast<int>(sizeof(T));
  }
};

__device__ __forceinline__ std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

}  // namespace coterie::cuda
