// SPDX-License-Identifier: MIT
// A warpgroup product (wgmma.cuh) of 64 rows and 32 columns.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/types.h"

namespace coterie::cuda {

// d = a b (add 0) or d += a b, 64 x 16 by 16 x 32, both in shared memory.
template <class T, int kAdd>
__device__ __forceinline__ void wgmma_narrow(float (&d)[16], std::uint64_t a, std::uint64_t b) {
#define COTERIE_NARROW(type, io)                                                              \
  asm volatile(                                                                               \
      "{.reg .pred p; setp.ne.b32 p, %18, 0;\n"                                               \
      "wgmma.mma_async.sync.aligned.m64n32k16.f32." type "." type                             \
      " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, %16, %17, p, 1, 1, 0, 0;}"   \
      : io "f"(d[0]), io "f"(d[1]), io "f"(d[2]), io "f"(d[3]), io "f"(d[4]), io "f"(d[5]),   \
        io "f"(d[6]), io "f"(d[7]), io "f"(d[8]), io "f"(d[9]), io "f"(d[10]), io "f"(d[11]), \
        io "f"(d[12]), io "f"(d[13]), io "f"(d[14]), io "f"(d[15])                            \
      : "l"(a), "l"(b), "n"(kAdd))
  if constexpr (std::is_same_v<T, Bf16> && kAdd)
    COTERIE_NARROW("bf16", "+");
  else if constexpr (std::is_same_v<T, Bf16>)
    COTERIE_NARROW("bf16", "=");
  else if constexpr (kAdd)
    COTERIE_NARROW("f16", "+");
  else
    COTERIE_NARROW("f16", "=");
#undef COTERIE_NARROW
}

}  // namespace coterie::cuda
