// SPDX-License-Identifier: MIT
// Products of the backward pass of lists (list_bwd.cuh) by warpgroup products: 16-bit types, rows
// of 64 or 128 elements, only for sm_90a. As list_bwd_products.cuh, but the work is only started:
// every function that starts some makes one group of it, for wait.
#pragma once

#include "cuda/device/bands.cuh"
#include "cuda/device/mma.cuh"

namespace coterie::cuda {

template <class Type, int kRowWidth>
struct GroupProducts {
  using T = Type;
  static constexpr int kWidth = kRowWidth;
  static constexpr int kColumns = 64;
  static constexpr int kUnit = 64;
  static constexpr int kRowBytes = kWidth * 2;
  static constexpr int kBlocksOne = kWidth == 64 ? 3 : 2;
  static constexpr int kBlocksTwo = kWidth == 64 ? 3 : 2;
  using Scores = float[32];
  using Sums = float[kWidth / 2];
  using Factor = FragmentA<T>[4];
  using Matrix = Bands<T, kWidth, 64>;

  __device__ static float (&band(Sums& sums, int number))[32] {
    return *reinterpret_cast<float(*)[32]>(sums + 32 * number);
  }

  template <int kRows, int kThreads>
  __device__ static void load(const Matrix& to, const Rows<const T>& rows, int first, int count,
                              const std::int32_t* index) {
    static_assert(kRows == 64, "whole matrices");
#pragma unroll
    for (int b = 0; b < Matrix::kCount; ++b)
      load_tile<kRows, kThreads>(
          Tile<T, 64>{to.base + b * Matrix::kBandBytes},
          Rows<const T>{rows.data + 64 * b, rows.pitch, rows.width - 64 * b, rows.aligned}, first,
          count, index);
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
  __device__ static void round(Factor& p, Scores& s) {
#pragma unroll
    for (int n = 0; n < 4; ++n) to_fragment(p[n], *reinterpret_cast<Accumulator*>(s + 8 * n));
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
