// SPDX-License-Identifier: MIT
// Hopper's warpgroup products: accumulators of four warps, 64 rows each, right factors in shared
// memory in tiles of 128-byte rows (Tile<T, 64>, at multiples of 1024 bytes). Only for sm_90a.
//
// Warp w of the group holds rows 16 w .. 16 w + 15 of an accumulator, in the layout of mma.cuh:
// d[4 j + e] is column 8 j + 2 (l%4) + e%2 of row l/4 + 8 (e/2).
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/types.h"
#include "cuda/prim/mbarrier.cuh"
#include "cuda/prim/wgmma_operands.cuh"

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

// `add` is 0, 1 or an operand with one of them, `flags` which factors are transposed.
#define COTERIE_WGMMA(type, n, io, names, outputs, left, right, add, flags, ...)         \
  asm volatile("{.reg .pred p; setp.ne.b32 p, " add                                      \
               ", 0;\n"                                                                  \
               "wgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type " {" names \
               "}, " left ", " right ", p, 1, 1, " flags ";}"                            \
               : outputs(io)                                                             \
               : __VA_ARGS__)
#define COTERIE_WGMMA_ELEMENTS(...)      \
  if constexpr (std::is_same_v<T, Bf16>) \
    COTERIE_WGMMA("bf16", __VA_ARGS__);  \
  else                                   \
    COTERIE_WGMMA("f16", __VA_ARGS__)
// The left factor in shared memory, or in registers; a sum that starts or goes on, or which of both
// is told by a number.
#define COTERIE_WGMMA_SHARED(n, names, outputs, left, right, third, fourth)                        \
  template <class T, int kAdd, int kTransposed, int kLeftTransposed = 0>                           \
  __device__ __forceinline__ void wgmma(float(&d)[n / 2], std::uint64_t a, std::uint64_t b) {      \
    if constexpr (kAdd == 1)                                                                       \
      COTERIE_WGMMA_ELEMENTS(#n, "+", names, outputs, left, right, "1", third ", " fourth, "l"(a), \
                             "l"(b), "n"(kLeftTransposed), "n"(kTransposed));                      \
    else                                                                                           \
      COTERIE_WGMMA_ELEMENTS(#n, "=", names, outputs, left, right, "0", third ", " fourth, "l"(a), \
                             "l"(b), "n"(kLeftTransposed), "n"(kTransposed));                      \
  }                                                                                                \
  template <class T, int kTransposed>                                                              \
  __device__ __forceinline__ void wgmma_from(float(&d)[n / 2], std::uint64_t a, std::uint64_t b,   \
                                             int add) {                                            \
    COTERIE_WGMMA_ELEMENTS(#n, "+", names, outputs, left, right, third, "0, " fourth, "l"(a),      \
                           "l"(b), "r"(add), "n"(kTransposed));                                    \
  }
#define COTERIE_WGMMA_REGISTERS(n, names, outputs, left, right, flags)                    \
  template <class T, int kAdd, int kTransposed>                                           \
  __device__ __forceinline__ void wgmma(float(&d)[n / 2], const std::uint32_t(&a)[4],     \
                                        std::uint64_t b) {                                \
    if constexpr (kAdd == 1)                                                              \
      COTERIE_WGMMA_ELEMENTS(#n, "+", names, outputs, left, right, "1", flags, "r"(a[0]), \
                             "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kTransposed));  \
    else                                                                                  \
      COTERIE_WGMMA_ELEMENTS(#n, "=", names, outputs, left, right, "0", flags, "r"(a[0]), \
                             "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kTransposed));  \
  }

// wgmma<T, kAdd, kTransposed>(d, a, b): d = a b (kAdd 0) or d += a b (kAdd 1), 64 x 16 by 16 x n;
// a thread has n / 2 elements of d. b: with kTransposed 0 its n columns are rows of the tile (keys
// in Q Kᵀ), with 1 its 16 depths are (keys in P V). a is in shared memory, with kLeftTransposed 1
// with its depths as rows, or in registers; wide products read it less often.
COTERIE_WGMMA_SHARED(8, COTERIE_WGMMA_D4, COTERIE_WGMMA_OUT4, "%4", "%5", "%6", "%7")
COTERIE_WGMMA_SHARED(32, COTERIE_WGMMA_D16, COTERIE_WGMMA_OUT16, "%16", "%17", "%18", "%19")
COTERIE_WGMMA_SHARED(64, COTERIE_WGMMA_D32, COTERIE_WGMMA_OUT32, "%32", "%33", "%34", "%35")
COTERIE_WGMMA_SHARED(128, COTERIE_WGMMA_D64, COTERIE_WGMMA_OUT64, "%64", "%65", "%66", "%67")
COTERIE_WGMMA_SHARED(256, COTERIE_WGMMA_D128, COTERIE_WGMMA_OUT128, "%128", "%129", "%130", "%131")
COTERIE_WGMMA_REGISTERS(64, COTERIE_WGMMA_D32, COTERIE_WGMMA_OUT32, "{%32,%33,%34,%35}", "%36",
                        "%37")
COTERIE_WGMMA_REGISTERS(128, COTERIE_WGMMA_D64, COTERIE_WGMMA_OUT64, "{%64,%65,%66,%67}", "%68",
                        "%69")

// wgmma_from<T, kTransposed>(d, a, b, add): d = a b, or d += a b where `add` is not 0.
template <class T, int kTransposed>
__device__ __forceinline__ void wgmma_from(float (&d)[32], const std::uint32_t (&a)[4],
                                           std::uint64_t b, int add) {
  COTERIE_WGMMA_ELEMENTS("64", "+", COTERIE_WGMMA_D32, COTERIE_WGMMA_OUT32, "{%32,%33,%34,%35}",
                         "%36", "%37", "%38", "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),
                         "r"(add), "n"(kTransposed));
}
// One of the steps of depth that are a product: the first starts the sum.
template <class T, int kTransposed, class Left, int kCount>
__device__ __forceinline__ void wgmma_step(int step, float (&d)[kCount], const Left& a,
                                           std::uint64_t b) {
  if (step == 0)
    wgmma<T, 0, kTransposed>(d, a, b);
  else
    wgmma<T, 1, kTransposed>(d, a, b);
}

#undef COTERIE_WGMMA_REGISTERS
#undef COTERIE_WGMMA_SHARED
#undef COTERIE_WGMMA_ELEMENTS
#undef COTERIE_WGMMA

}  // namespace coterie::cuda
