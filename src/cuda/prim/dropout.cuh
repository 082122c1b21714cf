// SPDX-License-Identifier: MIT
// Attention dropout in kernels (core/dropout.h).
#pragma once

#include "core/dropout.h"

namespace coterie::cuda {

// The factor of the weight of a row and a key: 0, or 1 / (1 - p).
__device__ __forceinline__ float kept(const Dropout& dropout, const DropoutRow& row, int key) {
  return dropout_word(row, static_cast<std::uint32_t>(key)) < dropout.threshold
             ? 0.0f
             : static_cast<float>(dropout.keep_scale);
}

}  // namespace coterie::cuda
