// SPDX-License-Identifier: MIT
// Products of rows read straight from global memory with a table of columns in shared memory.
//
// The order of the depths in a product is free. Here lane t of four takes elements 8t .. 8t+7 of
// every 32: for a row one 16-byte load serves two steps of depth 16, without passing through shared
// memory. The columns' table has the same order: 16 bytes per lane (column l/4 of 8, elements
// 8 (l%4) ..) for each tile of 8 columns and 32 depths.
//
// fp32 elements are split into bf16 parts; products of parts are summed, the large ones last.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/prim/element.cuh"
#include "cuda/prim/load.cuh"
#include "cuda/prim/tensor.cuh"

namespace coterie::cuda {

// The 16-bit type in which T is multiplied.
template <class T>
using Factor = std::conditional_t<sizeof(T) == 2, T, Bf16>;

// d = a b + c for 16 rows, 8 columns, 16 depths.
template <class T>
__device__ __forceinline__ void multiply_tile(float (&d)[4], const std::uint32_t (&a)[4],
                                              std::uint32_t b0, std::uint32_t b1,
                                              const float (&c)[4]) {
  if constexpr (std::is_same_v<T, F16>)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%10,%11,%12,%13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]),
          "f"(c[2]), "f"(c[3]));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%10,%11,%12,%13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]),
          "f"(c[2]), "f"(c[3]));
}

// 16 bytes that are read once, or zeros.
__device__ __forceinline__ uint4 load_once(const void* from, bool there) {
  uint4 words;
  asm volatile(
      "{\n"
      "  .reg .pred p;\n"
      "  setp.ne.s32 p, %5, 0;\n"
      "  mov.b32 %0, 0;\n"
      "  mov.b32 %1, 0;\n"
      "  mov.b32 %2, 0;\n"
      "  mov.b32 %3, 0;\n"
      "  @p ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];\n"
      "}\n"
      : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
      : "l"(from), "r"(static_cast<int>(there)));
  return words;
}

// This lane's elements of one row of up to 32 * kChunks, as laid out in memory.
template <class T, int kChunks>
struct RowWords {
  static constexpr int kVectors = static_cast<int>(sizeof(T)) / 2;  // of 16 bytes for 8 elements
  uint4 word[kChunks * kVectors];

  template <bool kAligned>
  __device__ __forceinline__ void load(const Rows<const T>& rows, std::int64_t row, bool there) {
    constexpr int kStep = 8 / kVectors;
    const T* from = rows.row(there ? row : 0);
#pragma unroll
    for (int i = 0; i < kChunks * kVectors; ++i) {
      const int column = i / kVectors * 32 + threadIdx.x % 4 * 8 + i % kVectors * kStep;
      const bool inside = there && column < rows.width;
      if constexpr (kAligned)
        word[i] = load_once(from + column, inside);
      else
        word[i] = inside ? load_chunk(from, column, rows.width) : make_uint4(0, 0, 0, 0);
    }
  }

  // Largest absolute value, as the bits of a float; NaN counts as larger than all.
  __device__ __forceinline__ float largest() const {
    std::uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < kChunks * kVectors; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const std::uint32_t bits = (&word[i].x)[j];
        most = sizeof(T) == 2 ? __vmaxu2(most, bits & 0x7fff7fffu) : max(most, bits & 0x7fffffffu);
      }
    if constexpr (std::is_same_v<T, float>) return __uint_as_float(most);
    const auto bits = static_cast<unsigned short>(max(most & 0xffffu, most >> 16));
    if constexpr (std::is_same_v<T, F16>) return to_float(F16{bits});
    return __uint_as_float(static_cast<std::uint32_t>(bits) << 16);
  }
};

// kMTiles times 16 rows; this lane has rows l/4 and l/4 + 8 of each 16.
template <class T, int kChunks, int kMTiles>
struct RowTile {
  static constexpr int kRows = 16 * kMTiles;
  RowWords<T, kChunks> words[kMTiles][2];

