// SPDX-License-Identifier: MIT
// Shared by the kernels of list attention: weights, keys, and derivatives.
#pragma once

#include <cstdint>

#include "cuda/lists/problem.cuh"
#include "cuda/prim/softmax.cuh"

namespace coterie::cuda {

// See cpu/kernels/laplace.h.
__device__ __forceinline__ float laplace(float x) {
  return 0.5f + 0.5f * erff((x - 0.70710678118654752f) * 2.5066282746310005f);
}

// Derivative of laplace.
__device__ __forceinline__ float laplace_slope(float x) {
  constexpr float kMean = 0.70710678118654752f, kTwoPi = 6.2831853071795865f;
  return expf(-kTwoPi * (x - kMean) * (x - kMean)) * (2.0f * kMean);
}

struct alignas(16) ListKey {
  int rank, row;
  RowStatistics stats;
};

__device__ __forceinline__ ListKey load_key(const ListProblem& problem, const ListPair& pair,
                                            int key_head, int rank) {
  ListKey key{rank, 0, kNoStatistics};
  if (rank >= pair.k.count) return key;
  key.row = pair.k.row(rank);
  if (problem.k_stats)
    key.stats = problem.k_stats[ListProblem::row_base(problem.k, pair.k_span, key_head) + key.row];
  return key;
}

// A first guess of delta for rows that have none yet: the weighted mean of dP over the keys of a
// tile. Returns whether there is a guess for this row.
template <int kCount>
__device__ __forceinline__ bool guess_delta(const float (&s)[kCount], const float (&d)[kCount],
                                            int side, float& delta) {
  float sum = 0.0f, weight = 0.0f;
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    if (i / 2 % 2 == side) {
      sum = fmaf(s[i], d[i], sum);
      weight += s[i];
    }
  sum = quad_sum(sum);
  weight = quad_sum(weight);
  if (weight > 0.0f) delta = __fdividef(sum, weight);
  return weight > 0.0f;
}

// Turns the gradient g of a normalised row y into that of the original row x: inverse (g - mean g -
// y mean(g y)), with y = inverse (x - mean) multiplied out. Handles the upper of a lane's two rows,
// or the lower with kSide = 1: element i of sum belongs to column i / 4 * 8 + 2 (l%4) + i%2, and
// load(column) returns two neighbours of x. Rows and sums are 0 beyond their width. Returns g . y.
template <int kSide, int kCount, class Load>
__device__ __forceinline__ float denormalise(float (&sum)[kCount], const RowStatistics& stats,
                                             int width, const Load& load) {
  float total = 0.0f, along = 0.0f;
  float2 x[kCount / 4];
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) {
    const int i = 4 * j + 2 * kSide;
    x[j] = load(j * 8 + static_cast<int>(threadIdx.x) % 4 * 2);
    total += sum[i] + sum[i + 1];
    along = fmaf(sum[i + 1], x[j].y, fmaf(sum[i], x[j].x, along));
  }
  const float share = 1.0f / static_cast<float>(width), mean = stats.mean, inverse = stats.inverse;
  total = quad_sum(total);
  const float product = fmaf(-mean, total, quad_sum(along)) * inverse;
  const float slope = product * share * inverse * inverse;
  const float shift = fmaf(slope, mean, -total * share * inverse);
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) {
    const int i = 4 * j + 2 * kSide;
    sum[i] = fmaf(-slope, x[j].x, fmaf(sum[i], inverse, shift));
    sum[i + 1] = fmaf(-slope, x[j].y, fmaf(sum[i + 1], inverse, shift));
  }
  return product;
}

// Reduces 8 sums over the keys of a warp; a lane keeps column 8 (l/8) + 2 (l%4) + l/4%2.
__device__ __forceinline__ float reduce_columns(const float (&sum)[8], unsigned lane) {
  float four[4], two[2];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float kept = lane & 16 ? sum[i + 4] : sum[i], sent = lane & 16 ? sum[i] : sum[i + 4];
    four[i] = kept + __shfl_xor_sync(~0u, sent, 16);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float kept = lane & 8 ? four[i + 2] : four[i], sent = lane & 8 ? four[i] : four[i + 2];
    two[i] = kept + __shfl_xor_sync(~0u, sent, 8);
  }
  const float kept = lane & 4 ? two[1] : two[0], sent = lane & 4 ? two[0] : two[1];
  return kept + __shfl_xor_sync(~0u, sent, 4);
}

}  // namespace coterie::cuda
