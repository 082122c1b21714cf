// SPDX-License-Identifier: MIT
// Matrices in shared memory as operands of warpgroup products (wgmma.cuh), by rows or by columns.
// Only for sm_90a; the mma.sync kernels use fragments.cuh.
#pragma once

#include <cstdint>

#include "cuda/prim/load.cuh"
#include "cuda/prim/store.cuh"
#include "cuda/prim/wgmma.cuh"

namespace coterie::cuda {

// kRows rows of kWidth 16-bit elements: bands of 64 columns, each a tile of 128-byte rows, one
// after the other. `base` is a multiple of 1024.
template <class T, int kWidth, int kRows>
struct Bands {
  static constexpr int kCount = kWidth / 64, kBandBytes = kRows * 128;
  static constexpr int kBytes = kCount * kBandBytes;
  std::uint32_t base;

  // As load_tile, into rows from `row` on.
  template <int kLoaded, int kThreads>
  __device__ void load(int row, const Rows<const T>& rows, std::int64_t first, int count,
                       const std::int32_t* index = nullptr) const {
#pragma unroll
    for (int band = 0; band < kCount; ++band)
      load_tile<kLoaded, kThreads>(
          Tile<T, 64>{base + band * kBandBytes + row * 128},
          Rows<const T>{rows.data + 64 * band, rows.pitch, rows.width - 64 * band, rows.aligned},
          first, count, index);
  }
  __device__ std::uint64_t descriptor(int offset) const {
    return descriptor_behind(matrix_descriptor(base), offset);
  }
  // Rows from `row` on; depths 16 d .. 16 d + 15 are columns.
  __device__ std::uint64_t by_columns(int row, int d) const {
    return descriptor(row * 128 + d / 4 * kBandBytes + d % 4 * 32);
  }
  // Rows row .. row + 15 are the depths; columns of one band.
  __device__ std::uint64_t by_rows(int row, int band) const {
    return descriptor(row * 128 + band * kBandBytes);
  }
};

// d = 64 rows of a times 64 rows of b, transposed.
template <class T, int kWidth, int kRowsA, int kRowsB>
__device__ __forceinline__ void row_products(float (&d)[32], const Bands<T, kWidth, kRowsA>& a,
                                             int row_a, const Bands<T, kWidth, kRowsB>& b,
                                             int row_b) {
  wgmma<T, 0, 0>(d, a.by_columns(row_a, 0), b.by_columns(row_b, 0));
#pragma unroll
  for (int depth = 1; depth < kWidth / 16; ++depth)
    wgmma<T, 1, 0>(d, a.by_columns(row_a, depth), b.by_columns(row_b, depth));
}

// The same with the left rows in registers.
template <class T, int kWidth, int kRows>
__device__ __forceinline__ void row_products(float (&d)[32],
                                             const std::uint32_t (&a)[kWidth / 16][4],
                                             const Bands<T, kWidth, kRows>& b, int row) {
  wgmma<T, 0, 0>(d, a[0], b.by_columns(row, 0));
#pragma unroll
  for (int depth = 1; depth < kWidth / 16; ++depth)
    wgmma<T, 1, 0>(d, a[depth], b.by_columns(row, depth));
}

// d += a times 64 rows of b.
template <class T, int kWidth, int kRows>
__device__ __forceinline__ void add_products(float (&d)[kWidth / 64][32],
                                             const std::uint32_t (&a)[4][4],
                                             const Bands<T, kWidth, kRows>& b, int row) {
#pragma unroll
  for (int k = 0; k < 4; ++k)
#pragma unroll
    for (int band = 0; band < kWidth / 64; ++band)
      wgmma<T, 1, 1>(d[band], a[k], b.by_rows(row + 16 * k, band));
}

// An accumulator rounded to T, as left factor.
template <class T>
__device__ __forceinline__ void pack_factor(std::uint32_t (&a)[4][4], const float (&d)[32]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) a[i / 4][i % 4] = pack2<T>(d[2 * i], d[2 * i + 1]);
}

// The same for any number of columns, all rows of b: d = a bᵀ, and sum += x b with x rounded to T.
template <class T, int kWidth, int kColumns>
__device__ __forceinline__ void start_products(float (&d)[kColumns / 2],
                                               const Bands<T, kWidth, 64>& a,
                                               const Bands<T, kWidth, kColumns>& b) {
#pragma unroll
  for (int depth = 0; depth < kWidth / 16; ++depth)
    wgmma_step<T, 0>(depth, d, a.by_columns(0, depth), b.by_columns(0, depth));
}
template <class T, int kWidth, int kColumns>
__device__ __forceinline__ void start_sums(float (&sum)[kWidth / 64][32],
                                           const std::uint32_t (&x)[kColumns / 16][4],
                                           const Bands<T, kWidth, kColumns>& b) {
#pragma unroll
  for (int k = 0; k < kColumns / 16; ++k)
#pragma unroll
    for (int band = 0; band < kWidth / 64; ++band)
      wgmma<T, 1, 1>(sum[band], x[k], b.by_rows(16 * k, band));
}
template <class T, int kCount>
__device__ __forceinline__ void round_factor(std::uint32_t (&x)[kCount / 8][4],
                                             const float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) x[i / 4][i % 4] = pack2<T>(d[2 * i], d[2 * i + 1]);
}

// Row of a warpgroup's 64 that this lane holds: upper (side 0) or lower (side 1).
__device__ __forceinline__ int group_row(int side) {
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
  return thread / 32 * 16 + 8 * side + thread % 32 / 4;
}

// Writes columns `column` .. column + 63 of a warpgroup's rows, from `first` on; `left` of them
// exist.
template <class T>
__device__ __forceinline__ void store_band(const Rows<T>& rows, const float (&sum)[32], int first,
                                           int left, int column) {
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    Accumulator pair[2];
#pragma unroll
    for (int i = 0; i < 16; ++i) pair[i / 8][i / 4 % 2][i % 4] = sum[16 * part + i];
#pragma unroll
    for (int side = 0; side < 2; ++side)
      store_columns(rows, first + group_row(side), group_row(side) < left, column + 32 * part, pair,
                    side);
  }
}

// All threads of one warpgroup wait for each other. Not a PartBarrier (mbarrier.cuh) because
// racecheck reports none of the kernels that use it.
__device__ __forceinline__ void sync_group() {
  asm volatile(
      "bar.sync %0, %1;" ::"r"(static_cast<int>(threadIdx.x) / kWarpgroup + kGroupBarriers),
      "n"(kWarpgroup)
      : "memory");
}

}  // namespace coterie::cuda
