// SPDX-License-Identifier: MIT
// What CAST's kernels do by rows: lanes side by side along rows that are gathered.
#pragma once

#include <cstdint>

#include "cuda/cast/cast.cuh"

namespace coterie::cuda {

// The smallest power of two that is not below.
constexpr int power_of_two(int value) {
  int power = 1;
  while (power < value) power *= 2;
  return power;
}

// kLanes lanes hold a row of up to kDim elements, 16 bytes each: RowLanes (prim/row_lanes.cuh) for
// CAST, where rows of a warp may be added up apart from each other, come from shared memory or as
// they lie, and leave in other types.
template <class T, int kDim>
struct CastLanes {
  static constexpr int kVector = 16 / static_cast<int>(sizeof(T));
  static constexpr int kLanes = power_of_two(kDim / kVector);
  static_assert(kLanes <= 32, "a row in a warp");

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
  // The number of this group's row where a grid has one per group.
  __device__ std::int64_t row_of_grid() const {
    return (static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kLanes;
  }
  __device__ int column() const { return lane * kVector; }

  __device__ Floats load(const Rows<const T>& rows, std::int64_t row) const {
    return to_floats(fetch(rows, row));
  }
  // The 16 bytes of this lane, zeros beyond the row.
  __device__ uint4 fetch(const Rows<const T>& rows, std::int64_t row) const {
    if (column() >= rows.width) return make_uint4(0, 0, 0, 0);
    return rows.aligned ? *reinterpret_cast<const uint4*>(rows.row(row) + column())
                        : load_chunk(rows.row(row), column(), rows.width);
  }
  __device__ static Floats to_floats(const uint4& words) {
    const T* elements = reinterpret_cast<const T*>(&words);
    Floats floats;
#pragma unroll
    for (int i = 0; i < kVector; ++i) floats.value[i] = to_float(elements[i]);
    return floats;
  }
  __device__ Floats load_floats(const float* row, int width) const {
    Floats floats;
    if (((reinterpret_cast<std::uintptr_t>(row) | width * sizeof(float)) & 15) == 0) {
#pragma unroll
      for (int i = 0; i < kVector; i += 4) {
        const float4 four = column() + i < width
                                ? *reinterpret_cast<const float4*>(row + column() + i)
                                : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        floats.value[i] = four.x;
        floats.value[i + 1] = four.y;
        floats.value[i + 2] = four.z;
        floats.value[i + 3] = four.w;
      }
      return floats;
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i)
      floats.value[i] = column() + i < width ? row[column() + i] : 0.0f;
    return floats;
  }
  template <class U>
  __device__ void store(const Rows<U>& rows, std::int64_t row, const Floats& floats) const {
    if (rows.aligned) {
      struct alignas(kVector * sizeof(U)) Vector {
        U element[kVector];
      } vector;
#pragma unroll
      for (int i = 0; i < kVector; ++i) vector.element[i] = from_float<U>(floats.value[i]);
      if (column() < rows.width) *reinterpret_cast<Vector*>(rows.row(row) + column()) = vector;
      return;
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i)
      if (column() + i < rows.width) rows.row(row)[column() + i] = from_float<U>(floats.value[i]);
  }

  // Over the lanes of the row, which call it together.
  __device__ float dot(const Floats& a, const Floats& b) const {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kVector; ++i) sum = fmaf(a.value[i], b.value[i], sum);
    const unsigned mask = row_mask();
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(mask, sum, step);
    return sum;
  }
  __device__ static void add(Floats& sum, float weight, const Floats& a) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) sum.value[i] = fmaf(weight, a.value[i], sum.value[i]);
  }

  // The sums of a warp's groups, to sums[warp].
  template <int kWarps>
  __device__ void fold(Floats& sum, float (&sums)[kWarps][kDim]) const {
#pragma unroll
    for (int step = kLanes; step < 32; step *= 2)
#pragma unroll
      for (int i = 0; i < kVector; ++i) sum.value[i] += __shfl_xor_sync(~0u, sum.value[i], step);
    const int warp = static_cast<int>(threadIdx.x) / 32;
    if (static_cast<int>(threadIdx.x) % 32 < kLanes)
#pragma unroll
      for (int i = 0; i < kVector; ++i)
        if (column() + i < kDim) sums[warp][column() + i] = sum.value[i];
    __syncthreads();
  }

 private:
  __device__ static unsigned row_mask() {
    if constexpr (kLanes == 32) return ~0u;
    return ((1u << (kLanes % 32)) - 1) << (threadIdx.x % 32 / kLanes * kLanes);
  }
};

// Which of 64 clusters are there to be mixed, by their summaries' log-sum-exps; without those
// (laplace) empty clusters need no attention, for their summaries are 0. By all lanes of a warp.
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
  __device__ bool has(int column) const { return bits >> column & 1ull; }
};

}  // namespace coterie::cuda
