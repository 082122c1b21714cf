// SPDX-License-Identifier: MIT
// Weights of 32 queries and 64 keys and their derivatives, in the registers of a warpgroup whose
// rows are the keys (whole_list.cuh).
#pragma once

#include <cstdint>

#include "cuda/device/list_bwd_group.cuh"
#include "cuda/device/whole_list.cuh"

namespace coterie::cuda {

constexpr int kStepQueries = 32;

// 16 bytes of shared memory. The assembler keeps no copies of them in registers, and reads them
// where they are used: there are none to spare.
template <class Value>
__device__ __forceinline__ Value read_again(const Value* at) {
  static_assert(sizeof(Value) == 16, "four words");
  union {
    std::uint32_t word[4];
    Value value;
  } all;
  asm volatile("ld.volatile.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
               : "=r"(all.word[0]), "=r"(all.word[1]), "=r"(all.word[2]), "=r"(all.word[3])
               : "r"(shared_address(at))
               : "memory");
  return all.value;
}

// Scores become weights.
template <bool kMasked>
__device__ __forceinline__ void weigh(float (&s)[16], const WholeQueries& facts, int half,
                                      const RowStatistics (&key)[2], int rank) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const QueryLimits limits =
        read_again(facts.limits + half * kStepQueries / 2 + 4 * j + threadIdx.x % 4);
    const float4 query =
        read_again(reinterpret_cast<const float4*>(facts.score + half * kStepQueries) + 4 * j +
                   threadIdx.x % 4);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        float& x = s[4 * j + 2 * side + c];
        x = fmaf(x, key[side].inverse, key[side].mean * (c ? query.z : query.x));
        x = exp2_approximate(fmaf(x, c ? query.w : query.y, -limits.shift[c]));
        if (kMasked && rank + 8 * side >= limits.end[c]) x = 0.0f;
      }
    }
  }
}
// Sums of weights times products are added to those of 8 queries.
__device__ __forceinline__ void add_products(float (&sum)[8], const float (&s)[16],
                                             const float (&d)[16]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) sum[i / 4 * 2 + i % 2] = fmaf(s[i], d[i], sum[i / 4 * 2 + i % 2]);
}
// Weights as left factor.
template <class T>
__device__ __forceinline__ void pack_weights(std::uint32_t (&p)[2][4], const float (&s)[16]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) p[i / 4][i % 4] = pack2<T>(s[2 * i], s[2 * i + 1]);
}

// Derivatives as left factor; for dq to shared memory as well.
template <class T>
__device__ __forceinline__ void differentiate(const std::uint32_t (&p)[2][4], const float (&d)[16],
                                              const float (&delta)[8], const WholeQueries& facts,
                                              int half, const RowStatistics (&key)[2], int thread,
                                              std::uint32_t slopes, std::uint32_t (&ds)[2][4]) {
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    std::uint32_t out[4];
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      const int j = 2 * k + part;
      const float4 query =
          read_again(reinterpret_cast<const float4*>(facts.gradient + half * kStepQueries) + 4 * j +
                     threadIdx.x % 4);
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const int i = 4 * j + 2 * side, word = 2 * part + side;
        const float2 weight = unpack2<T>(p[k][word]);
        const float first = weight.x * (d[i] - delta[2 * j]);
        const float second = weight.y * (d[i + 1] - delta[2 * j + 1]);
        ds[k][word] = pack2<T>(first * query.x, second * query.z);
        const float inverse = inverse_factor<T>(key[side].inverse);
        out[word] = pack2<T>(first * inverse, second * inverse);
      }
    }
    const int lane = thread % 32, chunk = 4 * half + 2 * k + lane / 16;
    const int row = thread % kWarpgroup / 32 * 16 + lane % 16;
    stmatrix_x4(slopes + row * 128 + ((chunk ^ lane % 8) << 4), out);
  }
}

}  // namespace coterie::cuda
