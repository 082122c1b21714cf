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

// A weight, and its derivative by the logit, but for the softmax's dP - delta.
struct Weight {
  float value, slope;
};

// The product of two rows as they count, from that of the rows as they are.
template <ListForm kForm>
__device__ __forceinline__ float row_product(float s, const RowStatistics& q,
                                             const RowStatistics& k) {
  return kForm == ListForm::plain ? s : (s - q.mean * k.mean) * (q.inverse * k.inverse);
}

template <ListForm kForm>
__device__ __forceinline__ Weight weigh(float s, float lse, const RowStatistics& q,
                                        const RowStatistics& k, const ScoreScale& scale) {
  s = row_product<kForm>(s, q, k);
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
  // A second loop without masks is worth its code where tiles are taken by larger units.
  static constexpr bool kMaskAll = kForm == ListForm::general || P::kUnit < kColumns;
  using Scores = typename P::Scores;
  const ScoreScale& scale;
  int first;  // rank of the tile's first key

  __device__ static int column(int i) {
    return i / 4 * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + i % 2;
  }

  // Columns 8 j + 2 (l%4) and the next.
  __device__ static float2 pair_at(const float (&values)[kColumns], int j) {
    return *reinterpret_cast<const float2*>(values + 8 * j + threadIdx.x % 4 * 2);
  }

  // Rows are queries. s becomes weights, or their slopes.
  template <bool kMasked>
  __device__ void weigh_rows(Scores& s, const QueryValues (&query)[2],
                             const KeyColumns<kColumns, kForm>& keys, bool slopes) const {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) {
      const int rank = first + column(i);
      const QueryValues& q = query[i / 2 % 2];
      RowStatistics stats = kNoStatistics;
      if constexpr (kForm != ListForm::plain) stats = keys.stats[column(i)];
      const Weight weight = weigh<kForm>(s[i], q.lse, q.stats, stats, scale);
      bool seen = !kMasked || (rank >= q.low && rank < q.high);
      if constexpr (kForm == ListForm::general) seen = seen && q.filter.sees(keys.row[column(i)]);
      s[i] = !seen ? 0.0f : slopes ? weight.slope : weight.value;
    }
  }
  __device__ void weigh_rows(Scores& s, const QueryValues (&query)[2],
                             const KeyColumns<kColumns, kForm>& keys, bool slopes,
                             bool whole) const {
    if (!kMaskAll && whole)
      weigh_rows<false>(s, query, keys, slopes);
    else
      weigh_rows<true>(s, query, keys, slopes);
  }
  // d becomes dP, with the factors of output gradients.
  __device__ static void weigh_gradients(Scores& d, const QueryValues (&query)[2]) {
    if constexpr (kForm != ListForm::plain) {
#pragma unroll
      for (int i = 0; i < kColumns / 2; ++i) d[i] *= query[i / 2 % 2].weight;
    }
  }

  // d becomes dS, which is added up by row; p and dS, rounded, are then factors of the keys' rows.
  __device__ static void differentiate_rows(Scores& s, Scores& d, const QueryValues (&query)[2],
                                            const KeyColumns<kColumns, kForm>& keys,
                                            float (&sum)[2], typename P::Factor& p,
                                            typename P::Factor& ds) {
#pragma unroll
    for (int part = 0; part < kColumns / 16; ++part) {
#pragma unroll
      for (int i = 8 * part; i < 8 * part + 8; ++i) {
        const int side = i / 2 % 2;
        d[i] = s[i] * (d[i] - query[side].delta);
        sum[side] += d[i];
        if constexpr (kForm != ListForm::plain) {
          s[i] *= keys.stats[column(i)].inverse;
          d[i] *= keys.stats[column(i)].inverse;
        }
      }
      P::round(p[part], s, part);
      P::round(ds[part], d, part);
    }
  }

  // Rows are keys. s becomes weights; with laplace logits, -inf where out of sight.
  template <bool kMasked>
  __device__ void weigh_columns(Scores& s, const KeyValues (&key)[2],
                                const QueryColumns<kColumns, kForm>& queries) const {
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      const float2 lse = pair_at(queries.lse, j);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int c = column(4 * j + e), side = e / 2, rank = key[side].rank;
        RowStatistics stats = kNoStatistics;
        if constexpr (kForm != ListForm::plain) stats = queries.stats[c];
        float& x = s[4 * j + e];
        x = row_product<kForm>(x, stats, key[side].stats);
        const bool alone = kForm == ListForm::general && scale.laplace;
        x = alone ? x * scale.score
                  : exp2_approximate(fmaf(x, scale.exponent, -(e % 2 ? lse.y : lse.x)));
        bool seen = !kMasked || (rank >= queries.low[c] && rank < queries.high[c]);
        if constexpr (kForm == ListForm::general)
          seen = seen && queries.filter[c].sees(key[side].row);
        if (!seen) x = alone ? -INFINITY : 0.0f;
      }
    }
  }
  __device__ void weigh_columns(Scores& s, const KeyValues (&key)[2],
                                const QueryColumns<kColumns, kForm>& queries, bool whole) const {
    if (!kMaskAll && whole)
      weigh_columns<false>(s, key, queries);
    else
      weigh_columns<true>(s, key, queries);
  }
  // p is the factor of the output gradients, ds that of the queries' rows.
  __device__ void differentiate_columns(Scores& s, Scores& d,
                                        const QueryColumns<kColumns, kForm>& queries,
                                        typename P::Factor& p, typename P::Factor& ds) const {
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      const float2 delta = pair_at(queries.delta, j);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int i = 4 * j + e;
        float factor = 1.0f, slope = s[i];
        if constexpr (kForm == ListForm::general)
          if (scale.laplace) {
            slope = laplace_slope(s[i]);
            s[i] = laplace(s[i]);
          }
        if constexpr (kForm != ListForm::plain) {
          factor = queries.weight[column(i)];
          s[i] *= factor;
          slope *= queries.stats[column(i)].inverse;
        }
        d[i] = slope * fmaf(d[i], factor * scale.gradient, -(e % 2 ? delta.y : delta.x));
      }
      if (j % 2 == 1) {
        P::round(p[j / 2], s, j / 2);
        P::round(ds[j / 2], d, j / 2);
      }
    }
  }
};

