// SPDX-License-Identifier: MIT
// Shared by CAST's kernels: scalar functions, tiles of tokens, lanes along gathered rows, and which
// clusters are empty.
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "cuda/cast/stages.h"
#include "cuda/lists/rows.cuh"
#include "cuda/prim/load.cuh"
#include "cuda/prim/mma.cuh"
#include "cuda/prim/row_lanes.cuh"
#include "cuda/prim/softmax.cuh"
#include "cuda/prim/splits.cuh"

namespace coterie::cuda {

__device__ __forceinline__ float softplus(float x) {
  return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x)));
}
__device__ __forceinline__ float gate_sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
// psi(x), or 1 if gates do not scale.
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

// Number of blocks of `each` threads for `count` threads.
inline unsigned blocks_of(std::int64_t count, int each) {
  return static_cast<unsigned>((count + each - 1) / each);
}

// Dense rows (count, width) for the loaders.
template <class T>
__device__ __forceinline__ Rows<T> dense_rows(T* data, int width) {
  return {data, width, width,
          (reinterpret_cast<std::uintptr_t>(data) | width * sizeof(T)) % 16 == 0};
}

// RowLanes (prim/row_lanes.cuh) whose rows within a warp are summed separately and may have any
// alignment.
template <class T, int kDim>
struct CastLanes : RowLanes<T, kDim> {
  using Base = RowLanes<T, kDim>;
  using Base::column;
  using Base::kLanes;
  using Base::kVector;

  struct Floats {
    float value[kVector];
    __device__ void scale(float factor) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) value[i] *= factor;
    }
    __device__ void round() {
#pragma unroll
      for (int i = 0; i < kVector; ++i) value[i] = to_float(from_float<T>(value[i]));
    }
  };
  int lane, group;  // of the row; rows go to groups in turn

  __device__ CastLanes()
      : lane(static_cast<int>(threadIdx.x) % kLanes),
        group(static_cast<int>(threadIdx.x) / kLanes) {}

  __device__ bool first() const { return lane == 0; }
  // Index of this group's row in a grid with one row per group.
  __device__ std::int64_t row_of_grid() const {
    return (static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kLanes;
  }
  __device__ static Floats load(const Rows<const T>& rows, std::int64_t row) {
    Floats floats;
    Base::load(rows, row, true, floats.value);
    return floats;
  }
  __device__ static Floats to_floats(const uint4& words) {
    const T* elements = reinterpret_cast<const T*>(&words);
    Floats floats;
#pragma unroll
    for (int i = 0; i < kVector; ++i) floats.value[i] = to_float(elements[i]);
    return floats;
  }
  // For floats of any alignment.
  __device__ static Floats load_floats(const float* row, int width) {
    Floats floats;
    if (reinterpret_cast<std::uintptr_t>(row) % 16 == 0) {
      Base::load_floats(row, width, floats.value);
      return floats;
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i)
      floats.value[i] = column() + i < width ? row[column() + i] : 0.0f;
    return floats;
  }
  __device__ static void store(const Rows<T>& rows, std::int64_t row, const Floats& floats) {
    Base::store(rows, row, floats.value);
  }

  // Dot product over the lanes of the row, which must call it together.
  __device__ static float dot(const Floats& a, const Floats& b) {
    constexpr unsigned kRow = kLanes == 32 ? ~0u : (1u << (kLanes % 32)) - 1;
    const unsigned mask = kRow << (threadIdx.x % 32 / kLanes * kLanes);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kVector; ++i) sum = fmaf(a.value[i], b.value[i], sum);
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(mask, sum, step);
    return sum;
  }
  __device__ static void add(Floats& sum, float weight, const Floats& a) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) sum.value[i] = fmaf(weight, a.value[i], sum.value[i]);
  }

  // Stores the sums of a warp's groups in sums[warp].
  template <int kWarps>
  __device__ static void fold(Floats& sum, float (&sums)[kWarps][kDim]) {
#pragma unroll
    for (int step = kLanes; step < 32; step *= 2)
#pragma unroll
      for (int i = 0; i < kVector; ++i) sum.value[i] += __shfl_xor_sync(~0u, sum.value[i], step);
    if (static_cast<int>(threadIdx.x) % 32 < kLanes)
#pragma unroll
      for (int i = 0; i < kVector; ++i) sums[threadIdx.x / 32][column() + i] = sum.value[i];
    __syncthreads();
  }
};

// Which of 64 clusters take part in the mix, by their summaries' log-sum-exps. Without those
// (laplace) all do: summaries of empty clusters are 0. Called by all lanes of a warp.
struct ClusterBits {
  unsigned long long bits = ~0ull;

  __device__ ClusterBits(const float* lse, int first, int clusters) {
    if (!lse) return;
    bits = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int c = first + 32 * i + static_cast<int>(threadIdx.x) % 32;
      const bool there = c < clusters && lse[c] > -INFINITY;
      bits |= static_cast<unsigned long long>(__ballot_sync(~0u, there)) << (32 * i);
    }
  }
};

}  // namespace coterie::cuda
