// SPDX-License-Identifier: MIT
// Products of 16 x 16 fragments on tensor cores, for bf16, fp16 and fp32.
//
// A warp holds FragmentA (16 rows x 16 depth), FragmentB (16 depth x 16 columns) and a float
// accumulator of 16 x 16 as two 16 x 8 halves. In a half, lane l holds rows l/4 and l/4 + 8,
// columns 2 (l%4) and 2 (l%4) + 1: acc[half][0..1] in the first row, acc[half][2..3] in the second.
//
// fp32 operands are split into two tf32 parts, and three products of parts are added (the fourth is
// below fp32 rounding). Inside each group of 8 depths fp32 fragments hold depth 2 (l%4) where the
// hardware expects l%4, and 2 (l%4) + 1 for l%4 + 4; all loads here use this order, so an
// accumulator can be used as FragmentA without moving data between lanes.
#pragma once

#include <cstdint>

#include "cuda/prim/element.cuh"
#include "cuda/prim/tile.cuh"

namespace coterie::cuda {

// Four 8 x 8 matrices of 16-bit elements between shared memory and the registers of a warp, in the
// order of FragmentA: lanes 8 m .. 8 m + 7 have the addresses of the rows of matrix m.

__device__ __forceinline__ void ldmatrix_x4(std::uint32_t (&r)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_trans(std::uint32_t (&r)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// From sm_90 on.
__device__ __forceinline__ void stmatrix_x4(std::uint32_t address, const std::uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

template <class T>
struct FragmentA {
  std::uint32_t r[2 * sizeof(T)];
};
template <class T>
struct FragmentB {
  std::uint32_t r[2 * sizeof(T)];
};
using Accumulator = float[2][4];

// Calls body(d) for kSteps steps of depth. Unrolled except for fp32, where one product of fragments
// takes sixty instructions.
template <class T, int kSteps, class Body>
__device__ __forceinline__ void for_depths(const Body& body) {
  if constexpr (sizeof(T) == 2) {
#pragma unroll
    for (int d = 0; d < kSteps; ++d) body(d);
  } else {
#pragma unroll 1
    for (int d = 0; d < kSteps; ++d) body(d);
  }
}

__device__ __forceinline__ void clear(Accumulator& acc) {
#pragma unroll
  for (int i = 0; i < 8; ++i) acc[i / 4][i % 4] = 0.0f;
}

__device__ __forceinline__ std::uint32_t load_shared32(std::uint32_t address) {
  std::uint32_t word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
  return word;
}

__device__ __forceinline__ void load_shared64(std::uint32_t& low, std::uint32_t& high,
                                              std::uint32_t address) {
  asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];" : "=r"(low), "=r"(high) : "r"(address) : "memory");
}

// Rows row .. row+15, depths depth .. depth+15 of a tile. Here and below, row, column and depth are
// multiples of 16.
template <class T, int kWidth>
__device__ __forceinline__ void load_a(FragmentA<T>& a, const Tile<T, kWidth>& tile, int row,
                                       int depth) {
  const int lane = threadIdx.x % 32;
  if constexpr (sizeof(T) == 2) {
    ldmatrix_x4(a.r, tile.below(row).address(lane % 16, depth + lane / 16 * 8));
  } else {
#pragma unroll
    for (int group = 0; group < 2; ++group)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        load_shared64(
            a.r[4 * group + half], a.r[4 * group + 2 + half],
            tile.below(row).address(8 * half + lane / 4, depth + 8 * group + lane % 4 * 2));
  }
}

// The same for the transposed tile: the tile's rows are depths, its columns are rows of A.
template <class T, int kWidth>
__device__ __forceinline__ void load_a_transposed(FragmentA<T>& a, const Tile<T, kWidth>& tile,
                                                  int row, int depth) {
  const int lane = threadIdx.x % 32;
  if constexpr (sizeof(T) == 2) {
    ldmatrix_x4_trans(a.r,
                      tile.below(depth).address(lane % 8 + lane / 16 * 8, row + lane / 8 % 2 * 8));
  } else {
#pragma unroll
    for (int group = 0; group < 2; ++group)
#pragma unroll
      for (int pair = 0; pair < 2; ++pair)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          a.r[4 * group + 2 * pair + half] = load_shared32(tile.below(depth).address(
              8 * group + lane % 4 * 2 + pair, row + 8 * half + lane / 4));
  }
}

// Columns column .. column+15 are rows of the tile (keys in Q Kᵀ), depths its columns.
template <class T, int kWidth>
__device__ __forceinline__ void load_b(FragmentB<T>& b, const Tile<T, kWidth>& tile, int column,
                                       int depth) {
  const int lane = threadIdx.x % 32;
  if constexpr (sizeof(T) == 2) {
    ldmatrix_x4(b.r,
                tile.below(column).address(lane % 8 + lane / 16 * 8, depth + lane / 8 % 2 * 8));
  } else {
#pragma unroll
    for (int group = 0; group < 2; ++group)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        load_shared64(
            b.r[4 * half + 2 * group], b.r[4 * half + 2 * group + 1],
            tile.below(column).address(8 * half + lane / 4, depth + 8 * group + lane % 4 * 2));
  }
}

// Depths are rows of the tile (keys in P V), columns its columns.
template <class T, int kWidth>
__device__ __forceinline__ void load_b_transposed(FragmentB<T>& b, const Tile<T, kWidth>& tile,
                                                  int column, int depth) {
  const int lane = threadIdx.x % 32;
  if constexpr (sizeof(T) == 2) {
    ldmatrix_x4_trans(b.r, tile.below(depth).address(lane % 16, column + lane / 16 * 8));
  } else {
#pragma unroll
    for (int group = 0; group < 2; ++group)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int pair = 0; pair < 2; ++pair)
          b.r[4 * half + 2 * group + pair] = load_shared32(tile.below(depth).address(
              8 * group + lane % 4 * 2 + pair, column + 8 * half + lane / 4));
  }
}

// Rounds a 16 x 16 accumulator to T, as the left factor of the next product.
template <class T>
__device__ __forceinline__ void to_fragment(FragmentA<T>& a, const Accumulator& acc) {
#pragma unroll
  for (int half = 0; half < 2; ++half)
    if constexpr (sizeof(T) == 2) {
      a.r[2 * half] = pack2<T>(acc[half][0], acc[half][1]);
      a.r[2 * half + 1] = pack2<T>(acc[half][2], acc[half][3]);
    } else {
      a.r[4 * half] = __float_as_uint(acc[half][0]);
      a.r[4 * half + 1] = __float_as_uint(acc[half][2]);
      a.r[4 * half + 2] = __float_as_uint(acc[half][1]);
      a.r[4 * half + 3] = __float_as_uint(acc[half][3]);
    }
}

// d = a b + c.
template <class T>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const std::uint32_t (&a)[4],
                                             const std::uint32_t* b, const float (&c)[4]);
template <>
__device__ __forceinline__ void mma_m16n8k16<Bf16>(float (&d)[4], const std::uint32_t (&a)[4],
                                                   const std::uint32_t* b, const float (&c)[4]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%10,%11,%12,%13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]),
        "f"(c[2]), "f"(c[3]));
}
template <>
__device__ __forceinline__ void mma_m16n8k16<F16>(float (&d)[4], const std::uint32_t (&a)[4],
                                                  const std::uint32_t* b, const float (&c)[4]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%10,%11,%12,%13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]),
        "f"(c[2]), "f"(c[3]));
}