// A first guess of delta, for rows that have none yet: the mean of dP over the keys of a tile, by
// their weights. Whether this row has one now.
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
  if (weight > 0.0f) delta = sum / weight;
  return weight > 0.0f;
}

// First of the ranks [0, count) for which `late` is true, which it then stays; count if none. By
// all lanes of a warp, or by a thread alone.
template <bool kAlone, class Late>
__device__ __forceinline__ int first_rank(int count, const Late& late) {
  constexpr int kProbes = kAlone ? 8 : 32;
  int begin = 0;  // the answer is in [begin, begin + left]
  for (int left = count; left > 0;) {
    const int step = (left + kProbes - 1) / kProbes;
    int reached = 0;
    if constexpr (kAlone) {
#pragma unroll
      for (int i = 0; i < kProbes; ++i)
        reached += i * step < left && !late(begin + min(i * step, left - 1));
    } else {
      const int place = static_cast<int>(threadIdx.x) % 32 * step;
      reached = __popc(__ballot_sync(~0u, place < left && !late(begin + place)));
    }
    if (reached == 0) break;
    const int end = min(begin + reached * step, begin + left);
    begin += (reached - 1) * step + 1;
    left = end - begin;
  }
  return begin;
}

// The query ranks that see any of the keys [first, end), and perhaps some that do not. By all lanes
// of a warp, or by a thread alone.
template <bool kAlone = false>
__device__ __forceinline__ RankRange queries_of(const ListProblem& problem, const ListPair& pair,
                                                int first, int end) {
  const std::int64_t count = pair.q.count, window = problem.window;
  std::int64_t low = 0, high = count + pair.shift;  // by r of ListRule
  switch (problem.rule) {
    case ListRule::all:
      return {0, pair.q.count};
    case ListRule::causal:
      low = first;
      break;
    case ListRule::sliding:
      low = problem.causal ? first : first - (window + 1) / 2 + 1;
      high = problem.causal ? end + window - 1 : end + window / 2;
      break;
    case ListRule::blocked:
      low = problem.causal ? first : (first / window - problem.after) * window;
      high = ((end - 1) / window + 1 + problem.before) * window;
      break;
    default: {
      int found[2];
#pragma unroll 1
      for (int side = 0; side < 2; ++side) {
        const int rank = first_rank<kAlone>(pair.q.count, [&](int r) {
          const RankRange range = problem.range(pair, r);
          return side ? range.low >= end : range.high > first;
        });
        (side ? found[1] : found[0]) = rank;
      }
      return {found[0], found[1]};
    }
  }
  low = min(max(low - pair.shift, std::int64_t{0}), count);
  high = min(max(high - pair.shift, low), count);
  return {static_cast<int>(low), static_cast<int>(high)};
}

}  // namespace coterie::cuda
