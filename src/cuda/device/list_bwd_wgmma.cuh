// SPDX-License-Identifier: MIT
// Products of the backward pass of lists (list_bwd.cuh) by warpgroup products: 16-bit types, rows
// of 64 or 128 elements, only for sm_90a. As list_bwd_products.cuh, but the work is only started:
// every function that starts some makes one group of it, for wait.
#pragma once

#include "cuda/device/bands.cuh"
#include "cuda/device/list_bwd_products.cuh"

namespace coterie::cuda {

template <class Type, int kRowWidth>
struct GroupProducts {
  using T = Type;
  static constexpr int kWidth = kRowWidth;
  static constexpr int kColumns = 64;
  static constexpr int kUnit = 64;
  static constexpr int kRowBytes = kWidth * 2;
  static constexpr int kBlocks = 2;  // on a multiprocessor
  using Scores = float[32];
  using Sums = float[kWidth / 2];
  using Factor = FragmentA<T>[4];
  using Matrix = Bands<T, kWidth, 64>;

  __device__ static float (&band(Sums& sums, int number))[32] {
    return *reinterpret_cast<float(*)[32]>(sums + 32 * number);
  }

  // Rows of two tensors, by the 128 threads of a block: ranks from `first` on, `count` of them and
  // zeros beyond.
  template <int kRows>
  __device__ static void load(const Matrix (&to)[2], const Rows<const T> (&rows)[2], int first,
                              int count, const std::int32_t* index) {
    static_assert(kRows == 64, "whole matrices");
    constexpr int kStep = kWarpgroup / 8;              // rows at a time
    const Rows<const T> both[2] = {rows[0], rows[1]};  // read once, not after every copy
    const int r = static_cast<int>(threadIdx.x) / 8, chunk = static_cast<int>(threadIdx.x) % 8;
    std::int64_t row[64 / kStep];
    bool there[64 / kStep];
#pragma unroll
    for (int i = 0; i < 64 / kStep; ++i) there[i] = r + i * kStep < count;
    if (index) {
#pragma unroll
      for (int i = 0; i < 64 / kStep; ++i) row[i] = there[i] ? index[r + i * kStep] : 0;
    }
#pragma unroll
    for (int tensor = 0; tensor < 2; ++tensor)
#pragma unroll
      for (int band = 0; band < Matrix::kCount; ++band) {
        const Rows<const T>& from = both[tensor];
        const std::uint32_t target =
            Tile<T, 64>{to[tensor].base + band * Matrix::kBandBytes}.chunk(r, chunk);
        const int column = 64 * band + 8 * chunk;
        const T* source = from.row(first + r) + column;
#pragma unroll
        for (int i = 0; i < 64 / kStep; ++i) {
          if (index) source = from.row(row[i]) + column;
          cp_async16(target + i * kStep * 128, source, there[i] && column < from.width ? 16 : 0);
          source += kStep * from.pitch;
        }
      }
  }
  __device__ static void start_scores(Scores& s, const Matrix& a, const Matrix& b) {
    row_products(s, a, 0, b, 0);
    wgmma_commit();
  }
  __device__ static void start_sums(Sums& sum, const Factor& p, const Matrix& b) {
#pragma unroll
    for (int k = 0; k < 4; ++k)
#pragma unroll
      for (int part = 0; part < Matrix::kCount; ++part)
        wgmma<T, 1, 1>(band(sum, part), p[k].r, b.by_rows(16 * k, part));
    wgmma_commit();
  }
  __device__ static void round(FragmentA<T>& factor, Scores& s, int part) {
    to_fragment(factor, *reinterpret_cast<Accumulator*>(s + 8 * part));
  }

  // An element of a matrix in an even column, and the next.
  __device__ static float2 pair(const Matrix& matrix, int row, int column) {
    const Tile<T, 64> tile{matrix.base + column / 64 * Matrix::kBandBytes};
    return load_pair<T>(tile.address(row, column % 64));
  }

  // Before products of what registers or this thread's copies hold.
  __device__ static void fence() { wgmma_fence(); }
  // Before the barrier behind which products read copied rows.
  __device__ static void publish() { fence_async_proxy(); }
  template <int kPending>
  __device__ static void wait() {
    wgmma_wait<kPending>();
  }
  template <int kCount>
  __device__ static void settle(float (&values)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(values[i])::"memory");
  }
};

}  // namespace coterie::cuda
