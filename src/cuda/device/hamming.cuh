// SPDX-License-Identifier: MIT
// Nearest codes by 1-bit tensor-core products (hamming.cu). The row [x, ~x] of 128 bits against the
// column [c, ~c] has popcount(and) = 64 - Hamming(x, c). Two products, as 16-bit halves of a word,
// times 512 plus the reversed number of the column tile, are keys whose maximum is the nearest
// centroid, the lower index on ties: one permute, one multiply-add and half a three-way maximum for
// two pairs.
#pragma once

#include <cstdint>

namespace coterie::cuda {

namespace hamming_detail {

constexpr int kMTiles = 2, kTileRows = 16 * kMTiles;  // rows of a warp's tile, one a lane
constexpr int kColumnStep = 128;                      // centroids of an unrolled sweep
constexpr int kMovedStep = 16;                        // the same, where few are swept
constexpr int kMostColumns = 4096;                    // that 9 bits of column tile can tell apart

struct Point {
  std::uint32_t value;  // 64 - Hamming distance
  int label;
};

template <int kStep = kColumnStep>
__host__ __device__ inline int padded_columns(int clusters) {
  return (clusters + kStep - 1) / kStep * kStep;
}

__device__ __forceinline__ void popcount_product(std::uint32_t (&d)[4], std::uint32_t a0,
                                                 std::uint32_t a1, std::uint32_t b) {
  asm("mma.sync.aligned.m16n8k128.row.col.s32.b1.b1.s32.and.popc {%0,%1,%2,%3}, {%4,%5}, {%6}, "
      "{%7,%7,%7,%7};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a0), "r"(a1), "r"(b), "r"(0));
}

// Best keys of rows over `columns` centroids, a multiple of kStep: halves are this lane's two
// columns.
template <int kStep, int kTiles>
__device__ __forceinline__ void nearest_keys(const uint4* fragments, int columns,
                                             unsigned key_scale,
                                             const std::uint32_t (&a)[kTiles][2],
                                             std::uint32_t (&best)[kTiles][2]) {
  const auto* words = reinterpret_cast<const uint2*>(fragments + threadIdx.x % 32);
  std::uint32_t addend = (columns / 8 - 1) * 0x10001u;  // of a column tile
#pragma unroll
  for (int m = 0; m < kTiles; ++m) best[m][0] = best[m][1] = 0;
#pragma unroll 1
  for (int column = 0; column < columns; column += kStep) {
#pragma unroll
    for (int pair = 0; pair < kStep / 16; ++pair) {
      // Of 32 columns lanes have 16 bytes, pairs of column tiles 8 of them.
      const int number = kStep > 16 ? column / 16 + pair : column / 16;
      const uint2 b = words[number / 2 * 64 + number % 2];
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        std::uint32_t d[4], e[4];
        popcount_product(d, a[m][0], a[m][1], b.x);
        popcount_product(e, a[m][0], a[m][1], b.y);
#pragma unroll
        for (int r = 0; r < 2; ++r)
          best[m][r] = __vimax3_u16x2(
              best[m][r], __byte_perm(d[2 * r], d[2 * r + 1], 0x5410) * key_scale + addend,
              __byte_perm(e[2 * r], e[2 * r + 1], 0x5410) * key_scale + (addend - 0x10001u));
      }
      addend -= 0x20002u;
    }
  }
}

// The row of a tile that this lane answers for: of row tile l%2 number l/4 or l/4 + 8.
__device__ __forceinline__ int answered_row() {
  const int lane = static_cast<int>(threadIdx.x % 32);
  return lane % 2 * 16 + lane % 4 / 2 * 8 + lane / 4;
}

// From keys to the nearest centroid of this lane's row. Where kTiles is 1, lanes of odd number have
// none.
template <int kTiles>
__device__ __forceinline__ Point decode_keys(const std::uint32_t (&best)[kTiles][2], int columns) {
  const std::uint32_t quad = threadIdx.x % 4, reversed = 7 - 2 * quad;
  std::uint32_t key[2][2] = {};
#pragma unroll
  for (int m = 0; m < kTiles; ++m)
#pragma unroll
    for (int r = 0; r < 2; ++r)  // similarity, reversed number of the column
      key[m][r] = max((best[m][r] & 0xffffu) * 8 + reversed, (best[m][r] >> 16) * 8 + reversed - 1);
  // Four lanes have parts of four rows: each keeps one row.
  std::uint32_t kept[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const std::uint32_t other = __shfl_xor_sync(0xffffffffu, quad % 2 ? key[0][r] : key[1][r], 1);
    kept[r] = max(quad % 2 ? key[1][r] : key[0][r], other);
  }
  const std::uint32_t other = __shfl_xor_sync(0xffffffffu, quad / 2 ? kept[0] : kept[1], 2);
  const std::uint32_t own = max(quad / 2 ? kept[1] : kept[0], other);
  return {own >> 12,
          columns - 8 - static_cast<int>(own >> 3 & 511u) * 8 + 7 - static_cast<int>(own & 7u)};
}

}  // namespace hamming_detail

}  // namespace coterie::cuda
