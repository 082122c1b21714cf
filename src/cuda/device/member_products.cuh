// SPDX-License-Identifier: MIT
// Products of attend_member_bwd.cu: weights of members over top keys, and sums over members.
#pragma once

#include <cstdint>

#include "cuda/clustered_bwd.h"
#include "cuda/device/mma.cuh"
#include "cuda/device/softmax.cuh"
#include "cuda/device/store.cuh"

namespace coterie::cuda {

// p and g . v of 16 rows from `row` on over 16 kCount slots from `slot` on; the lane's two rows see
// the first keys[] slots of the tile. lse in base 2.
template <class T, int kWidth, int kCount>
__device__ __forceinline__ void weights(Accumulator (&p)[kCount], Accumulator (&gv)[kCount],
                                        const Tile<T, kWidth>& sQ, const Tile<T, kWidth>& sG,
                                        const Tile<T, kWidth>& sK, const Tile<T, kWidth>& sV,
                                        int row, int slot, const float (&lse)[2],
                                        const int (&keys)[2], float scale) {
#pragma unroll
  for (int i = 0; i < 8 * kCount; ++i)
    p[i / 8][i / 4 % 2][i % 4] = gv[i / 8][i / 4 % 2][i % 4] = 0.0f;
  for_depths<T, kWidth / 16>([&](int d) {
    FragmentA<T> q, g;
    load_a(q, sQ, row, 16 * d);
    load_a(g, sG, row, 16 * d);
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      FragmentB<T> b;
      load_b(b, sK, slot + 16 * n, 16 * d);
      multiply_add(p[n], q, b);
      load_b(b, sV, slot + 16 * n, 16 * d);
      multiply_add(gv[n], g, b);
    }
  });
#pragma unroll
  for (int i = 0; i < 8 * kCount; ++i) {
    float& x = p[i / 8][i / 4 % 2][i % 4];
    const int column = slot + i / 4 * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + i % 2;
    x = column < keys[i / 2 % 2] ? exp2_approximate(fmaf(x, scale, -lse[i / 2 % 2])) : 0.0f;
  }
}

// Rounds a 16 x 16 accumulator to T and writes it to a tile, from a row and column on.
template <class T, int kWidth>
__device__ __forceinline__ void store_fragment(const Tile<T, kWidth>& tile, int row, int column,
                                               const Accumulator& acc) {
  const int lane = threadIdx.x % 32;
#if __CUDA_ARCH__ >= 900
  constexpr bool kMatrices = sizeof(T) == 2;
#else
  constexpr bool kMatrices = false;
#endif
  if constexpr (kMatrices) {
    FragmentA<T> a;
    to_fragment(a, acc);
    stmatrix_x4(tile.below(row).address(lane % 16, column + lane / 16 * 8), a.r);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const std::uint32_t to =
          tile.below(row).address(lane / 4 + i % 2 * 8, column + i / 2 * 8 + lane % 4 * 2);
      const float low = acc[i / 2][i % 2 * 2], high = acc[i / 2][i % 2 * 2 + 1];
      if constexpr (sizeof(T) == 2)
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(pack2<T>(low, high)) : "memory");
      else
        asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(to), "f"(low), "f"(high) : "memory");
    }
  }
}
// The warp's 16 rows of weights.
template <class T>
__device__ __forceinline__ void store_weights(const Tile<T, kSlotTile>& tile,
                                              const Accumulator (&acc)[2]) {
  const int row = static_cast<int>(threadIdx.x) / 32 * 16;
  store_fragment(tile, row, 0, acc[0]);
  store_fragment(tile, row, 16, acc[1]);
}

__device__ __forceinline__ uint4 load_shared16(std::uint32_t from) {
  uint4 words;
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "r"(from)
               : "memory");
  return words;
}

template <class T>
__device__ __forceinline__ FragmentA<T> all_ones() {
  FragmentA<T> ones;
#pragma unroll
  for (std::uint32_t& word : ones.r)
    if constexpr (sizeof(T) == 2)
      word = pack2<T>(1.0f, 1.0f);
    else
      word = __float_as_uint(1.0f);
  return ones;
}

