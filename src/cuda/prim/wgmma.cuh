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

// The accumulators d[4] to d[128] of a warpgroup product as inline assembly needs them: the
// operands %0, %1, ... of the instruction text, and the list of outputs with `io` "+" or "=".
#define COTERIE_WGMMA_D4 "%0,%1,%2,%3"
#define COTERIE_WGMMA_D16 COTERIE_WGMMA_D4 ",%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define COTERIE_WGMMA_D32 \
  COTERIE_WGMMA_D16       \
  ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define COTERIE_WGMMA_D64                                                             \
  COTERIE_WGMMA_D32                                                                   \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51," \
  "%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define COTERIE_WGMMA_D128                                                            \
  COTERIE_WGMMA_D64                                                                   \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83," \
  "%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,"   \
  "%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,"  \
  "%119,%120,%121,%122,%123,%124,%125,%126,%127"

#define COTERIE_WGMMA_OUT4(io) io "f"(d[0]), io "f"(d[1]), io "f"(d[2]), io "f"(d[3])
#define COTERIE_WGMMA_OUT16(io)                                                                 \
  COTERIE_WGMMA_OUT4(io), io "f"(d[4]), io "f"(d[5]), io "f"(d[6]), io "f"(d[7]), io "f"(d[8]), \
      io "f"(d[9]), io "f"(d[10]), io "f"(d[11]), io "f"(d[12]), io "f"(d[13]), io "f"(d[14]),  \
      io "f"(d[15])
#define COTERIE_WGMMA_OUT32(io)                                                                 \
  COTERIE_WGMMA_OUT16(io), io "f"(d[16]), io "f"(d[17]), io "f"(d[18]), io "f"(d[19]),          \
      io "f"(d[20]), io "f"(d[21]), io "f"(d[22]), io "f"(d[23]), io "f"(d[24]), io "f"(d[25]), \
      io "f"(d[26]), io "f"(d[27]), io "f"(d[28]), io "f"(d[29]), io "f"(d[30]), io "f"(d[31])
#define COTERIE_WGMMA_OUT64(io)                                                                 \
  COTERIE_WGMMA_OUT32(io), io "f"(d[32]), io "f"(d[33]), io "f"(d[34]), io "f"(d[35]),          \
      io "f"(d[36]), io "f"(d[37]), io "f"(d[38]), io "f"(d[39]), io "f"(d[40]), io "f"(d[41]), \
      io "f"(d[42]), io "f"(d[43]), io "f"(d[44]), io "f"(d[45]), io "f"(d[46]), io "f"(d[47]), \
      io "f"(d[48]), io "f"(d[49]), io "f"(d[50]), io "f"(d[51]), io "f"(d[52]), io "f"(d[53]), \
      io "f"(d[54]), io "f"(d[55]), io "f"(d[56]), io "f"(d[57]), io "f"(d[58]), io "f"(d[59]), \
      io "f"(d[60]), io "f"(d[61]), io "f"(d[62]), io "f"(d[63])
#define COTERIE_WGMMA_OUT128(io)                                                                \
  COTERIE_WGMMA_OUT64(io), io "f"(d[64]), io "f"(d[65]), io "f"(d[66]), io "f"(d[67]),          \
      io "f"(d[68]), io "f"(d[69]), io "f"(d[70]), io "f"(d[71]), io "f"(d[72]), io "f"(d[73]), \
      io "f"(d[74]), io "f"(d[75]), io "f"(d[76]), io "f"(d[77]), io "f"(d[78]), io "f"(d[79]), \
      io "f"(d[80]), io "f"(d[81]), io "f"(d[82]), io "f"(d[83]), io "f"(d[84]), io "f"(d[85]), \
      io "f"(d[86]), io "f"(d[87]), io "f"(d[88]), io "f"(d[89]), io "f"(d[90]), io "f"(d[91]), \
      io "f"(d[92]), io "f"(d[93]), io "f"(d[94]), io "f"(d[95]), io "f"(d[96]), io "f"(d[97]), \
      io "f"(d[98]), io "f"(d[99]), io "f"(d[100]), io "f"(d[101]), io "f"(d[102]),             \
      io "f"(d[103]), io "f"(d[104]), io "f"(d[105]), io "f"(d[106]), io "f"(d[107]),           \
      io "f"(d[108]), io "f"(d[109]), io "f"(d[110]), io "f"(d[111]), io "f"(d[112]),           \
      io "f"(d[113]), io "f"(d[114]), io "f"(d[115]), io "f"(d[116]), io "f"(d[117]),           \
      io "f"(d[118]), io "f"(d[119]), io "f"(d[120]), io "f"(d[121]), io "f"(d[122]),           \
      io "f"(d[123]), io "f"(d[124]), io "f"(d[125]), io "f"(d[126]), io "f"(d[127])

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

// The descriptor of the matrix `offset` bytes further on: one addition, while matrix_descriptor
// takes several instructions.
__device__ __forceinline__ std::uint64_t descriptor_behind(std::uint64_t descriptor, int offset) {
  const std::uint32_t low =
      static_cast<std::uint32_t>(descriptor) + (static_cast<std::uint32_t>(offset) >> 4);
  return descriptor >> 32 << 32 | low;
}

// Before the first product of a batch: orders the warp's writes to registers and shared memory.
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

// `add` is 0, 1 or an operand with one of them; `flags` says which factors are transposed.
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
// The left factor is in shared memory or in registers. The product starts a sum or adds to one,
// chosen at compile time or by a number (wgmma_from).
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

// wgmma<T, kAdd, kTransposed>(d, a, b): d = a b (kAdd 0) or d += a b (kAdd 1), 64 x 16 by 16 x n; a
// thread has n / 2 elements of d. b: with kTransposed 0 its n columns are rows of the tile (keys in
// Q Kᵀ), with 1 its 16 depths are (keys in P V). a is in registers or in shared memory, where
// kLeftTransposed 1 means that its depths are rows; wide products read it less often.
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
// One step of depth of a product; the first step starts the sum.
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
