// SPDX-License-Identifier: MIT
// Steps of CAST's backward pass by warpgroup products, shared by mix_backward_sm90a.cu and
// inner_backward_sm90a.cu. A warpgroup owns 64 rows of two matrices A, B in shared memory and walks
// 64 rows of two others X, Y at a time:
//   p = weigh(A Xᵀ),   ds = derive(B Yᵀ, p),   sums += ds X and p X, or p Y.
// Own rows are tokens (queries, gradients of the output) over clusters (surrogates, summaries),
// clusters over tokens, or members of a cluster. A pair of tiles takes 16 KiB for rows of 64
// elements. Preconditions: Hopper, 16-bit types, aligned rows.
#pragma once

#include "cuda/cast/cast.cuh"
#include "cuda/prim/bands.cuh"
#include "cuda/prim/load.cuh"
#include "cuda/prim/store.cuh"

namespace coterie::cuda {

template <class T, int kWidth>
struct TilePair {
  using Matrix = Bands<T, kWidth, 64>;
  static constexpr int kBytes = 2 * Matrix::kBytes;
  Matrix first, second;

  __device__ explicit TilePair(std::uint32_t base) : first{base}, second{base + Matrix::kBytes} {}
  // Loads 64 aligned rows from `row` on, of which `count` exist, with kThreads threads.
  template <int kThreads>
  __device__ void load(const Rows<const T>& a, const Rows<const T>& b, int row, int count) const {
    load<kThreads>(first, a, row, count);
    load<kThreads>(second, b, row, count);
  }

 private:
  // load_tile for aligned rows; whole tiles take few instructions.
  template <int kThreads>
  __device__ static void load(const Matrix& to, const Rows<const T>& rows, int row, int count) {
    constexpr int kStep = kThreads / 8;
    const int thread = static_cast<int>(threadIdx.x) % kThreads, r = thread / 8;
#pragma unroll
    for (int band = 0; band < Matrix::kCount; ++band) {
      const int column = 64 * band + thread % 8 * 8;
      const int end = column < rows.width ? count : 0;
      const T* from = rows.row(row + r) + column;
      const std::uint32_t target =
          Tile<T, 64>{to.base + band * Matrix::kBandBytes}.chunk(r, thread % 8);
      if (end >= 64) {
        const std::int64_t stride = kStep * rows.pitch;
#pragma unroll
        for (int step = 0; step < 64; step += kStep, from += stride)
          cp_async16(target + step * 128, from, 16);
        continue;
      }
#pragma unroll 1
      for (int step = 0; step < 64; step += kStep) {
        const bool there = r + step < end;
        cp_async16(target + step * 128, there ? from + step * rows.pitch : rows.data,
                   there ? 16 : 0);
      }
    }
  }
};

template <int kWidth>
using TileSum = float[kWidth / 64][32];

template <int kWidth>
__device__ __forceinline__ void settle(TileSum<kWidth>& sum) {
#pragma unroll
  for (int band = 0; band < kWidth / 64; ++band) wgmma_settle(sum[band]);
}

// Like add_products, but starts a sum if `add` is 0.
template <class T, int kWidth>
__device__ __forceinline__ void add_from(TileSum<kWidth>& d, const std::uint32_t (&a)[4][4],
                                         const Bands<T, kWidth, 64>& b, int add) {
#pragma unroll
  for (int band = 0; band < kWidth / 64; ++band)
    wgmma_from<T, 1>(d[band], a[0], b.by_rows(0, band), add);
#pragma unroll
  for (int k = 1; k < 4; ++k)
#pragma unroll
    for (int band = 0; band < kWidth / 64; ++band)
      wgmma<T, 1, 1>(d[band], a[k], b.by_rows(16 * k, band));
}
// A sum that walk() starts: no value yet.
template <int kWidth>
__device__ __forceinline__ void declare(TileSum<kWidth>& sum) {
#pragma unroll
  for (int i = 0; i < kWidth / 2; ++i) asm volatile("" : "=f"(sum[i / 32][i % 32]));
}

// Products of own with others; weigh(s) turns those of the first matrices into weights, derive(d,
// s) those of the second into derivatives. Adds the sums of both with rows of the others to the
// sums, or starts them if `add` is 0; they are still in flight on return.
template <class T, int kWidth, class Weigh, class Derive>
__device__ __forceinline__ void walk(const TilePair<T, kWidth>& own,
                                     const TilePair<T, kWidth>& other,
                                     const Bands<T, kWidth, 64>& weighted,
                                     TileSum<kWidth>& derivatives, TileSum<kWidth>& weights,
                                     int add, const Weigh& weigh, const Derive& derive) {
  float s[32], d[32];
  std::uint32_t s_factor[4][4], d_factor[4][4];
  wgmma_fence();
  row_products(s, own.first, 0, other.first, 0);
  wgmma_commit();
  row_products(d, own.second, 0, other.second, 0);
  wgmma_commit();
  wgmma_wait<1>();  // also for the previous sums, which read the factors
  wgmma_settle(s);
  weigh(s);
  wgmma_wait<0>();
  wgmma_settle(d);
  derive(d, s);
  pack_factor<T>(s_factor, s);
  pack_factor<T>(d_factor, d);
  wgmma_fence();
  add_from<T, kWidth>(weights, s_factor, weighted, add);
  add_from<T, kWidth>(derivatives, d_factor, other.first, add);
  wgmma_commit();
}

// For each of a lane's two rows: the mean of d weighted by s.
__device__ __forceinline__ void guess_deltas(float (&guess)[2], const float (&d)[32],
                                             const float (&s)[32]) {
#pragma unroll
  for (int side = 0; side < 2; ++side) {
    float weights = 0.0f, products = 0.0f;
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const int i = j / 2 * 4 + 2 * side + j % 2;
      weights += s[i];
      products = fmaf(s[i], d[i], products);
    }
    guess[side] = __fdividef(quad_sum(products), fmaxf(quad_sum(weights), 1e-30f));
  }
}

// Stores a warp's 16 rows of an accumulator to rows of `width` elements, of which `count` exist,
// staged in its rows of a tile.
template <class T>
__device__ __forceinline__ void store_rows(T* to, std::int64_t pitch, int count, int width,
                                           std::uint32_t tile, const float (&d)[32]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::uint32_t rows = tile + static_cast<int>(threadIdx.x) % kWarpgroup / 32 * 2048;
  const std::uint32_t own = rows + lane % 16 * 128 + (((lane / 16) ^ (lane % 8)) << 4);
  std::uint32_t a[4][4];
  pack_factor<T>(a, d);
#pragma unroll
  for (int k = 0; k < 4; ++k) stmatrix_x4(own ^ (k * 32), a[k]);
  __syncwarp();
  const int row = lane / 8, chunk = lane % 8;
  const std::uint32_t even = rows + row * 128 + ((chunk ^ row) << 4);
  T* first = to + row * pitch + chunk * 8;
  const int end = chunk * 8 < width ? count - row : 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint4 words = load_shared16((i % 2 ? even ^ 64 : even) + i * 512);
    if (4 * i < end) *reinterpret_cast<uint4*>(first + 4 * i * pitch) = words;
  }
}

// Stores 32 columns of a row from two neighbouring parts of a sum.
template <class U>
__device__ __forceinline__ void store_part(const Rows<U>& rows, int row, bool there, int part,
                                           const float* values, float factor, int side) {
  Accumulator pair[2];
#pragma unroll
  for (int i = 0; i < 16; ++i) pair[i / 8][i / 4 % 2][i % 4] = values[i] * factor;
  store_columns(rows, row, there, 32 * part, pair, side);
}

}  // namespace coterie::cuda