__device__ __forceinline__ void mma_m16n8k8_tf32(float (&d)[4], const std::uint32_t (&a)[4],
                                                 const std::uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// value = high + low, both tf32; the bits below low's last are dropped.
__device__ __forceinline__ void split_tf32(std::uint32_t value, std::uint32_t& high,
                                           std::uint32_t& low) {
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(high) : "f"(__uint_as_float(value)));
  const float rest = __uint_as_float(value) - __uint_as_float(high);
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(low) : "f"(rest));
}

// d = a b + c; d may be c.
template <class T>
__device__ __forceinline__ void multiply_add(Accumulator& d, const FragmentA<T>& a,
                                             const FragmentB<T>& b, const Accumulator& c) {
  if constexpr (sizeof(T) == 2) {
    mma_m16n8k16<T>(d[0], a.r, b.r, c[0]);
    mma_m16n8k16<T>(d[1], a.r, b.r + 2, c[1]);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) d[i / 4][i % 4] = c[i / 4][i % 4];
#pragma unroll
    for (int group = 0; group < 2; ++group) {
      std::uint32_t a_high[4], a_low[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) split_tf32(a.r[4 * group + i], a_high[i], a_low[i]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        std::uint32_t b_high[2], b_low[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) split_tf32(b.r[4 * half + 2 * group + i], b_high[i], b_low[i]);
        mma_m16n8k8_tf32(d[half], a_low, b_high);
        mma_m16n8k8_tf32(d[half], a_high, b_low);
        mma_m16n8k8_tf32(d[half], a_high, b_high);
      }
    }
  }
}

// acc += a b.
template <class T>
__device__ __forceinline__ void multiply_add(Accumulator& acc, const FragmentA<T>& a,
                                             const FragmentB<T>& b) {
  multiply_add(acc, a, b, acc);
}

// acc = a b.
template <class T>
__device__ __forceinline__ void multiply(Accumulator& acc, const FragmentA<T>& a,
                                         const FragmentB<T>& b) {
  const Accumulator zero = {};
  multiply_add(acc, a, b, zero);
}

}  // namespace coterie::cuda
