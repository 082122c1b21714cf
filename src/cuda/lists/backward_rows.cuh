// SPDX-License-Identifier: MIT
// What the backward pass of lists (backward.h) knows of queries and keys: in registers for the
// rows that a lane holds, in shared memory for the columns of a tile.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/lists/rows.cuh"
#include "cuda/prim/element.cuh"

namespace coterie::cuda {

// Factors of a head's scores.
struct ScoreScale {
  float score;     // to logits
  float exponent;  // to logits in base 2
  float gradient;  // of dS in dk, where it is not the same for all heads
  bool laplace;

  __device__ ScoreScale(const ListProblem& problem, int head)
      : score(problem.score_scale(head)),
        exponent(score * kLog2e),
        gradient(problem.head_scale ? score : 1.0f),
        laplace(problem.laplace) {}
};

// Where a value of a query stands: by row, or by slot.
__device__ __forceinline__ std::int64_t value_place(const ListProblem& problem,
                                                    const ListPair& pair, int head, int rank,
                                                    bool by_slot) {
  if (by_slot) return pair.q.slot_of(rank);
  return ListProblem::row_base(problem.q, pair.q_span, head) + pair.q.row(rank);
}

struct QueryValues {
  int low, high;  // ranks of the keys in sight
  float lse;      // in base 2; +inf makes all weights 0
  float delta;
  float weight;         // of the output gradient
  RowStatistics stats;  // the mean times the width
  QueryFilter filter;
};

struct KeyValues {
  int rank, row;
  RowStatistics stats;
};

// From where queries take their values.
struct QuerySource {
  const ListProblem& problem;
  ListValues weight, lse, delta;
  float weight_scale;

  // All but the range.
  template <ListForm kForm>
  __device__ QueryValues load(const ListPair& pair, int head, int rank) const {
    QueryValues query{0, 0, INFINITY, 0.0f, 1.0f, kNoStatistics, QueryFilter()};
    if (rank >= pair.q.count) return query;
    const std::int64_t by_row = value_place(problem, pair, head, rank, false);
    const std::int64_t by_slot = pair.q.slot_of(rank);
    const auto value = [&](const ListValues& values) {
      return values.data[values.by_slot ? by_slot : by_row];
    };
    if (lse.data) {
      const float sum = value(lse);
      if (sum != -INFINITY) query.lse = sum * kLog2e - log2f(weight_scale);
    }
    if (delta.data && !problem.laplace) query.delta = value(delta);
    if constexpr (kForm != ListForm::plain) {
      if (weight.data) query.weight = value(weight);
      if (problem.q_stats) query.stats = problem.q_stats[by_row];
      query.stats.mean *= static_cast<float>(problem.width);
    }
    if constexpr (kForm == ListForm::general) query.filter = QueryFilter(problem, pair, head, rank);
    return query;
  }
};

template <ListForm kForm>
__device__ __forceinline__ KeyValues load_key(const ListProblem& problem, const ListPair& pair,
                                              int key_head, int rank) {
  KeyValues key{rank, 0, kNoStatistics};
  if (kForm == ListForm::plain || rank >= pair.k.count) return key;
  key.row = pair.k.row(rank);
  if (problem.k_stats)
    key.stats = problem.k_stats[ListProblem::row_base(problem.k, pair.k_span, key_head) + key.row];
  return key;
}

// 1 / sigma of a row as a factor of weights and their derivatives, which are then rounded to T and
// multiplied with the row. Without variance it is 0, as the normalised row is: 1000 times a scaled
// weight is beyond f16, and infinity times 0 is NaN.
template <class T>
__device__ __forceinline__ float inverse_factor(float inverse) {
  return std::is_same_v<T, F16> && fabsf(inverse - 1000.0f) < 0.01f ? 0.0f : inverse;
}

// The keys of a tile; nothing in the plain form.
template <int kColumns, ListForm kForm>
struct KeyColumns {
  RowStatistics stats[kColumns];
  int row[kColumns];

  // By all threads of a block, the keys from rank `first` on.
  __device__ void load(const ListProblem& problem, const ListPair& pair, int key_head, int first) {
    if (threadIdx.x >= kColumns) return;
    const KeyValues key =
        load_key<kForm>(problem, pair, key_head, first + static_cast<int>(threadIdx.x));
    stats[threadIdx.x] = {key.stats.mean, inverse_factor<F16>(key.stats.inverse)};
    row[threadIdx.x] = key.row;
  }
};
template <int kColumns>
struct KeyColumns<kColumns, ListForm::plain> {
  __device__ void load(const ListProblem&, const ListPair&, int, int) {}
};

// The queries of a tile. lse and delta are read in pairs.
template <int kColumns, ListForm kForm>
struct QueryColumns {
  static constexpr int kStatistics = kForm == ListForm::plain ? 1 : kColumns;
  static constexpr int kFilters = kForm == ListForm::general ? kColumns : 1;
  alignas(8) float lse[kColumns];
  alignas(8) float delta[kColumns];  // times the factor of gradients
  int low[kColumns], high[kColumns];
  float weight[kStatistics];
  RowStatistics stats[kStatistics];
  QueryFilter filter[kFilters];

  __device__ void store(int column, const QueryValues& query, float factor) {
    lse[column] = query.lse;
    delta[column] = query.delta * factor;
    low[column] = query.low;
    high[column] = query.high;
    if constexpr (kForm != ListForm::plain) {
      weight[column] = query.weight;
      stats[column] = {query.stats.mean, inverse_factor<F16>(query.stats.inverse)};
    }
    if constexpr (kForm == ListForm::general) filter[column] = query.filter;
  }
};

}  // namespace coterie::cuda
