// SPDX-License-Identifier: MIT
// Nearest codes by 1-bit tensor-core products (hamming.cu). The row [x, ~x] of 128 bits against the
// column [c, ~c] has popcount(and) = 64 - Hamming(x, c). Two products, as 16-bit halves of a word,
// times 512 plus the reversed number of the column tile, are keys whose maximum is the nearest
// centroid, the lower index on ties: one permute, one multiply-add and half a three-way maximum for
// two pairs.
#pragma once

#include <cstdint>
#include <type_traits>

namespace coterie::cuda {

namespace hamming_detail {

constexpr int kMTiles = 4, kTileRows = 16 * kMTiles;  // rows of a warp's tile
constexpr int kColumnStep = 128;                      // centroids of an unrolled sweep
constexpr int kMostColumns = 4096;                    // that 9 bits of column tile can tell apart

struct Point {
  std::uint32_t value;  // 64 - Hamming distance
  int label;
};

__host__ __device__ inline int padded_columns(int clusters) {
  return (clusters + kColumnStep - 1) / kColumnStep * kColumnStep;
}

__device__ __forceinline__ void popcount_product(std::uint32_t (&d)[4], std::uint32_t a0,
                                                 std::uint32_t a1, std::uint32_t b) {
  asm("mma.sync.aligned.m16n8k128.row.col.s32.b1.b1.s32.and.popc {%0,%1,%2,%3}, {%4,%5}, {%6}, "
      "{%7,%7,%7,%7};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a0), "r"(a1), "r"(b), "r"(0));
}

template <int kAddend>
__device__ __forceinline__ std::uint32_t multiply_add(std::uint32_t a, std::uint32_t b) {
  std::uint32_t d;
  asm("mad.lo.u32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "n"(kAddend));
  return d;
}

// Calls body(std::integral_constant<int, i>) for i in [0, kCount).
template <int kCount, int kFirst = 0, class Body>
__device__ __forceinline__ void unrolled(Body&& body) {
  if constexpr (kFirst < kCount) {
    body(std::integral_constant<int, kFirst>{});
    unrolled<kCount, kFirst + 1>(body);
  }
}

// Best keys of the tile's rows over `columns` centroids: halves are this lane's two columns.
__device__ __forceinline__ void nearest_keys(const uint4* fragments, int columns,
                                             unsigned key_scale,
                                             const std::uint32_t (&a)[kMTiles][2],
                                             std::uint32_t (&best)[kMTiles][2]) {
  constexpr int kTiles = kColumnStep / 8;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < kMTiles; ++m) best[m][0] = best[m][1] = 0;
#pragma unroll 1
  for (int rest = columns / kColumnStep - 1; rest >= 0; --rest, fragments += kColumnStep) {
    std::uint32_t keys[kMTiles][2] = {};
    unrolled<kTiles / 2>([&](auto step) {
      constexpr int kTile = decltype(step)::value * 2;
      const auto* words = reinterpret_cast<const std::uint32_t*>(fragments + kTile / 4 * 32 + lane);
      const uint2 b = *reinterpret_cast<const uint2*>(words + kTile % 4);
      constexpr int kFirst = (kTiles - 1 - kTile) * 0x10001, kSecond = kFirst - 0x10001;
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) {
        std::uint32_t d[4], e[4];
        popcount_product(d, a[m][0], a[m][1], b.x);
        popcount_product(e, a[m][0], a[m][1], b.y);
#pragma unroll
        for (int r = 0; r < 2; ++r)
          keys[m][r] = __vimax3_u16x2(
              keys[m][r],
              multiply_add<kFirst>(__byte_perm(d[2 * r], d[2 * r + 1], 0x5410), key_scale),
              multiply_add<kSecond>(__byte_perm(e[2 * r], e[2 * r + 1], 0x5410), key_scale));
      }
    });
#pragma unroll
    for (int m = 0; m < kMTiles; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        best[m][r] = __vmaxu2(best[m][r], keys[m][r] + rest * kTiles * 0x10001u);
  }
}

// From keys to the nearest centroid of the two rows this lane answers for: 16 (l%4) + l/4 + {0, 8}.
__device__ __forceinline__ void decode_keys(const std::uint32_t (&best)[kMTiles][2], int columns,
                                            Point (&mine)[2]) {
  const int quad = threadIdx.x % 4;
  const std::uint32_t last = columns / 8 - 1;
#pragma unroll
  for (int m = 0; m < kMTiles; ++m)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const std::uint32_t low = best[m][r] & 0xffffu, high = best[m][r] >> 16;
      const std::uint32_t even = (last - (low & 511)) * 8 + 2 * quad;
      const std::uint32_t odd = (last - (high & 511)) * 8 + 2 * quad + 1;
      std::uint32_t key =
          max((low >> 9) << 16 | (0xffffu - even), (high >> 9) << 16 | (0xffffu - odd));
      key = max(key, __shfl_xor_sync(0xffffffffu, key, 1));
      key = max(key, __shfl_xor_sync(0xffffffffu, key, 2));
      if (quad == m) mine[r] = {key >> 16, static_cast<int>(0xffffu - (key & 0xffffu))};
    }
}

}  // namespace hamming_detail

}  // namespace coterie::cuda
