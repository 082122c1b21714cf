// SPDX-License-Identifier: MIT
// A warpgroup product (wgmma.cuh) of a transposed left factor in shared memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace coterie::cuda {

// d += aᵀ b, 64 x 16 by 16 x 64, both in shared memory with depths as rows of their tiles.
#define COTERIE_TRANSPOSED(type)                                                                  \
  asm volatile("{wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type                       \
               " "                                                                                \
               "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%" \
               "22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, %32, %33, 1, 1, 1, 1, 1;}"               \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),          \
                 "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),        \
                 "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]),    \
                 "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),    \
                 "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]),    \
                 "+f"(d[30]), "+f"(d[31])                                                         \
               : "l"(a), "l"(b))
template <class T>
__device__ __forceinline__ void wgmma_transposed(float (&d)[32], std::uint64_t a, std::uint64_t b) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>)
    COTERIE_TRANSPOSED("bf16");
  else
    COTERIE_TRANSPOSED("f16");
}
#undef COTERIE_TRANSPOSED

}  // namespace coterie::cuda
