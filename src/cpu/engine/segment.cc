// SPDX-License-Identifier: MIT
#include "cpu/engine/segment.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "cpu/engine/tile_steps.h"

namespace coterie::cpu {

namespace {

// Turns scores into weights relative to a running maximum; rescales earlier sums and outputs to it.
template <class T>
void online_softmax(std::int64_t rows, std::int64_t columns, Tiles<T>& tiles) {
  const Kernels<T>& kernel = kernels<T>();
  kernel.softmax({tiles.s, rows, kKeyTile, columns, tiles.max, tiles.sum, tiles.rescale});
  for (std::int64_t r = 0; r < rows; ++r)
    if (tiles.rescale[r] != T(1))
      kernel.row_scale(tiles.o + r * tiles.value_row, tiles.value_row, tiles.rescale[r]);
}

template <class T>
void weigh_alone(std::int64_t rows, std::int64_t columns, Tiles<T>& tiles) {
  for (std::int64_t r = 0; r < rows; ++r) laplace_row(tiles.s + r * kKeyTile, columns);
  std::fill_n(tiles.rescale, rows, T(1));
}

}  // namespace

static SegmentDropout make_dropout_of(const AttentionCall& call, std::int64_t item,
                                      std::int64_t head, const RowList& queries,
                                      const RowList& keys, bool clusters) {
  if (!call.dropout.on()) return {};
  return {&call.dropout, item * call.H + head, queries, keys, clusters};
}

SegmentDropout dropout_of(const AttentionCall& call, std::int64_t item, std::int64_t head,
                          const RowList& queries, const RowList& keys) {
  return make_dropout_of(call, item, head, queries, keys, false);
}

SegmentDropout cluster_dropout_of(const AttentionCall& call, std::int64_t item, std::int64_t head,
                                  const RowList& clusters, const RowList& keys) {
  return make_dropout_of(call, item, head, clusters, keys, true);
}

template <class T>
Tiles<T>::Tiles(Arena& arena, std::int64_t key_width, std::int64_t value_width)
    : key_row(padded(key_width)), value_row(padded(value_width)) {
  q = arena.take<T>(kQueryTile * key_row);
  g = arena.take<T>(kQueryTile * value_row);
  o = arena.take<T>(kQueryTile * value_row);
  dq = arena.take<T>(kQueryTile * key_row);
  k = arena.take<T>(kKeyTile * key_row);
  v = arena.take<T>(kKeyTile * value_row);
  k_columns = arena.take<T>(key_row * kKeyTile);
  v_columns = arena.take<T>(value_row * kKeyTile);
  dk = arena.take<T>(kKeyTile * key_row);
  dv = arena.take<T>(kKeyTile * value_row);
  s = arena.take<T>(kQueryTile * kKeyTile);
  dp = arena.take<T>(kQueryTile * kKeyTile);
  p_for_v = arena.take<T>(kQueryTile * kKeyTile);
  max = arena.take<T>(kQueryTile);
  sum = arena.take<T>(kQueryTile);
  rescale = arena.take<T>(kQueryTile);
  lse = arena.take<T>(kQueryTile);
  delta = arena.take<T>(kQueryTile);
  ranges = arena.take<Range>(kQueryTile);
  if constexpr (std::is_same_v<T, float>) {
    pairs.q = arena.take<std::uint32_t>(kQueryTile * key_row / 2);
    pairs.g = arena.take<std::uint32_t>(kQueryTile * value_row / 2);
    pairs.p = arena.take<std::uint32_t>(kQueryTile * kKeyTile / 2);
    pairs.k_columns = arena.take<std::uint32_t>(key_row / 2 * kKeyTile);
    pairs.v_columns = arena.take<std::uint32_t>(value_row / 2 * kKeyTile);
    pairs.v = arena.take<std::uint32_t>(kKeyTile / 2 * value_row);
  }
}

template <class T>
void forward_tile(const Segment<T>& segment, std::int64_t first, std::int64_t count,
                  Tiles<T>& tiles, const TileHook<T>* hook) {
  Pass<T> pass{segment, tiles};
  const Kernels<T>& kernel = pass.kernel;
  pass.load_queries(first, count);
  std::fill_n(tiles.o, count * tiles.value_row, T(0));
  std::fill_n(tiles.max, count, kNegInf<T>);
  std::fill_n(tiles.sum, count, T(0));
  const Range span = tile_span(tiles.ranges, count);
  for (std::int64_t begin = span.begin; begin < span.end; begin += kKeyTile) {
    const std::int64_t keys = std::min(kKeyTile, span.end - begin);
    pass.load_key_columns(begin, keys);
    pass.load_values(begin, keys);
    pass.score(first, count, begin, keys);
    if (pass.laplacian())
      weigh_alone(count, padded(keys), tiles);
    else
      online_softmax(count, padded(keys), tiles);
    for (std::int64_t r = 0; hook && r < count; ++r)
      hook->forward(r, first + r, begin, keys, tiles.rescale[r], tiles.s + r * kKeyTile);
    for (std::int64_t r = 0; pass.drops() && r < count; ++r)
      segment.dropout.apply(first + r, begin, keys, tiles.s + r * kKeyTile);
    pass.add_values(count, keys);
  }
  if (pass.laplacian()) return;
  for (std::int64_t r = 0; r < count; ++r) {
    const bool empty = tiles.max[r] == kNegInf<T> && tiles.sum[r] == T(0);
    tiles.lse[r] = empty ? kNegInf<T> : tiles.max[r] + std::log(tiles.sum[r]);
    kernel.row_scale(tiles.o + r * tiles.value_row, tiles.value_row,
                     empty ? T(0) : T(1) / tiles.sum[r]);
  }
}

template <class T>
void backward_query_tile(const Segment<T>& segment, const RowGradients<T>& rows, std::int64_t first,
                         std::int64_t count, Tiles<T>& tiles, const TileHook<T>* hook) {
  Pass<T> pass{segment, tiles, &rows};
  const Kernels<T>& kernel = pass.kernel;
  pass.load_queries(first, count);
  pass.load_gradients(first, count);
  std::fill_n(tiles.dq, count * tiles.key_row, T(0));
  const Range span = tile_span(tiles.ranges, count);
  for (std::int64_t begin = span.begin; begin < span.end; begin += kKeyTile) {
    const std::int64_t keys = std::min(kKeyTile, span.end - begin);
    pass.load_key_columns(begin, keys);
    pass.load_value_columns(begin, keys);
    kernel.load(segment.k, begin, keys, segment.scale, tiles.k, tiles.key_row);
    pass.score(first, count, begin, keys);
    pass.differentiate(first, count, begin, keys, hook);
    kernel.multiply({count, tiles.key_row, keys, tiles.dp, kKeyTile, 1, tiles.k, tiles.key_row,
                     tiles.dq, tiles.key_row, true});
  }
}

template <class T>
void backward_key_tile(const Segment<T>& segment, const RowGradients<T>& rows, std::int64_t first,
                       std::int64_t count, Tiles<T>& tiles, const TileHook<T>* hook,
                       const QuerySums* sums) {
  Pass<T> pass{segment, tiles, &rows};
  const Kernels<T>& kernel = pass.kernel;
  pass.load_key_columns(first, count);
  pass.load_value_columns(first, count);
  if (sums) kernel.load(segment.k, first, count, segment.scale, tiles.k, tiles.key_row);
  const Range queries = segment.rule.queries ? segment.rule.queries(first, first + count)
                                             : Range{0, segment.num_queries};
  // Query tiles stay aligned to the start of the list for every range of keys.
  for (std::int64_t q = queries.begin / kQueryTile * kQueryTile; q < queries.end; q += kQueryTile) {
    const std::int64_t num = std::min(kQueryTile, segment.num_queries - q);
    pass.load_queries(q, num);
    const Range span = tile_span(tiles.ranges, num);
    if (span.end <= first || span.begin >= first + count) continue;
    if (pass.pair_scores()) pass.load_query_rows(q, num);
    pass.load_gradients(q, num);
    pass.score(q, num, first, count);
    pass.differentiate(q, num, first, count, hook);
    const T* p = hook || pass.laplacian() ? tiles.p_for_v : tiles.s;
    kernel.multiply({count, tiles.value_row, num, p, 1, kKeyTile, tiles.g, tiles.value_row,
                     tiles.dv, tiles.value_row, true});
    kernel.multiply({count, tiles.key_row, num, tiles.dp, 1, kKeyTile, tiles.q, tiles.key_row,
                     tiles.dk, tiles.key_row, true});
    if (sums) (*sums)(q, num);
  }
}

template <class T>
void add_to_queries(const Rows& rows, std::int64_t first, std::int64_t count, std::int64_t keys,
                    Tiles<T>& tiles) {
  const Kernels<T>& kernel = kernels<T>();
  kernel.load(rows, first, count, T(1), tiles.dq, tiles.key_row);
  kernel.multiply({count, tiles.key_row, keys, tiles.dp, kKeyTile, 1, tiles.k, tiles.key_row,
                   tiles.dq, tiles.key_row, true});
  kernel.store(rows, first, count, T(1), tiles.dq, tiles.key_row);
}

template <class T>
void delta_tile(const Segment<T>& segment, const RowGradients<T>& rows, std::int64_t first,
                std::int64_t count, Tiles<T>& tiles) {
  Pass<T> pass{segment, tiles, &rows};
  const Kernels<T>& kernel = pass.kernel;
  pass.load_queries(first, count);
  pass.load_gradients(first, count);
  std::fill_n(tiles.delta, count, T(0));
  const Range span = tile_span(tiles.ranges, count);
  for (std::int64_t begin = span.begin; begin < span.end; begin += kKeyTile) {
    const std::int64_t keys = std::min(kKeyTile, span.end - begin);
    pass.load_key_columns(begin, keys);
    pass.load_value_columns(begin, keys);
    pass.score(first, count, begin, keys);
    pass.gradient_products(count, keys);
    for (std::int64_t r = 0; r < count; ++r) {
      pass.weigh(tiles.s + r * kKeyTile, r, keys);
      if (pass.drops()) segment.dropout.apply(first + r, begin, keys, tiles.s + r * kKeyTile);
      tiles.delta[r] +=
          kernel.row_dot(tiles.s + r * kKeyTile, tiles.dp + r * kKeyTile, padded(keys));
    }
  }
}

#define COTERIE_INSTANTIATE(T)                                                                    \
  template struct Tiles<T>;                                                                       \
  template void forward_tile(const Segment<T>&, std::int64_t, std::int64_t, Tiles<T>&,            \
                             const TileHook<T>*);                                                 \
  template void backward_query_tile(const Segment<T>&, const RowGradients<T>&, std::int64_t,      \
                                    std::int64_t, Tiles<T>&, const TileHook<T>*);                 \
  template void backward_key_tile(const Segment<T>&, const RowGradients<T>&, std::int64_t,        \
                                  std::int64_t, Tiles<T>&, const TileHook<T>*, const QuerySums*); \
  template void add_to_queries(const Rows&, std::int64_t, std::int64_t, std::int64_t, Tiles<T>&); \
  template void delta_tile(const Segment<T>&, const RowGradients<T>&, std::int64_t, std::int64_t, \
                           Tiles<T>&);
COTERIE_INSTANTIATE(float)
COTERIE_INSTANTIATE(double)
#undef COTERIE_INSTANTIATE

}  // namespace coterie::cpu
