// SPDX-License-Identifier: MIT
#include "cpu/activation.h"

#include <algorithm>

#include "cpu/pass.h"

namespace coterie::cpu {

namespace {

// Scores that are not allowed are -inf, where both functions are 0.
template <class T>
void weigh(T* row) {
  for (std::int64_t t = 0; t < kKeyTile; ++t)
    row[t] = row[t] == kNegInf<T> ? T(0) : laplace(row[t]);
}

template <class T>
struct LaplacePass : Pass<T> {
  using Pass<T>::segment;
  using Pass<T>::tiles;
  using Pass<T>::kernel;

  LaplacePass(const Segment<T>& of, Tiles<T>& with) : Pass<T>{of, with} {}

  void load_gradients(const RowGradients<T>& rows, std::int64_t first, std::int64_t count) {
    kernel.load(rows.gradient, first, count, T(1), tiles.g, tiles.value_row);
    if (!rows.weight) return;
    for (std::int64_t r = 0; r < count; ++r) {
      const std::int64_t slot = rows.index ? rows.index[first + r] : (first + r) * rows.step;
      kernel.row_scale(tiles.g + r * tiles.value_row, tiles.value_row, rows.weight[slot]);
    }
  }

  // dp = gradient . v
  void gradient_products(std::int64_t queries) {
    kernel.multiply({queries, kKeyTile, segment.v.width, tiles.g, tiles.value_row, 1,
                     tiles.v_columns, kKeyTile, tiles.dp, kKeyTile, false});
  }

