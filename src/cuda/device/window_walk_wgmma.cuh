// SPDX-License-Identifier: MIT
// Warpgroup products (wgmma.cuh) of the backward pass of windows (window_walk.cuh), both factors in
// shared memory.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/types.h"
#include "cuda/device/wgmma_operands.cuh"

namespace coterie::cuda {

// A tile of 128-byte rows in shared memory as a factor, as Bands: in fewer instructions, as the
// address is known to have less than 18 bits.
struct WalkTile {
  std::uint32_t low;

  __device__ explicit WalkTile(std::uint32_t address) : low(address >> 4) {}
  __device__ std::uint64_t at(int bytes) const {
    return static_cast<std::uint64_t>(1024 >> 4 | 1u << 30) << 32 |
           (low + (bytes >> 4) + (1u << 16));
  }
  __device__ std::uint64_t by_columns(int row, int k) const { return at(row * 128 + k * 32); }
  __device__ std::uint64_t by_rows(int row) const { return at(row * 128); }
};

// d = aᵀ b + add d, 64 x 16 by 16 x 32, both in shared memory with depths as rows of their tiles.
template <class T, int kAdd>
__device__ __forceinline__ void wgmma_narrow_transposed(float (&d)[16], std::uint64_t a,
                                                        std::uint64_t b) {
#define COTERIE_NARROW(type)                                                                    \
  asm volatile(                                                                                 \
      "{.reg .pred p; setp.ne.b32 p, %18, 0;\n"                                                 \
      "wgmma.mma_async.sync.aligned.m64n32k16.f32." type "." type                               \
      " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, %16, %17, p, 1, 1, 1, 1;}"     \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),     \
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), \
        "+f"(d[14]), "+f"(d[15])                                                                \
      : "l"(a), "l"(b), "n"(kAdd))
  if constexpr (std::is_same_v<T, Bf16>)
    COTERIE_NARROW("bf16");
  else
    COTERIE_NARROW("f16");
#undef COTERIE_NARROW
}

// d = a b + add d, 64 x 16 by 16 x 64, both in shared memory; the depths are rows of b's tile.
template <class T>
__device__ __forceinline__ void wgmma_rows(float (&d)[32], std::uint64_t a, std::uint64_t b,
                                           int add) {
#define COTERIE_ROWS(type)                                                               \
  asm volatile(                                                                          \
      "{.reg .pred p; setp.ne.b32 p, %34, 0;\n"                                          \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " {" COTERIE_WGMMA_D32 \
      "}, %32, %33, p, 1, 1, 0, 1;}"                                                     \
      : COTERIE_WGMMA_OUT32("+")                                                         \
      : "l"(a), "l"(b), "r"(add))
  if constexpr (std::is_same_v<T, Bf16>)
    COTERIE_ROWS("bf16");
  else
    COTERIE_ROWS("f16");
#undef COTERIE_ROWS
}

}  // namespace coterie::cuda
