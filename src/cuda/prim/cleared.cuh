// SPDX-License-Identifier: MIT
// Memory that a kernel with bandwidth to spare sets to 0 for a later one.
#pragma once

#include <cstdint>

#include "coterie/view.h"

namespace coterie::cuda {

// A tensor without gaps, in parts.
struct ClearedSpan {
  uint4* data = nullptr;
  std::int64_t vectors = 0, each = 0;  // of all parts, and of one

  ClearedSpan() = default;
  ClearedSpan(const TensorView& tensor, std::int64_t parts) {
    if (!tensor.present()) return;
    data = static_cast<uint4*>(tensor.data);
    vectors = tensor.count() * static_cast<std::int64_t>(dtype_bytes(tensor.dtype)) / 16;
    each = (vectors + parts - 1) / parts;
  }

  // By `threads` threads, of which this is number `thread`.
  __device__ __forceinline__ void clear(int part, int thread, int threads) const {
    const std::int64_t first = part * each;
    const auto count = static_cast<int>(min(each, vectors - first));
    uint4* to = data + first;
#pragma unroll 4
    for (int i = thread; i < count; i += threads) __stcs(to + i, make_uint4(0, 0, 0, 0));
  }
};

// Whether a tensor is such: its memory has no gaps, in whatever order its dimensions are.
inline bool clearable(const TensorView& tensor) {
  std::int64_t covered = 1;
  for (int step = 0; step < tensor.rank; ++step)
    for (int dim = 0; dim < tensor.rank; ++dim)
      if (tensor.size(dim) > 1 && tensor.stride(dim) == covered) covered *= tensor.size(dim);
  return tensor.present() && covered == tensor.count() &&
         reinterpret_cast<std::uintptr_t>(tensor.data) % 16 == 0 &&
         covered * static_cast<std::int64_t>(dtype_bytes(tensor.dtype)) % 16 == 0;
}

}  // namespace coterie::cuda
