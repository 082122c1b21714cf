// SPDX-License-Identifier: MIT
// The three element types under one set of conversions.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace coterie::cuda {

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ __forceinline__ float to_float(__half value) { return __half2float(value); }

template <class T>
__device__ __forceinline__ T from_float(float value);
template <>
__device__ __forceinline__ float from_float<float>(float value) {
  return value;
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}
template <>
__device__ __forceinline__ __half from_float<__half>(float value) {
  return __float2half_rn(value);
}

// Two 16-bit elements in one register, `low` in the lower half.
template <class T>
__device__ __forceinline__ std::uint32_t pack2(float low, float high);
template <>
__device__ __forceinline__ std::uint32_t pack2<__nv_bfloat16>(float low, float high) {
  std::uint32_t word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}
template <>
__device__ __forceinline__ std::uint32_t pack2<__half>(float low, float high) {
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
