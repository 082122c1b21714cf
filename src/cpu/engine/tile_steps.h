// SPDX-License-Identifier: MIT
// The steps of every pass over (query tile, key tile) pairs.
#pragma once

#include <algorithm>
#include <limits>
#include <type_traits>

#include "cpu/engine/segment.h"
#include "cpu/kernels/laplace.h"

namespace coterie::cpu {

template <class T>
constexpr T kNegInf = -std::numeric_limits<T>::infinity();

// The span of key tiles that the rows' ranges overlap.
inline Range tile_span(const Range* ranges, std::int64_t count) {
  Range span{std::numeric_limits<std::int64_t>::max(), 0};
  for (std::int64_t r = 0; r < count; ++r) {
    if (ranges[r].begin >= ranges[r].end) continue;
    span.begin = std::min(span.begin, ranges[r].begin / kKeyTile * kKeyTile);
    span.end = std::max(span.end, ranges[r].end);
  }
  return span;
}

// Masked scores are -inf, for which laplace and its derivative are 0.
template <class T>
void laplace_row(T* row, std::int64_t n) {
  for (std::int64_t t = 0; t < n; ++t) row[t] = row[t] == kNegInf<T> ? T(0) : laplace(row[t]);
}

template <class T>
void laplace_grad(const T* score, T* dp, std::int64_t n) {
  for (std::int64_t t = 0; t < n; ++t)
    dp[t] = score[t] == kNegInf<T> ? T(0) : dp[t] * laplace_slope(score[t]);
}

// State and steps of a pass over (query tile, key tile) pairs. A tile of `keys` keys uses the first
// padded(keys) columns of tiles.s, tiles.dp and tiles.p_for_v, whose rows are kKeyTile long.
template <class T>
struct Pass {
  const Segment<T>& segment;
  Tiles<T>& tiles;
  const RowGradients<T>* gradients = nullptr;  // of a backward pass
  const Kernels<T>& kernel = kernels<T>();
  const PairKernels* pairs = sizeof(T) == sizeof(float) ? kernel_table().pairs : nullptr;

  // Whether products use bf16. Those of inputs are exact; weights are rounded for the product with
  // the values.
  static bool halves(const Rows& rows) { return rows.dtype == DType::bf16; }
  bool pair_scores() const {
    return pairs && halves(segment.q) && halves(segment.k) && segment.k.width % 2 == 0;
  }
  bool pair_values() const { return pairs && halves(segment.v) && segment.round_weights; }
  bool pair_gradients() const {
    return pairs && halves(segment.v) && gradients && halves(gradients->gradient) &&
           !gradients->weight && segment.v.width % 2 == 0;
  }

  // Operands of score.
  void load_queries(std::int64_t first, std::int64_t count) {
    segment.rule.ranges(first, count, tiles.ranges);
    if (pair_scores())
      pairs->load(segment.q, first, count, tiles.pairs.q, tiles.key_row / 2);
    else
      load_query_rows(first, count);
  }
  void load_query_rows(std::int64_t first, std::int64_t count) {
    kernel.load(segment.q, first, count, segment.scale, tiles.q, tiles.key_row);
  }

  void load_gradients(std::int64_t first, std::int64_t count) {
    const RowGradients<T>& rows = *gradients;
    if (pair_gradients())
      pairs->load(rows.gradient, first, count, tiles.pairs.g, tiles.value_row / 2);
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
    if (pair_scores())
      pairs->load_transposed(segment.k, begin, keys, tiles.pairs.k_columns, padded(keys));
    else
      kernel.load_transposed(segment.k, begin, keys, T(1), tiles.k_columns, padded(keys));
  }
  void load_value_columns(std::int64_t begin, std::int64_t keys) {
    if (pair_gradients())
      pairs->load_transposed(segment.v, begin, keys, tiles.pairs.v_columns, padded(keys));
    else
      kernel.load_transposed(segment.v, begin, keys, T(1), tiles.v_columns, padded(keys));
  }

  // Values as rows, for add_values.
  void load_values(std::int64_t begin, std::int64_t keys) {
    if (pair_values())
      pairs->load_row_pairs(segment.v, begin, keys, tiles.pairs.v, tiles.value_row);
    else
      kernel.load(segment.v, begin, keys, T(1), tiles.v, tiles.value_row);
  }

