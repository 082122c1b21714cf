// SPDX-License-Identifier: MIT
// Shared memory of a forward pass by mma.sync: queries, then two stages of keys and values.
#pragma once

#include "cuda/device/tile.cuh"

namespace coterie::cuda {

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
