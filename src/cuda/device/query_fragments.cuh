// SPDX-License-Identifier: MIT
// Rows of a warp as left factors of products with keys.
#pragma once

#include "cuda/device/mma.cuh"

namespace coterie::cuda {

// 32 rows, in registers where they fit, to be multiplied with 16 keys at a time.
template <class T, int kDim, bool kResident>
struct QueryFragments {
  FragmentA<T> q[2][kResident ? kDim / 16 : 1];
  Tile<T, kDim> tile;  // its rows, if they do not fit

  __device__ void load(const Tile<T, kDim>& from, int row) {
    tile = from.below(row);
    if constexpr (kResident)
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int d = 0; d < kDim / 16; ++d) load_a(q[m][d], tile, 16 * m, 16 * d);
  }

  __device__ void scores(Accumulator (&s)[2], const Tile<T, kDim>& keys, int column) {
    if constexpr (sizeof(T) == 4) {
      clear(s[0]);
      clear(s[1]);
    }
    for_depths<T, kDim / 16>([&](int d) {
      FragmentB<T> k;
      load_b(k, keys, column, 16 * d);
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        FragmentA<T>& a = q[m][kResident ? d : 0];
        if constexpr (!kResident) load_a(a, tile, 16 * m, 16 * d);
        if (sizeof(T) == 2 && d == 0)
          multiply(s[m], a, k);
        else
          multiply_add(s[m], a, k);
      }
    });
  }
};

}  // namespace coterie::cuda