  // Rows first .. first + kRows - 1; zeros from `end` on.
  __device__ __forceinline__ void load(const Rows<const T>& rows, int first, int end) {
    if (rows.aligned)  // one branch around all loads, so that all are in flight together
      load_all<true>(rows, first, end);
    else
      load_all<false>(rows, first, end);
  }

 private:
  template <bool kAligned>
  __device__ __forceinline__ void load_all(const Rows<const T>& rows, int first, int end) {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m)
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const int row = first + 16 * m + 8 * side + static_cast<int>(threadIdx.x) % 32 / 4;
        words[m][side].template load<kAligned>(rows, row, row < end);
      }
  }
};

// A float as a sum of parts, the largest first.
template <class F, int kParts>
__device__ __forceinline__ void split_factor(float value, F (&part)[kParts]) {
#pragma unroll
  for (int p = 0; p < kParts; ++p) {
    part[p] = from_float<F>(value);
    value -= to_float(part[p]);
  }
}

// Rows l/4 and l/4 + 8 of 16, as left factors of 2 * kChunks steps of depth 16. A step's four words
// must be in adjacent registers. XOR with `zero`, a 0 unknown to the compiler, makes them new
// values that it places there once instead of moving loaded words before every product.
template <class T, int kChunks, int kParts>
struct RowFragments {
  std::uint32_t a[kParts][2 * kChunks][4];

  __device__ __forceinline__ void set(int side, const RowWords<T, kChunks>& row,
                                      std::uint32_t zero) {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk)
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {  // elements 2 pair, 2 pair + 1 of the lane's eight
        const int step = 2 * chunk + pair / 2, slot = 2 * (pair % 2) + side;
        if constexpr (sizeof(T) == 2) {
          a[0][step][slot] = (&row.word[chunk].x)[pair] ^ zero;
        } else {
          const uint4& words = row.word[2 * chunk + pair / 2];
          Bf16 low[kParts], high[kParts];
          split_factor(__uint_as_float(pair % 2 ? words.z : words.x), low);
          split_factor(__uint_as_float(pair % 2 ? words.w : words.y), high);
#pragma unroll
          for (int p = 0; p < kParts; ++p)
            a[p][step][slot] = low[p].bits | static_cast<std::uint32_t>(high[p].bits) << 16;
        }
      }
  }
};

// Position of element `depth` of column `column` in a table of `chunks` times 32 depths, in
// elements; the parts of 8 columns follow each other.
__host__ __device__ constexpr std::int64_t table_index(int chunks, int parts, int column, int depth,
                                                       int part) {
  const std::int64_t tile =
      static_cast<std::int64_t>(column / 8 * parts + part) * chunks + depth / 32;
  return (tile * 32 + column % 8 * 4 + depth % 32 / 8) * 8 + depth % 8;
}

// d[m] = rows x (8 columns) + start, for kMTiles tiles of 16 rows: the sum over parts p of the rows
// and q of the columns with p + q < kDepth. `table` points at this lane's 16 bytes of the columns'
// tile.
template <int kDepth, class T, int kChunks, int kParts, int kColumnParts, int kMTiles>
__device__ __forceinline__ void multiply_rows(
    const RowFragments<T, kChunks, kParts> (&rows)[kMTiles], const uint4* table,
    const float4& start, float (&d)[kMTiles][4]) {
  const float first_sum[4] = {start.x, start.y, start.z, start.w};
  bool first = true;
#pragma unroll
  for (int sum = kDepth - 1; sum >= 0; --sum)
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
      if (sum - p < 0 || sum - p >= kColumnParts) continue;
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        const uint4 b = table[((sum - p) * kChunks + chunk) * 32];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const std::uint32_t b0 = half ? b.z : b.x, b1 = half ? b.w : b.y;
#pragma unroll
          for (int m = 0; m < kMTiles; ++m) {
            if (first && half == 0 && chunk == 0)
              multiply_tile<Factor<T>>(d[m], rows[m].a[p][2 * chunk + half], b0, b1, first_sum);
            else
              multiply_tile<Factor<T>>(d[m], rows[m].a[p][2 * chunk + half], b0, b1, d[m]);
          }
        }
      }
      first = false;
    }
}

}  // namespace coterie::cuda