  // tiles.o += weights in tiles.s times values.
  void add_values(std::int64_t queries, std::int64_t keys) {
    if constexpr (std::is_same_v<T, float>) {
      if (pair_values()) {
        pairs->round(tiles.s, kKeyTile, queries, padded(keys), tiles.pairs.p, kKeyTile / 2);
        return pairs->multiply({queries, tiles.value_row, (keys + 1) / 2, tiles.pairs.p,
                                kKeyTile / 2, tiles.pairs.v, tiles.value_row, tiles.o,
                                tiles.value_row, 1, true});
      }
    }
    kernel.multiply({queries, tiles.value_row, keys, tiles.s, kKeyTile, 1, tiles.v, tiles.value_row,
                     tiles.o, tiles.value_row, true});
  }

  // tiles.s = scores of the queries over keys [begin, begin + keys), -inf if masked.
  void score(std::int64_t first, std::int64_t queries, std::int64_t begin, std::int64_t keys) {
    const std::int64_t columns = padded(keys);
    multiply_scores(queries, columns);
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

  void multiply_scores(std::int64_t queries, std::int64_t columns) {
    if constexpr (std::is_same_v<T, float>)
      if (pair_scores())
        return pairs->multiply({queries, columns, segment.k.width / 2, tiles.pairs.q,
                                tiles.key_row / 2, tiles.pairs.k_columns, columns, tiles.s,
                                kKeyTile, segment.scale, false});
    kernel.multiply({queries, columns, segment.k.width, tiles.q, tiles.key_row, 1, tiles.k_columns,
                     columns, tiles.s, kKeyTile, false});
  }

  // dp = gradient . v.
  void gradient_products(std::int64_t queries, std::int64_t keys) {
    if constexpr (std::is_same_v<T, float>)
      if (pair_gradients())
        return pairs->multiply({queries, padded(keys), segment.v.width / 2, tiles.pairs.g,
                                tiles.value_row / 2, tiles.pairs.v_columns, padded(keys), tiles.dp,
                                kKeyTile, 1, false});
    kernel.multiply({queries, padded(keys), segment.v.width, tiles.g, tiles.value_row, 1,
                     tiles.v_columns, padded(keys), tiles.dp, kKeyTile, false});
  }

  // Turns row r of s into weights with the saved log-sum-exp.
  void weigh(T* row, std::int64_t r, std::int64_t keys) {
    if (laplacian())
      laplace_row(row, padded(keys));
    else
      kernel.row_exp(row, padded(keys), tiles.lse[r]);
  }

  // Turns s into weights (softmax only) and dp into the derivative by the scores. With a hook or
  // laplace, p_for_v gets the weights of the values, else s has them.
  void differentiate(std::int64_t first, std::int64_t queries, std::int64_t begin,
                     std::int64_t keys, const TileHook<T>* hook) {
    const std::int64_t columns = padded(keys);
    gradient_products(queries, keys);
    for (std::int64_t r = 0; r < queries; ++r) {
      T* p = tiles.s + r * kKeyTile;
      T* dp = tiles.dp + r * kKeyTile;
      T* p_for_v = tiles.p_for_v + r * kKeyTile;
      if (drops()) segment.dropout.apply(first + r, begin, keys, dp);
      if (laplacian()) std::copy_n(p, columns, p_for_v);
      weigh(laplacian() ? p_for_v : p, r, keys);
      if (hook && !laplacian()) std::copy_n(p, columns, p_for_v);
      if (drops() && (hook || laplacian())) segment.dropout.apply(first + r, begin, keys, p_for_v);
      if (hook) hook->backward(first + r, begin, keys, p_for_v, dp);
      if (laplacian())
        laplace_grad(p, dp, columns);
      else
        kernel.row_softmax_grad(p, dp, columns, tiles.delta[r]);
      if (drops() && !hook && !laplacian()) segment.dropout.apply(first + r, begin, keys, p);
    }
  }

  bool drops() const { return segment.dropout.dropout != nullptr; }
  bool laplacian() const { return segment.weighting == Weighting::laplace; }
};

}  // namespace coterie::cpu
