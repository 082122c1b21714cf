// SPDX-License-Identifier: MIT
// What the forward kernels of list attention share: how scores become weights.
#pragma once

#include <cstdint>

#include "cuda/lists/problem.cuh"
#include "cuda/prim/softmax.cuh"

namespace coterie::cuda {

// A shift below all others, and finite: scores of -inf have weight 0 from the first tile on.
constexpr float kLowestShift = -3e38f;

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

}  // namespace coterie::cuda