// dk and dv of kSlotTile slots and the sum of the rows of G (as a product with ones), a share of
// the columns for each warp.
template <class T, int kWidth, int kWarps>
struct SlotSums {
  static constexpr int kColumns = kWidth / kWarps / 16;  // in units of 16
  Accumulator dk[kColumns][2], dv[kColumns][2], rows_sum[kColumns];

  __device__ static int first() { return static_cast<int>(threadIdx.x) / 32 * kColumns; }
  __device__ void clear() {
#pragma unroll
    for (int d = 0; d < kColumns; ++d)
#pragma unroll
      for (int i = 0; i < 8; ++i)
        dk[d][0][i / 4][i % 4] = dk[d][1][i / 4][i % 4] = dv[d][0][i / 4][i % 4] =
            dv[d][1][i / 4][i % 4] = rows_sum[d][i / 4][i % 4] = 0.0f;
  }
  // Adds dSᵀ Q, Pᵀ G and the sum of the first rows of the tiles.
  __device__ void add(const Tile<T, kSlotTile>& sD, const Tile<T, kSlotTile>& sP,
                      const Tile<T, kWidth>& sQ, const Tile<T, kWidth>& sG, int rows) {
    if constexpr (sizeof(T) == 2) {
#pragma unroll
      for (int r = 0; r < 16 * kWarps; r += 16) {
        if (r >= rows) break;
        add_rows(sD, sP, sQ, sG, r);
      }
    } else {  // see for_depths
#pragma unroll 1
      for (int r = 0; r < rows; r += 16) add_rows(sD, sP, sQ, sG, r);
    }
  }
  // The same for 16 rows from r on.
  __device__ __forceinline__ void add_rows(const Tile<T, kSlotTile>& sD,
                                           const Tile<T, kSlotTile>& sP, const Tile<T, kWidth>& sQ,
                                           const Tile<T, kWidth>& sG, int r) {
    FragmentA<T> a[2];
    FragmentB<T> b;
    load_a_transposed(a[0], sD, 0, r);
    load_a_transposed(a[1], sD, 16, r);
#pragma unroll
    for (int d = 0; d < kColumns; ++d) {
      load_b_transposed(b, sQ, 16 * (first() + d), r);
      multiply_add(dk[d][0], a[0], b);
      multiply_add(dk[d][1], a[1], b);
    }
    load_a_transposed(a[0], sP, 0, r);
    load_a_transposed(a[1], sP, 16, r);
#pragma unroll
    for (int d = 0; d < kColumns; ++d) {
      load_b_transposed(b, sG, 16 * (first() + d), r);
      multiply_add(dv[d][0], a[0], b);
      multiply_add(dv[d][1], a[1], b);
      multiply_add(rows_sum[d], all_ones<T>(), b);
    }
  }
  // Puts dk times `scale` and dv into two tiles of kSlotTile rows.
  __device__ void store(const Tile<T, kWidth>& to_dk, const Tile<T, kWidth>& to_dv,
                        float scale) const {
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int d = 0; d < kColumns; ++d) {
        Accumulator scaled;
#pragma unroll
        for (int i = 0; i < 8; ++i) scaled[i / 4][i % 4] = dk[d][m][i / 4][i % 4] * scale;
        store_fragment(to_dk, 16 * m, 16 * (first() + d), scaled);
        store_fragment(to_dv, 16 * m, 16 * (first() + d), dv[d][m]);
      }
  }
  __device__ void write_rows_sum(float* to) const {
    const int lane = threadIdx.x % 32;
    if (lane >= 4) return;  // all rows of the product are the same
#pragma unroll
    for (int n = 0; n < 2 * kColumns; ++n)
      store2(to + 16 * first() + 8 * n + 2 * lane, rows_sum[n / 2][n % 2][0],
             rows_sum[n / 2][n % 2][1]);
  }
};

}  // namespace coterie::cuda
