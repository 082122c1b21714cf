// SPDX-License-Identifier: MIT
// Weights of the backward pass of lists (list_bwd.cuh) and their derivatives, element by element of
// a tile of scores: what is known of its queries and keys, in registers for the rows that a lane
// holds and in shared memory for the columns.
#pragma once

#include <cstdint>

#include "cuda/device/list_rows.cuh"

namespace coterie::cuda {

// Factors of a head's scores.
struct ScoreScale {
  float score;     // to logits
  float exponent;  // to logits in base 2
  float gradient;  // of dS in dk, where it is not the same for all heads
  bool laplace;
  int width;

  __device__ ScoreScale(const ListProblem& problem, int head)
      : score(problem.score_scale(head)),
        exponent(score * kLog2e),
        gradient(problem.head_scale ? score : 1.0f),
        laplace(problem.laplace),
        width(problem.width) {}
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

  template <ListForm kForm>
  __device__ QueryValues load(const ListPair& pair, int head, int rank) const {
    QueryValues query{0, 0, INFINITY, 0.0f, 1.0f, kNoStatistics, QueryFilter()};
    if (rank >= pair.q.count) return query;
    const auto value = [&](const ListValues& values) {
      return values.data[value_place(problem, pair, head, rank, values.by_slot)];
    };
    const RankRange range = problem.range(pair, rank);
    query.low = range.low;
    query.high = range.high;
    if (lse.data) {
      const float sum = value(lse);
      if (sum != -INFINITY) query.lse = sum * kLog2e - log2f(weight_scale);
    }
    if (delta.data && !problem.laplace) query.delta = value(delta);
    if constexpr (kForm != ListForm::plain) {
      if (weight.data) query.weight = value(weight);
      if (problem.q_stats)
        query.stats = problem.q_stats[value_place(problem, pair, head, rank, false)];
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
    stats[threadIdx.x] = key.stats;
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
      stats[column] = query.stats;
    }
    if constexpr (kForm == ListForm::general) filter[column] = query.filter;
  }
};

// Derivative of laplace.
__device__ __forceinline__ float laplace_slope(float x) {
  constexpr float kMean = 0.70710678118654752f, kTwoPi = 6.2831853071795865f;
  return expf(-kTwoPi * (x - kMean) * (x - kMean)) * (2.0f * kMean);
}

// A weight, and its derivative by the logit where that is the softmax's in p (dP - delta).
struct Weight {
  float value, slope;
};

template <ListForm kForm>
__device__ __forceinline__ Weight weigh(float s, float lse, const RowStatistics& q,
                                        const RowStatistics& k, const ScoreScale& scale) {
  if constexpr (kForm != ListForm::plain) s = (s - q.mean * k.mean) * (q.inverse * k.inverse);
  if constexpr (kForm == ListForm::general)
    if (scale.laplace) return {laplace(s * scale.score), laplace_slope(s * scale.score)};
  const float p = exp2_approximate(fmaf(s, scale.exponent, -lse));
  return {p, p};
}

// Turns products of a tile into weights and derivatives. `whole`: every query of the tile, or of
// the rows in step, sees every key.
template <class P, ListForm kForm>
struct TileWeights {
  static constexpr int kColumns = P::kColumns;
  using Scores = typename P::Scores;
  const ScoreScale& scale;
  int first;  // rank of the tile's first key

  __device__ static int column(int i) {
    return i / 4 * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + i % 2;
  }

  // Rows are queries. Calls body(i, side, weight, inverse of the key) for all elements.
  template <bool kMasked, class Body>
  __device__ void for_rows(const Scores& s, const QueryValues (&query)[2],
                           const KeyColumns<kColumns, kForm>& keys, const Body& body) const {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) {
      const int side = i / 2 % 2, rank = first + column(i);
      const QueryValues& q = query[side];
      RowStatistics stats = kNoStatistics;
      if constexpr (kForm != ListForm::plain) stats = keys.stats[column(i)];
      Weight weight = weigh<kForm>(s[i], q.lse, q.stats, stats, scale);
      bool seen = !kMasked || (rank >= q.low && rank < q.high);
      if constexpr (kForm == ListForm::general) seen = seen && q.filter.sees(keys.row[column(i)]);
      if (!seen) weight = {0.0f, 0.0f};
      body(i, side, weight, stats.inverse);
    }
  }
  template <class Body>
  __device__ void for_rows(bool whole, const Scores& s, const QueryValues (&query)[2],
                           const KeyColumns<kColumns, kForm>& keys, const Body& body) const {
    if (kForm != ListForm::general && whole)
      for_rows<false>(s, query, keys, body);
    else
      for_rows<true>(s, query, keys, body);
  }

