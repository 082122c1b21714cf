// SPDX-License-Identifier: MIT
// What the warpgroup products of the forward pass over a stream (list_stream.cuh) multiply.
#pragma once

#include <cstdint>

#include "cuda/device/bands.cuh"
#include "cuda/device/ldmatrix.cuh"
#include "cuda/device/list_stream.cuh"

namespace coterie::cuda {

// A lane's part of ldmatrix and stmatrix of its warp's 16 rows in a tile of 64 (Tile<T, 64>, at a
// multiple of 1024): the first 16 columns; others are those at ^ 32 bytes.
__device__ __forceinline__ std::uint32_t matrix_lane() {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int row = static_cast<int>(threadIdx.x) % kWarpgroup / 32 * 16 + lane % 16;
  return row * 128 + ((lane / 16 ^ lane % 8) << 4);
}
// A tile of keys or values in the ring, as right factor: the low word of its descriptor. What is
// the same for a warp and known to be stays in uniform registers.
template <class T, int kDim>
struct RingTile {
  static constexpr int kBand = kStreamRows * 128 / 16;
  std::uint32_t low;

  __device__ std::uint64_t at(int offset) const {
    return static_cast<std::uint64_t>(0x40000040u) << 32 | (low + offset);
  }
  __device__ std::uint64_t by_columns(int d) const { return at(d / 4 * kBand + d % 4 * 2); }
  __device__ std::uint64_t by_rows(int k, int band) const { return at(k * 128 + band * kBand); }

  // The values beside a tile of keys.
  __device__ RingTile values() const { return {low + kDim / 64 * kBand}; }

  // Starts out = (kAdd 0) or += (1) p times the values of this tile.
  template <int kAdd>
  __device__ void add_products(float (&out)[kDim / 64][32], const std::uint32_t (&p)[4][4]) const {
#pragma unroll
    for (int k = 0; k < 4; ++k)
#pragma unroll
      for (int band = 0; band < kDim / 64; ++band)
        wgmma_step<T, 1>(kAdd + k, out[band], p[k], by_rows(k, band));
  }
};

// The queries of a step, as left factors: in registers where there are enough, which leaves more of
// shared memory's time to the keys.
template <class T, int kDim>
struct StepQueries {
  static constexpr bool kHeld = kDim == 64;
  std::uint32_t a[kHeld ? kDim / 16 : 1][4];
  Bands<T, kDim, kStreamRows> tile;

  // Those of a step; `negated` where their scores are to be, and they are held.
  __device__ void load(std::uint32_t address, bool negated) {
    tile.base = address;
    if constexpr (kHeld) {
      const std::uint32_t from = address + matrix_lane();
#pragma unroll
      for (int d = 0; d < kDim / 16; ++d) ldmatrix_x4(a[d], from ^ d * 32);
      if (negated) {
#pragma unroll
        for (int i = 0; i < kDim / 4; ++i) a[i / 4][i % 4] ^= 0x80008000u;
      }
    }
  }
  // Starts the scores of a tile of keys.
  __device__ void scores(float (&s)[32], const RingTile<T, kDim>& keys) const {
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d)
      if constexpr (kHeld)
        wgmma_step<T, 0>(d, s, a[d], keys.by_columns(d));
      else
        wgmma_step<T, 0>(d, s, tile.by_columns(0, d), keys.by_columns(d));
  }
};

}  // namespace coterie::cuda
