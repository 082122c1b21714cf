// SPDX-License-Identifier: MIT
// Ascending lists of rows.
#pragma once

#include <cstdint>

namespace coterie::cuda {

// How many of the first `count` entries of an ascending list are not beyond `most`.
__device__ __forceinline__ int count_up_to(const std::int32_t* list, int count, int most) {
  int low = 0;
  while (low < count) {
    const int middle = (low + count) / 2;
    if (list[middle] <= most)
      low = middle + 1;
    else
      count = middle;
  }
  return low;
}

}  // namespace coterie::cuda
