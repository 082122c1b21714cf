// SPDX-License-Identifier: MIT
// The normal random numbers of coterie/random.h on the device.
#pragma once

#include <cstdint>

#include "coterie/random.h"

namespace coterie::cuda {

__device__ inline double normal(const RandomStream& stream, std::uint64_t index) {
  const RandomBits bits = stream.at(index);
  const double radius = sqrt(-2.0 * log(random_unit(bits.word[0])));
  return radius * cos(6.283185307179586 * random_unit(bits.word[1]));
}

}  // namespace coterie::cuda
