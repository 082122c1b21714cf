// SPDX-License-Identifier: MIT
// CAST's scalar functions, and tiles of tokens or clusters as its kernels load them.
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "cuda/cast/stages.h"
#include "cuda/lists/rows.cuh"
#include "cuda/prim/load.cuh"
#include "cuda/prim/mma.cuh"
#include "cuda/prim/softmax.cuh"
#include "cuda/prim/splits.cuh"

namespace coterie::cuda {

__device__ __forceinline__ float softplus(float x) {
  return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x)));
}
__device__ __forceinline__ float gate_sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
// psi(x), or 1 where gates do not scale.
__device__ __forceinline__ float gate_factor(const CastShape& shape, float x) {
  return shape.gate_scale ? 1.0f + softplus(x) : 1.0f;
}

// The weight of a logit: of a softmax with that log-sum-exp, or laplace.
__device__ __forceinline__ float cast_weight(const CastShape& shape, float logit, float lse) {
  return shape.laplace ? laplace(logit) : exp2_approximate((logit - lse) * kLog2e);
}

// Tiles of `rows` tokens, one per thread block.
inline ItemChunks token_tiles(const CastShape& shape, int rows) {
  return row_tiles(shape.tokens, shape.items, rows);
}

// Dense rows (count, width) as the loaders take them.
template <class T>
__device__ __forceinline__ Rows<const T> dense_rows(const T* data, int width) {
  return {data, width, width,
          (reinterpret_cast<std::uintptr_t>(data) | width * sizeof(T)) % 16 == 0};
}

}  // namespace coterie::cuda
