// SPDX-License-Identifier: MIT
// Hopper's warpgroup products: 64 x 64 accumulators of four warps, right factors in shared memory
// in tiles of 128-byte rows (Tile<T, 64>, at multiples of 1024 bytes). Only for sm_90a.
//
// Warp w of the group holds rows 16 w .. 16 w + 15 of an accumulator, in the layout of mma.cuh:
// d[4 j + e] is column 8 j + 2 (l%4) + e%2 of row l/4 + 8 (e/2).
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/types.h"
#include "cuda/device/mbarrier.cuh"
#include "cuda/device/wgmma_operands.cuh"

namespace coterie::cuda {

constexpr int kWarpgroup = 128;  // threads

// A matrix of 128-byte rows: groups of 8 rows are 1024 bytes apart.
__device__ __forceinline__ std::uint64_t matrix_descriptor(std::uint32_t address) {
  return static_cast<std::uint64_t>((address & 0x3ffff) >> 4) |
         static_cast<std::uint64_t>(16 >> 4) << 16 | static_cast<std::uint64_t>(1024 >> 4) << 32 |
         1ull << 62;
}

// A matrix of rows of 16 elements in groups of 8 rows, 256 bytes each: the first halves of its
// rows, then the second ones.
__device__ __forceinline__ std::uint64_t narrow_descriptor(std::uint32_t address) {
  return static_cast<std::uint64_t>((address & 0x3ffff) >> 4) |
         static_cast<std::uint64_t>(128 >> 4) << 16 | static_cast<std::uint64_t>(256 >> 4) << 32;
}

// The descriptor of what lies `offset` bytes behind; one addition, where matrix_descriptor takes
// several instructions.
__device__ __forceinline__ std::uint64_t descriptor_behind(std::uint64_t descriptor, int offset) {
  const std::uint32_t low =
      static_cast<std::uint32_t>(descriptor) + (static_cast<std::uint32_t>(offset) >> 4);
  return descriptor >> 32 << 32 | low;
}

// Before the first product of a batch: registers and shared memory are as the warp wrote them.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Keeps the compiler from reading an accumulator before the wait that precedes this.
template <int kCount>
__device__ __forceinline__ void wgmma_settle(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Makes ordinary and cp.async writes to shared memory visible to wgmma.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

#define COTERIE_WGMMA_REGISTERS(type, io, add)                                                    \
  asm volatile("{.reg .pred p; setp.ne.b32 p, " add                                               \
               ", 0;\n"                                                                           \
               "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " {" COTERIE_WGMMA_D32 \
               "}"                                                                                \
               ", {%32,%33,%34,%35}, %36, p, 1, 1, %37;}"                                         \
               : COTERIE_WGMMA_OUT32(io)                                                          \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kTransposed))
#define COTERIE_WGMMA_SHARED(type, io, add)                                                       \
  asm volatile("{.reg .pred p; setp.ne.b32 p, " add                                               \
               ", 0;\n"                                                                           \
               "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " {" COTERIE_WGMMA_D32 \
               "}"                                                                                \
               ", %32, %33, p, 1, 1, 0, %34;}"                                                    \
               : COTERIE_WGMMA_OUT32(io)                                                          \
               : "l"(a), "l"(b), "n"(kTransposed))
#define COTERIE_WGMMA_WIDE(type, io, add)                                                          \
  asm volatile("{.reg .pred p; setp.ne.b32 p, " add                                                \
               ", 0;\n"                                                                            \
               "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " {" COTERIE_WGMMA_D64 \
               "}"                                                                                 \
               ", {%64,%65,%66,%67}, %68, p, 1, 1, %69;}"                                          \
               : COTERIE_WGMMA_OUT64(io)                                                           \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kTransposed))
#define COTERIE_WGMMA(operands)                       \
  if constexpr (std::is_same_v<T, Bf16> && kAdd == 1) \
    operands("bf16", "+", "1");                       \
  else if constexpr (std::is_same_v<T, Bf16>)         \
    operands("bf16", "=", "0");                       \
  else if constexpr (kAdd == 1)                       \
    operands("f16", "+", "1");                        \
  else                                                \
    operands("f16", "=", "0")

// d = a b (kAdd 0) or d += a b (kAdd 1), 64 x 16 by 16 x 64. b: with kTransposed 0 its 64 columns
// are rows of the tile (keys in Q Kᵀ), with 1 its 16 depths are (keys in P V).
template <class T, int kAdd, int kTransposed>
__device__ __forceinline__ void wgmma(float (&d)[32], const std::uint32_t (&a)[4],
                                      std::uint64_t b) {
  COTERIE_WGMMA(COTERIE_WGMMA_REGISTERS);
}
// The same with a in shared memory.
template <class T, int kAdd, int kTransposed>
__device__ __forceinline__ void wgmma(float (&d)[32], std::uint64_t a, std::uint64_t b) {
  COTERIE_WGMMA(COTERIE_WGMMA_SHARED);
}
// The same with a in registers for 64 x 16 by 16 x 128: fewer instructions, and a is read half as
// often.
template <class T, int kAdd, int kTransposed>
__device__ __forceinline__ void wgmma(float (&d)[64], const std::uint32_t (&a)[4],
                                      std::uint64_t b) {
  COTERIE_WGMMA(COTERIE_WGMMA_WIDE);
}

#undef COTERIE_WGMMA_REGISTERS
#undef COTERIE_WGMMA_SHARED
#undef COTERIE_WGMMA_WIDE
#undef COTERIE_WGMMA

}  // namespace coterie::cuda
