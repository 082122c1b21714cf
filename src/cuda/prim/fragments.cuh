// SPDX-License-Identifier: MIT
// Left operands of mma.sync products: the query rows of a warp for products with keys, and weights
// for products with values. The warp keeps 16 rows in registers; shared memory holds the tiles.
#pragma once

#include "cuda/prim/mma.cuh"
#include "cuda/prim/tile.cuh"

namespace coterie::cuda {

// kBlocks times 16 rows, in registers where they fit, to be multiplied with 16 keys at a time.
template <class T, int kDim, bool kResident, int kBlocks = 2>
struct QueryFragments {
  FragmentA<T> q[kBlocks][kResident ? kDim / 16 : 1];
  Tile<T, kDim> tile;  // its rows, if they do not fit

  __device__ void load(const Tile<T, kDim>& from, int row) {
    tile = from.below(row);
    if constexpr (kResident)
#pragma unroll
      for (int m = 0; m < kBlocks; ++m)
#pragma unroll
        for (int d = 0; d < kDim / 16; ++d) load_a(q[m][d], tile, 16 * m, 16 * d);
  }

  __device__ __forceinline__ void scores(Accumulator (&s)[kBlocks], const Tile<T, kDim>& keys,
                                         int column) const {
    if constexpr (sizeof(T) == 4)
#pragma unroll
      for (int m = 0; m < kBlocks; ++m) clear(s[m]);
    for_depths<T, kDim / 16>([&](int d) {
      FragmentB<T> k;
      load_b(k, keys, column, 16 * d);
#pragma unroll
      for (int m = 0; m < kBlocks; ++m) {
        FragmentA<T> own;
        if constexpr (!kResident) load_a(own, tile, 16 * m, 16 * d);
        const FragmentA<T>& a = kResident ? q[m][kResident ? d : 0] : own;
        if (sizeof(T) == 2 && d == 0)
          multiply(s[m], a, k);
        else
          multiply_add(s[m], a, k);
      }
    });
  }
};

// out += weights of 16 keys times their rows of `values`, from `row` on: P V.
template <class T, int kDim, int kBlocks>
__device__ __forceinline__ void add_values(Accumulator (&out)[kBlocks][kDim / 16],
                                           const Accumulator (&weights)[kBlocks],
                                           const Tile<T, kDim>& values, int row) {
  FragmentA<T> p[kBlocks];
#pragma unroll
  for (int m = 0; m < kBlocks; ++m) to_fragment(p[m], weights[m]);
#pragma unroll
  for (int d = 0; d < kDim / 16; ++d) {
    FragmentB<T> v;
    load_b_transposed(v, values, 16 * d, row);
#pragma unroll
    for (int m = 0; m < kBlocks; ++m) multiply_add(out[m][d], p[m], v);
  }
}

// Keys of a tile beside 128 queries: with two stages of keys and values at most 96 KiB, which every
// GPU has.
template <class T, int kDim>
constexpr int kTileKeys = Tile<T, kDim>::kRowBytes <= 128   ? 64
                          : Tile<T, kDim>::kRowBytes <= 256 ? 32
                                                            : 16;

// Shared memory of a forward pass with mma.sync: queries, then two stages of keys and values.
template <class T, int kDim, int kRows, int kKeys>
struct AttendTiles {
  static constexpr int kQueryBytes = kRows * Tile<T, kDim>::kRowBytes;
  static constexpr int kTileBytes = kKeys * Tile<T, kDim>::kRowBytes;
  static constexpr int kBytes = kQueryBytes + 4 * kTileBytes;

  Tile<T, kDim> queries;

  __device__ explicit AttendTiles(const void* memory) : queries{shared_address(memory)} {}
  __device__ Tile<T, kDim> keys(int stage) const {
    return {queries.base + kQueryBytes + stage * 2 * kTileBytes};
  }
  __device__ Tile<T, kDim> values(int stage) const { return {keys(stage).base + kTileBytes}; }
};

}  // namespace coterie::cuda
