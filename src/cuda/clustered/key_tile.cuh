// SPDX-License-Identifier: MIT
// 64 keys of a warpgroup against the centroids, in the backward pass (backward.h): weights,
// their derivatives and the sums dk and dv, 64 centroids at a time.
#pragma once

#include <cstdint>

#include "cuda/clustered/backward.h"
#include "cuda/prim/bands.cuh"
#include "cuda/prim/softmax.cuh"
#include "cuda/prim/store.cuh"
#include "cuda/prim/warp.cuh"

namespace coterie::cuda {

// A matrix from a row on.
template <class Matrix>
__device__ __forceinline__ Matrix uniform_rows(const Matrix& matrix, int row) {
  return {__shfl_sync(~0u, matrix.base + row * 128, 0)};
}

// Rows first .. of a range with `count` left, by one warpgroup; slowly where they are not aligned,
// for want of registers.
template <class T, int kWidth>
__device__ __forceinline__ void load_rows(const Bands<T, kWidth, 64>& to, const Rows<const T>& rows,
                                          int first, int count) {
  const int r = static_cast<int>(threadIdx.x) % kWarpgroup / 8, chunk = threadIdx.x % 8;
#pragma unroll
  for (int band = 0; band < kWidth / 64; ++band) {
    const Tile<T, 64> tile{to.base + band * to.kBandBytes};
    const int column = 64 * band + 8 * chunk;
    const T* from = rows.row(first + r) + column;
    if (rows.aligned) {
#pragma unroll
      for (int step = 0; step < 64; step += 16) {
        const bool there = column < rows.width && r + step < count;
        cp_async16(tile.chunk(r + step, chunk), there ? from + step * rows.pitch : rows.data,
                   there ? 16 : 0);
      }
      continue;
    }
#pragma unroll 1
    for (int step = 0; step < 64; step += 16)
      store_shared16(tile.chunk(r + step, chunk),
                     r + step < count ? load_chunk(rows.row(first + r + step), column, rows.width)
                                      : make_uint4(0, 0, 0, 0));
  }
}

template <class T, int kWidth>
struct KeyTile {
  static constexpr int kBands = kWidth / 64;
  float dk[kBands][32], dv[kBands][32];
  std::uint32_t ds_factor[4][4];  // dS of the centroids that were added last

  __device__ void clear() {
#pragma unroll
    for (int band = 0; band < kBands; ++band) {
#pragma unroll
      for (int i = 0; i < 32; ++i) dk[band][i] = dv[band][i] = 0.0f;
      wgmma_settle(dk[band]);
      wgmma_settle(dv[band]);
    }
  }

  // Adds 64 centroids, with lse and delta of them. `count` keys are there. Only sums are on their
  // way when accumulators are read: of others the assembler does not see that they were waited for.
  template <class Keys, class Centroids>
  __device__ void add(const Keys& k, const Keys& v, const Centroids& mean, const Centroids& dout,
                      const float* lse, const float* delta, float scale, int count) {
    float s[32], ds[32];
    std::uint32_t p_factor[4][4];
    wgmma_wait<0>();  // for the sums, whose factors make room
    wgmma_fence();
    row_products(s, k, 0, mean, 0);
    wgmma_commit();
    row_products(ds, v, 0, dout, 0);
    wgmma_commit();
    wgmma_wait<1>();
    wgmma_settle(s);
    weigh(s, lse, scale, count);
    pack_factor<T>(p_factor, s);
    wgmma_fence();
    add_products(dv, p_factor, dout, 0);
    wgmma_commit();
    wgmma_wait<1>();
    wgmma_settle(ds);
    differentiate(ds, s, delta);
    pack_factor<T>(ds_factor, ds);
    wgmma_fence();
    add_products(dk, ds_factor, mean, 0);
    wgmma_commit();
  }
  __device__ void finish() {
    wgmma_wait<0>();
#pragma unroll
    for (int band = 0; band < kBands; ++band) {
      wgmma_settle(dk[band]);
      wgmma_settle(dv[band]);
    }
  }

  // Writes the rows of keys `first` and up, `count` of which are there.
  __device__ void store(const BackwardShape& shape, const Rows<T>& to_dk, const Rows<T>& to_dv,
                        int first, int count) const {
    const float factor = 1.0f / (shape.weight_scale * shape.gradient_scale);
    if (to_dk.data) store(to_dk, dk, shape.scale * factor, first, count);
    if (to_dv.data) store(to_dv, dv, factor, first, count);
  }

 private:
  // Calls body(i, value) for element i of an accumulator and the value of its centroid.
  template <class Body>
  __device__ static void for_centroids(const float* values, const Body& body) {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float2 two = *reinterpret_cast<const float2*>(values + 8 * n + threadIdx.x % 4 * 2);
#pragma unroll
      for (int i = 0; i < 4; ++i) body(4 * n + i, i % 2 ? two.y : two.x);
    }
  }
  // s becomes the weights.
  __device__ static void weigh(float (&s)[32], const float* lse, float scale, int count) {
    for_centroids(lse, [&](int i, float l) { s[i] = exp2_approximate(fmaf(s[i], scale, -l)); });
    if (count >= 64) return;  // exp2 of -lse could overflow, and inf times a zero key is NaN
#pragma unroll
    for (int i = 0; i < 32; ++i)
      if (group_row(i / 2 % 2) >= count) s[i] = 0.0f;
  }
  __device__ static void differentiate(float (&ds)[32], const float (&s)[32], const float* delta) {
    for_centroids(delta, [&](int i, float e) { ds[i] = s[i] * (ds[i] - e); });
  }
  __device__ static void store(const Rows<T>& rows, const float (&sum)[kBands][32], float factor,
                               int first, int count) {
#pragma unroll
    for (int part = 0; part < kWidth / 32; ++part) {
      Accumulator pair[2];
#pragma unroll
      for (int i = 0; i < 16; ++i)
        pair[i / 8][i / 4 % 2][i % 4] = sum[part / 2][part % 2 * 16 + i] * factor;
#pragma unroll
      for (int side = 0; side < 2; ++side)
        store_columns(rows, first + group_row(side), group_row(side) < count, 32 * part, pair,
                      side);
    }
  }
};

}  // namespace coterie::cuda