  // p_for_v = weights, dp = slope times gradient . v.
  void differentiate(std::int64_t first, std::int64_t queries, std::int64_t begin,
                     std::int64_t keys, const TileHook<T>* hook) {
    gradient_products(queries);
    for (std::int64_t r = 0; r < queries; ++r) {
      const T* score = tiles.s + r * kKeyTile;
      T* p = tiles.p_for_v + r * kKeyTile;
      T* dp = tiles.dp + r * kKeyTile;
      std::copy_n(score, kKeyTile, p);
      weigh(p);
      if (hook) hook->backward(first + r, begin, keys, p, dp);
      for (std::int64_t t = 0; t < kKeyTile; ++t)
        dp[t] = score[t] == kNegInf<T> ? T(0) : dp[t] * laplace_slope(score[t]);
    }
  }
};

template <class T>
void laplace_forward(const Segment<T>& segment, std::int64_t first, std::int64_t count,
                     Tiles<T>& tiles, const TileHook<T>* hook) {
  LaplacePass<T> pass{segment, tiles};
  pass.load_queries(first, count);
  std::fill_n(tiles.o, count * tiles.value_row, T(0));
  const Range span = tile_span(tiles.ranges, count);
  for (std::int64_t begin = span.begin; begin < span.end; begin += kKeyTile) {
    const std::int64_t keys = std::min(kKeyTile, span.end - begin);
    pass.kernel.load_transposed(segment.k, begin, keys, T(1), tiles.k_columns, kKeyTile);
    pass.kernel.load(segment.v, begin, keys, T(1), tiles.v, tiles.value_row);
    pass.score(first, count, begin, keys);
    for (std::int64_t r = 0; r < count; ++r) {
      T* row = tiles.s + r * kKeyTile;
      weigh(row);
      if (hook) hook->forward(r, first + r, begin, keys, T(1), row);
    }
    pass.kernel.multiply({count, tiles.value_row, keys, tiles.s, kKeyTile, 1, tiles.v,
                          tiles.value_row, tiles.o, tiles.value_row, true});
  }
}

template <class T>
void laplace_backward_query(const Segment<T>& segment, const RowGradients<T>& rows,
                            std::int64_t first, std::int64_t count, Tiles<T>& tiles,
                            const TileHook<T>* hook) {
  LaplacePass<T> pass{segment, tiles};
  const Kernels<T>& kernel = pass.kernel;
  pass.load_queries(first, count);
  pass.load_gradients(rows, first, count);
  std::fill_n(tiles.dq, count * tiles.key_row, T(0));
  const Range span = tile_span(tiles.ranges, count);
  for (std::int64_t begin = span.begin; begin < span.end; begin += kKeyTile) {
    const std::int64_t keys = std::min(kKeyTile, span.end - begin);
    kernel.load_transposed(segment.k, begin, keys, T(1), tiles.k_columns, kKeyTile);
    kernel.load_transposed(segment.v, begin, keys, T(1), tiles.v_columns, kKeyTile);
    kernel.load(segment.k, begin, keys, T(1), tiles.k, tiles.key_row);
    pass.score(first, count, begin, keys);
    pass.differentiate(first, count, begin, keys, hook);
    kernel.multiply({count, tiles.key_row, keys, tiles.dp, kKeyTile, 1, tiles.k, tiles.key_row,
                     tiles.dq, tiles.key_row, true});
  }
  for (std::int64_t r = 0; r < count; ++r)
    kernel.row_scale(tiles.dq + r * tiles.key_row, tiles.key_row, segment.scale);
}

template <class T>
void laplace_backward_key(const Segment<T>& segment, const RowGradients<T>& rows,
                          std::int64_t first, std::int64_t count, Tiles<T>& tiles,
                          const TileHook<T>* hook) {
  LaplacePass<T> pass{segment, tiles};
  const Kernels<T>& kernel = pass.kernel;
  kernel.load_transposed(segment.k, first, count, T(1), tiles.k_columns, kKeyTile);
  kernel.load_transposed(segment.v, first, count, T(1), tiles.v_columns, kKeyTile);
  for (std::int64_t q = 0; q < segment.num_queries; q += kQueryTile) {
    const std::int64_t num = std::min(kQueryTile, segment.num_queries - q);
    pass.load_queries(q, num);
    pass.load_gradients(rows, q, num);
    pass.score(q, num, first, count);
    pass.differentiate(q, num, first, count, hook);
    kernel.multiply({count, tiles.value_row, num, tiles.p_for_v, 1, kKeyTile, tiles.g,
                     tiles.value_row, tiles.dv, tiles.value_row, true});
    kernel.multiply({count, tiles.key_row, num, tiles.dp, 1, kKeyTile, tiles.q, tiles.key_row,
                     tiles.dk, tiles.key_row, true});
  }
}

template <class T>
void laplace_delta(const Segment<T>& segment, const RowGradients<T>& rows, std::int64_t first,
                   std::int64_t count, Tiles<T>& tiles) {
  LaplacePass<T> pass{segment, tiles};
  const Kernels<T>& kernel = pass.kernel;
  pass.load_queries(first, count);
  pass.load_gradients(rows, first, count);
  std::fill_n(tiles.delta, count, T(0));
  const Range span = tile_span(tiles.ranges, count);
  for (std::int64_t begin = span.begin; begin < span.end; begin += kKeyTile) {
    const std::int64_t keys = std::min(kKeyTile, span.end - begin);
    kernel.load_transposed(segment.k, begin, keys, T(1), tiles.k_columns, kKeyTile);
    kernel.load_transposed(segment.v, begin, keys, T(1), tiles.v_columns, kKeyTile);
    pass.score(first, count, begin, keys);
    pass.gradient_products(count);
    for (std::int64_t r = 0; r < count; ++r) {
      weigh(tiles.s + r * kKeyTile);
      tiles.delta[r] += kernel.row_dot(tiles.s + r * kKeyTile, tiles.dp + r * kKeyTile, kKeyTile);
    }
  }
}

}  // namespace

template <class T>
Activation<T> activation(CastActivation function) {
  if (function == CastActivation::softmax)
    return {forward_tile<T>, backward_query_tile<T>, backward_key_tile<T>, delta_tile<T>};
  return {laplace_forward<T>, laplace_backward_query<T>, laplace_backward_key<T>, laplace_delta<T>};
}

template Activation<float> activation(CastActivation);
template Activation<double> activation(CastActivation);

}  // namespace coterie::cpu
