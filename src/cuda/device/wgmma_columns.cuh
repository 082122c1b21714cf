// SPDX-License-Identifier: MIT
// Warpgroup products (wgmma.cuh) with both factors in shared memory, 64 rows by 64, 128 or 256
// columns.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/types.h"
#include "cuda/device/wgmma_operands.cuh"

namespace coterie::cuda {

// d = a b + add d, 64 x 16 by 16 x 2 count, both in shared memory.
#define COTERIE_PRODUCT(columns, type, names, outputs, a_name, b_name, add_name)               \
  asm volatile("{.reg .pred p; setp.ne.b32 p, " add_name                                       \
               ", 0;\n"                                                                        \
               "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." type "." type " {" names \
               "}, " a_name ", " b_name ", p, 1, 1, 0, 0;}"                                    \
               : outputs("+")                                                                  \
               : "l"(a), "l"(b), "r"(add))
#define COTERIE_COLUMNS(count, columns, names, outputs, a_name, b_name, add_name)  \
  template <class T>                                                               \
  __device__ __forceinline__ void wgmma_columns(float(&d)[count], std::uint64_t a, \
                                                std::uint64_t b, int add) {        \
    if constexpr (std::is_same_v<T, Bf16>)                                         \
      COTERIE_PRODUCT(columns, "bf16", names, outputs, a_name, b_name, add_name);  \
    else                                                                           \
      COTERIE_PRODUCT(columns, "f16", names, outputs, a_name, b_name, add_name);   \
  }
COTERIE_COLUMNS(32, "64", COTERIE_WGMMA_D32, COTERIE_WGMMA_OUT32, "%32", "%33", "%34")
COTERIE_COLUMNS(64, "128", COTERIE_WGMMA_D64, COTERIE_WGMMA_OUT64, "%64", "%65", "%66")
COTERIE_COLUMNS(128, "256", COTERIE_WGMMA_D128, COTERIE_WGMMA_OUT128, "%128", "%129", "%130")
#undef COTERIE_COLUMNS
#undef COTERIE_PRODUCT

}  // namespace coterie::cuda
