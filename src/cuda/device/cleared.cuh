// SPDX-License-Identifier: MIT
// Memory that a kernel with bandwidth to spare sets to 0 for a later one.
#pragma once

#include <cstdint>

namespace coterie::cuda {

struct ClearedSpans {
  static constexpr int kMost = 3;
  uint4* data[kMost];
  std::int64_t vectors[kMost];

  // Part `part` of `parts` of each, by `threads` threads, of which this is number `thread`.
  __device__ __forceinline__ void clear(int part, int parts, int thread, int threads) const {
#pragma unroll 1
    for (int i = 0; i < kMost; ++i) {
      const std::int64_t each = (vectors[i] + parts - 1) / parts, first = part * each;
      const auto count = static_cast<int>(min(each, vectors[i] - first));
      uint4* to = data[i] + first;
#pragma unroll 4
      for (int j = thread; j < count; j += threads) __stcs(to + j, make_uint4(0, 0, 0, 0));
    }
  }
};

}  // namespace coterie::cuda
