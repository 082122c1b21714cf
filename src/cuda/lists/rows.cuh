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

// Rows and statistics of a tile of keys, by rank.
template <int kKeys>
struct KeyFacts {
  int rows[kKeys];
  RowStatistics stats[kKeys];

  // Ranks from `begin` on; by kKeys threads at least.
  __device__ void load(const ListProblem& problem, const ListPair& pair, int head, int begin) {
    const int rank = begin + static_cast<int>(threadIdx.x);
    if (threadIdx.x >= kKeys) return;
    const int row = rank < pair.k.count ? pair.k.row(rank) : -1;
    rows[threadIdx.x] = row;
    if (problem.k_stats)
      stats[threadIdx.x] =
          row < 0
              ? kNoStatistics
              : problem
                    .k_stats[ListProblem::row_base(problem.k, pair.k_span, head / problem.group) +
                             row];
  }
};

// What scores need to know of a query.
struct QueryFacts {
  float mean, inverse;  // mean times the row's width
  QueryFilter filter;

  __device__ void load(const ListProblem& problem, const ListPair& pair, int head, int rank) {
    mean = 0.0f;
    inverse = 1.0f;
    if (problem.q_stats) {
      const RowStatistics own =
          problem.q_stats[ListProblem::row_base(problem.q, pair.q_span, head) + pair.q.row(rank)];
      mean = own.mean * static_cast<float>(problem.width);
      if (problem.score_scale(head) < 0.0f) mean = -mean;  // as that of the negated row
      inverse = own.inverse;
    }
    filter = QueryFilter(problem, pair, head, rank);
  }
};

// The score of a query and key tile's key from the product of the rows as they are.
template <int kKeys>
__device__ __forceinline__ float finished_score(const ListProblem& problem, float product,
                                                const QueryFacts& query,
                                                const KeyFacts<kKeys>& keys, int key) {
  float score = product;
  if (problem.k_stats) {
    const RowStatistics own = keys.stats[key];
    score = fmaf(-query.mean, own.mean, score) * own.inverse;
  }
  score *= query.inverse;
  if (!query.filter.sees(keys.rows[key])) score = -INFINITY;
  return score;
}

}  // namespace coterie::cuda
