// SPDX-License-Identifier: MIT
// Four neighbouring elements as floats, read and written at once.
#pragma once

#include <cstdint>

#include "cuda/prim/element.cuh"

namespace coterie::cuda {

// Addresses are aligned to 4 elements.
__device__ __forceinline__ void load4(const float* from, float (&to)[4]) {
  const float4 all = *reinterpret_cast<const float4*>(from);
  to[0] = all.x;
  to[1] = all.y;
  to[2] = all.z;
  to[3] = all.w;
}
template <class T>
__device__ __forceinline__ void load4(const T* from, float (&to)[4]) {
  const uint2 all = *reinterpret_cast<const uint2*>(from);
  const std::uint32_t words[2] = {all.x, all.y};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    to[i] = to_float(T{static_cast<std::uint16_t>(words[i / 2] >> (i % 2 * 16))});
  }
}
__device__ __forceinline__ void store4(float* to, const float (&from)[4]) {
  *reinterpret_cast<float4*>(to) = make_float4(from[0], from[1], from[2], from[3]);
}
template <class T>
__device__ __forceinline__ void store4(T* to, const float (&from)[4]) {
  *reinterpret_cast<uint2*>(to) =
      make_uint2(pack2<T>(from[0], from[1]), pack2<T>(from[2], from[3]));
}

}  // namespace coterie::cuda
