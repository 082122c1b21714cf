// SPDX-License-Identifier: MIT
// Conversions between float and the three element types float, Bf16 and F16. cuda_bf16.h and
// cuda_fp16.h have them too, but their ten thousand lines cost every kernel file compile time.
#pragma once

#include <cstdint>

#include "core/types.h"

namespace coterie::cuda {

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(Bf16 value) {
  float wide;
#if __CUDA_ARCH__ >= 900
  asm("cvt.f32.bf16 %0, %1;" : "=f"(wide) : "h"(value.bits));
#else
  asm("mov.b32 %0, {0, %1};" : "=f"(wide) : "h"(value.bits));
#endif
  return wide;
}
__device__ __forceinline__ float to_float(F16 value) {
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value.bits));
  return wide;
}

template <class T>
__device__ __forceinline__ T from_float(float value);
template <>
__device__ __forceinline__ float from_float<float>(float value) {
  return value;
}
template <>
__device__ __forceinline__ Bf16 from_float<Bf16>(float value) {
  Bf16 rounded;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(rounded.bits) : "f"(value));
  return rounded;
}
template <>
__device__ __forceinline__ F16 from_float<F16>(float value) {
  F16 rounded;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(rounded.bits) : "f"(value));
  return rounded;
}

// Two 16-bit elements in one register, `low` in the lower half.
template <class T>
__device__ __forceinline__ std::uint32_t pack2(float low, float high);
template <>
__device__ __forceinline__ std::uint32_t pack2<Bf16>(float low, float high) {
  std::uint32_t word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}
template <>
__device__ __forceinline__ std::uint32_t pack2<F16>(float low, float high) {
  std::uint32_t word;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

// Writes two neighbouring elements; `to` is aligned to their size.
__device__ __forceinline__ void store2(float* to, float low, float high) {
  *reinterpret_cast<float2*>(to) = make_float2(low, high);
}
template <class T>
__device__ __forceinline__ void store2(T* to, float low, float high) {
  *reinterpret_cast<std::uint32_t*>(to) = pack2<T>(low, high);
}

}  // namespace coterie::cuda
