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
void laplace_row(T* row, std::int64_t n) {
  for (std::int64_t t = 0; t < n; ++t) row[t] = row[t] == kNegInf<T> ? T(0) : laplace(row[t]);
}

template <class T>
void laplace_grad(const T* score, T* dp, std::int64_t n) {
  for (std::int64_t t = 0; t < n; ++t)
    dp[t] = score[t] == kNegInf<T> ? T(0) : dp[t] * laplace_slope(score[t]);
}

// Everything a pass over (query tile, key tile) pairs needs to name. A tile of `keys` keys uses the
// first padded(keys) columns of tiles.s, tiles.dp and tiles.p_for_v, whose rows are kKeyTile long.
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
      if (rows.weight)
        kernel.row_scale(tiles.g + r * tiles.value_row, tiles.value_row, rows.weight[slot]);
      if (laplacian()) continue;
      // A row without keys has lse -inf; +inf makes all its weights exp(-inf) = 0.
      const T lse = rows.lse[slot];
      tiles.lse[r] = lse == kNegInf<T> ? -kNegInf<T> : lse;
      tiles.delta[r] = rows.delta ? rows.delta[slot] : T(0);
    }
  }

  // Keys [begin, begin + keys) and their values as columns, for score and gradient_products.
  void load_key_columns(std::int64_t begin, std::int64_t keys) {
    kernel.load_transposed(segment.k, begin, keys, T(1), tiles.k_columns, padded(keys));
  }
  void load_value_columns(std::int64_t begin, std::int64_t keys) {
    kernel.load_transposed(segment.v, begin, keys, T(1), tiles.v_columns, padded(keys));
  }

  // tiles.s = scores of the queries over keys [begin, begin + keys), -inf where not allowed.
  void score(std::int64_t first, std::int64_t queries, std::int64_t begin, std::int64_t keys) {
    const std::int64_t columns = padded(keys);
    kernel.multiply({queries, columns, segment.k.width, tiles.q, tiles.key_row, 1, tiles.k_columns,
                     columns, tiles.s, kKeyTile, false});
    for (std::int64_t r = 0; r < queries; ++r) {
      T* row = tiles.s + r * kKeyTile;
      const std::int64_t low = std::clamp<std::int64_t>(tiles.ranges[r].begin - begin, 0, keys);
      const std::int64_t high = std::clamp<std::int64_t>(tiles.ranges[r].end - begin, low, keys);
      std::fill(row, row + low, kNegInf<T>);
      std::fill(row + high, row + columns, kNegInf<T>);
      if (segment.rule.filter && low < high)
        segment.rule.filter(first + r, begin + low, high - low, row + low);
    }
  }

  // dp = gradient . v.
  void gradient_products(std::int64_t queries, std::int64_t keys) {
    kernel.multiply({queries, padded(keys), segment.v.width, tiles.g, tiles.value_row, 1,
                     tiles.v_columns, padded(keys), tiles.dp, kKeyTile, false});
  }

  // Row r of s becomes weights under the saved log-sum-exp.
  void weigh(T* row, std::int64_t r, std::int64_t keys) {
    if (laplacian())
      laplace_row(row, padded(keys));
    else
      kernel.row_exp(row, padded(keys), tiles.lse[r]);
  }

  // s becomes weights and dp the derivative by the scores; p_for_v gets the weights that values are
  // summed with where they differ from s.
  void differentiate(std::int64_t first, std::int64_t queries, std::int64_t begin,
                     std::int64_t keys, const TileHook<T>* hook) {
    const std::int64_t columns = padded(keys);
    gradient_products(queries, keys);
    for (std::int64_t r = 0; r < queries; ++r) {
      T* p = tiles.s + r * kKeyTile;
      T* dp = tiles.dp + r * kKeyTile;
      T* p_for_v = tiles.p_for_v + r * kKeyTile;
      if (laplacian()) std::copy_n(p, columns, p_for_v);
      weigh(laplacian() ? p_for_v : p, r, keys);
      if (hook && !laplacian()) std::copy_n(p, columns, p_for_v);
      if (hook) hook->backward(first + r, begin, keys, p_for_v, dp);
      if (laplacian())
        laplace_grad(p, dp, columns);
      else
        kernel.row_softmax_grad(p, dp, columns, tiles.delta[r]);
    }
  }

  bool laplacian() const { return segment.weighting == Weighting::laplace; }
};

}  // namespace coterie::cpu
