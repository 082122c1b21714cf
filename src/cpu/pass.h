// SPDX-License-Identifier: MIT
// The steps that every pass over (query tile, key tile) pairs is made of.
#pragma once

#include <algorithm>
#include <limits>

#include "cpu/laplace.h"
#include "cpu/segment.h"

namespace coterie::cpu {

template <class T>
constexpr T kNegInf = -std::numeric_limits<T>::infinity();

// The key tiles that any of the rows' ranges touches.
inline Range tile_span(const Range* ranges, std::int64_t count) {
  Range span{std::numeric_limits<std::int64_t>::max(), 0};
  for (std::int64_t r = 0; r < count; ++r) {
    if (ranges[r].begin >= ranges[r].end) continue;
    span.begin = std::min(span.begin, ranges[r].begin / kKeyTile * kKeyTile);
    span.end = std::max(span.end, ranges[r].end);
  }
  return span;
}

// Scores that are not allowed are -inf, where laplace and its derivative are 0.
template <class T>
void laplace_row(T* row) {
  for (std::int64_t t = 0; t < kKeyTile; ++t)
    row[t] = row[t] == kNegInf<T> ? T(0) : laplace(row[t]);
}

template <class T>
void laplace_grad(const T* score, T* dp) {
  for (std::int64_t t = 0; t < kKeyTile; ++t)
    dp[t] = score[t] == kNegInf<T> ? T(0) : dp[t] * laplace_slope(score[t]);
}

// Everything a pass over (query tile, key tile) pairs needs to name.
template <class T>
struct Pass {
  const Segment<T>& segment;
  Tiles<T>& tiles;
  const Kernels<T>& kernel = kernels<T>();

  void load_queries(std::int64_t first, std::int64_t count) {
    segment.rule.ranges(first, count, tiles.ranges);
    kernel.load(segment.q, first, count, segment.scale, tiles.q, tiles.key_row);
  }

  void load_gradients(const RowGradients<T>& rows, std::int64_t first, std::int64_t count) {
    kernel.load(rows.gradient, first, count, T(1), tiles.g, tiles.value_row);
    for (std::int64_t r = 0; r < count; ++r) {
      const std::int64_t slot = rows.index ? rows.index[first + r] : (first + r) * rows.step;
      if (rows.weight) kernel.row_scale(tiles.g + r * tiles.value_row, tiles.value_row,
                                        rows.weight[slot]);
      if (laplacian()) continue;
      // A row without keys has lse -inf; +inf makes all its weights exp(-inf) = 0.
      const T lse = rows.lse[slot];
      tiles.lse[r] = lse == kNegInf<T> ? -kNegInf<T> : lse;
      tiles.delta[r] = rows.delta ? rows.delta[slot] : T(0);
    }
  }

  // tiles.s = scores of the queries over keys [begin, begin + count), -inf where not allowed.
  void score(std::int64_t first, std::int64_t queries, std::int64_t begin, std::int64_t keys) {
    kernel.multiply({queries, kKeyTile, segment.k.width, tiles.q, tiles.key_row, 1,
                     tiles.k_columns, kKeyTile, tiles.s, kKeyTile, false});
    for (std::int64_t r = 0; r < queries; ++r) {
      T* row = tiles.s + r * kKeyTile;
      const std::int64_t low = std::clamp<std::int64_t>(tiles.ranges[r].begin - begin, 0, keys);
      const std::int64_t high = std::clamp<std::int64_t>(tiles.ranges[r].end - begin, low, keys);
      std::fill(row, row + low, kNegInf<T>);
      std::fill(row + high, row + kKeyTile, kNegInf<T>);
      if (segment.rule.filter && low < high)
        segment.rule.filter(first + r, begin + low, high - low, row + low);
    }
  }

  // dp = gradient . v.
  void gradient_products(std::int64_t queries) {
    kernel.multiply({queries, kKeyTile, segment.v.width, tiles.g, tiles.value_row, 1,
                     tiles.v_columns, kKeyTile, tiles.dp, kKeyTile, false});
  }

  // Row r of s becomes weights under the saved log-sum-exp.
  void weigh(T* row, std::int64_t r) {
    if (laplacian())
      laplace_row(row);
    else
      kernel.row_exp(row, kKeyTile, tiles.lse[r]);
  }

  // s becomes weights and dp the derivative by the scores; p_for_v gets the weights that values are
  // summed with where they differ from s.
  void differentiate(std::int64_t first, std::int64_t queries, std::int64_t begin,
                     std::int64_t keys, const TileHook<T>* hook) {
    gradient_products(queries);
    for (std::int64_t r = 0; r < queries; ++r) {
      T* p = tiles.s + r * kKeyTile;
      T* dp = tiles.dp + r * kKeyTile;
      T* p_for_v = tiles.p_for_v + r * kKeyTile;
      if (laplacian()) std::copy(p, p + kKeyTile, p_for_v);
      weigh(laplacian() ? p_for_v : p, r);
      if (hook && !laplacian()) std::copy(p, p + kKeyTile, p_for_v);
      if (hook) hook->backward(first + r, begin, keys, p_for_v, dp);
      if (laplacian())
        laplace_grad(p, dp);
      else
        kernel.row_softmax_grad(p, dp, kKeyTile, tiles.delta[r]);
    }
  }

  bool laplacian() const { return segment.weighting == Weighting::laplace; }
};


}  // namespace coterie::cpu
