// SPDX-License-Identifier: MIT
// Weights of the backward pass of lists (backward.h) and their derivatives, element by element of
// a tile of scores.
#pragma once

#include "cuda/lists/backward_rows.cuh"

namespace coterie::cuda {

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

}  // namespace coterie::cuda