  // delta += p dP of this lane's elements.
  __device__ void add_deltas(const Scores& s, const Scores& d, const QueryValues (&query)[2],
                             const KeyColumns<kColumns, kForm>& keys, bool whole,
                             float (&delta)[2]) const {
    for_rows(whole, s, query, keys, [&](int i, int side, const Weight& weight, float) {
      const float factor = kForm == ListForm::plain ? 1.0f : query[side].weight;
      delta[side] = fmaf(weight.value, d[i] * factor, delta[side]);
    });
  }

  // d becomes dS, as the factor of the keys' rows.
  __device__ void differentiate_rows(const Scores& s, Scores& d, const QueryValues (&query)[2],
                                     const KeyColumns<kColumns, kForm>& keys, bool whole) const {
    for_rows(whole, s, query, keys, [&](int i, int side, const Weight& weight, float inverse) {
      if constexpr (kForm == ListForm::plain)
        d[i] = weight.slope * (d[i] - query[side].delta);
      else
        d[i] = weight.slope * inverse * fmaf(d[i], query[side].weight, -query[side].delta);
    });
  }

  // Rows are keys: s becomes the factor of the output gradients, d that of the queries' rows.
  template <bool kMasked>
  __device__ void for_columns(Scores& s, Scores& d, const KeyValues (&key)[2],
                              const QueryColumns<kColumns, kForm>& queries) const {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) {
      const int side = i / 2 % 2, c = column(i);
      RowStatistics stats = kNoStatistics;
      float factor = 1.0f;
      if constexpr (kForm != ListForm::plain) {
        stats = queries.stats[c];
        factor = queries.weight[c];
      }
      Weight weight = weigh<kForm>(s[i], queries.lse[c], stats, key[side].stats, scale);
      bool seen =
          !kMasked || (key[side].rank >= queries.low[c] && key[side].rank < queries.high[c]);
      if constexpr (kForm == ListForm::general)
        seen = seen && queries.filter[c].sees(key[side].row);
      if (!seen) weight = {0.0f, 0.0f};
      s[i] = weight.value * factor;
      d[i] = weight.slope * stats.inverse * fmaf(d[i], factor * scale.gradient, -queries.delta[c]);
    }
  }
  __device__ void differentiate_columns(Scores& s, Scores& d, const KeyValues (&key)[2],
                                        const QueryColumns<kColumns, kForm>& queries,
                                        bool whole) const {
    if (kForm != ListForm::general && whole)
      for_columns<false>(s, d, key, queries);
    else
      for_columns<true>(s, d, key, queries);
  }
};

// First of the ranks [0, count) for which `late` is true, which it then stays; count if none. By
// all lanes of a warp.
template <class Late>
__device__ __forceinline__ int first_rank(int count, const Late& late) {
  int begin = 0;  // the answer is in [begin, begin + left]
  for (int left = count; left > 0;) {
    const int step = (left + 31) / 32, place = static_cast<int>(threadIdx.x) % 32 * step;
    const bool early = place < left && !late(begin + place);
    const int reached = __popc(__ballot_sync(~0u, early));
    if (reached == 0) break;
    const int end = min(begin + reached * step, begin + left);
    begin += (reached - 1) * step + 1;
    left = end - begin;
  }
  return begin;
}

// The query ranks that see any of the keys [first, end). By all lanes of a warp.
__device__ __forceinline__ RankRange queries_of(const ListProblem& problem, const ListPair& pair,
                                                int first, int end) {
  return {first_rank(pair.q.count, [&](int r) { return problem.range(pair, r).high > first; }),
          first_rank(pair.q.count, [&](int r) { return problem.range(pair, r).low >= end; })};
}

}  // namespace coterie::cuda
