// SPDX-License-Identifier: MIT
// Factors of warpgroup products (wgmma.cuh) of the backward pass of windows (window_walk.cuh).
#pragma once

#include <cstdint>

namespace coterie::cuda {

// A tile of 128-byte rows in shared memory as a factor, as Bands: in fewer instructions, as the
// address is known to have less than 18 bits.
struct WalkTile {
  std::uint32_t low;

  __device__ explicit WalkTile(std::uint32_t address) : low(address >> 4) {}
  __device__ std::uint64_t at(int bytes) const {
    return static_cast<std::uint64_t>(1024 >> 4 | 1u << 30) << 32 |
           (low + (bytes >> 4) + (1u << 16));
  }
  __device__ std::uint64_t by_columns(int row, int k) const { return at(row * 128 + k * 32); }
  __device__ std::uint64_t by_rows(int row) const { return at(row * 128); }
};

}  // namespace coterie::cuda
