// SPDX-License-Identifier: MIT
// Counters that the first kernel of a call sets to 0 for later ones, which saves a memset.
#pragma once

#include <cstdint>

namespace coterie::cuda {

struct ZeroedWords {
  unsigned* data = nullptr;
  std::int64_t count = 0;

  // All threads of the grid call it.
  __device__ void zero() const {
    for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
         i < count; i += static_cast<std::int64_t>(gridDim.x) * blockDim.x)
      data[i] = 0;
  }
};

}  // namespace coterie::cuda
