// SPDX-License-Identifier: MIT
// A warpgroup product (wgmma.cuh) of a transposed left factor in shared memory.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/types.h"
#include "cuda/device/wgmma_operands.cuh"

namespace coterie::cuda {

// d += aᵀ b, 64 x 16 by 16 x 64, both in shared memory with depths as rows of their tiles.
#define COTERIE_TRANSPOSED(type)                                                                   \
  asm volatile("{wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " {" COTERIE_WGMMA_D32 \
               "}, %32, %33, 1, 1, 1, 1, 1;}"                                                      \
               : COTERIE_WGMMA_OUT32("+")                                                          \
               : "l"(a), "l"(b))
template <class T>
__device__ __forceinline__ void wgmma_transposed(float (&d)[32], std::uint64_t a, std::uint64_t b) {
  if constexpr (std::is_same_v<T, Bf16>)
    COTERIE_TRANSPOSED("bf16");
  else
    COTERIE_TRANSPOSED("f16");
}
#undef COTERIE_TRANSPOSED

}  // namespace coterie::cuda
