// SPDX-License-Identifier: MIT
// Attention of a list of queries over a list of keys: the engine that every mechanism uses.
//
// Full, local, strided, banded, shared-list and member attention differ only in their lists and in
// which ranks of the key list a query may see. The engine walks tiles of kQueryTile queries and
// kKeyTile keys, keeps a running maximum and sum per row, and never stores more than one tile of
// scores. Key tiles are aligned to the start of the list, so the order of a row's sums depends on
// its own keys only.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "core/arena.h"
#include "core/parallel.h"
#include "cpu/engine/rows.h"
#include "cpu/kernels/kernels.h"

namespace coterie::cpu {

constexpr std::int64_t kQueryTile = 96;  // a multiple of every kernel's row tile
constexpr std::int64_t kKeyTile = 128;

struct Range {
  std::int64_t begin = 0, end = 0;
};

// Which key ranks the queries of a list may see.
template <class T>
struct Rule {
  // Writes the range of query ranks first .. first+count-1.
  std::function<void(std::int64_t first, std::int64_t count, Range* ranges)> ranges;
  // Optional: sets scores of other keys that query rank `query` may not see to -inf; scores[t]
  // belongs to key rank begin + t.
  std::function<void(std::int64_t query, std::int64_t begin, std::int64_t count, T* scores)> filter;
  // Optional: query ranks that may see any of the keys [begin, end); if absent, all ranks.
  std::function<Range(std::int64_t begin, std::int64_t end)> queries;
};

// How scores become weights: softmax over the row, or elementwise without normalisation (CAST),
//   laplace(x) = (1 + erf((x - mu) / (sigma sqrt 2))) / 2,  mu = sqrt(1/2), sigma = sqrt(1/(4 pi)).
// Laplace has no log-sum-exps: Tiles::lse is not written, RowGradients::lse and ::delta not read.
enum class Weighting : std::uint8_t { softmax, laplace };

// Dropout of a segment's weights: the numbers of its queries, or of the clusters whose means they
// are, and of its keys.
struct SegmentDropout {
  const Dropout* dropout = nullptr;  // null: none
  std::int64_t problem = 0;
  RowList queries, keys;
  bool clusters = false;

  // Multiplies row[0..count), which belong to query rank `query` and key ranks from `begin` on.
  template <class T>
  void apply(std::int64_t query, std::int64_t begin, std::int64_t count, T* row) const {
    const std::int64_t number = queries.row(query);
    const DropoutRow words =
        clusters ? dropout->cluster(problem, number) : dropout->query(problem, number);
    kernels<T>().row_drop(row, count,
                          {words, dropout->threshold, keys.index ? keys.index + begin : nullptr,
                           keys.first + begin * keys.step, keys.step},
                          static_cast<T>(dropout->keep_scale));
  }
};

// Of attention over rows that are numbered from 0 on in their item.
SegmentDropout dropout_of(const AttentionCall& call, std::int64_t item, std::int64_t head,
                          const RowList& queries, const RowList& keys);
// The same of means of clusters; query rank c is cluster c.
SegmentDropout cluster_dropout_of(const AttentionCall& call, std::int64_t item, std::int64_t head,
                                  const RowList& clusters, const RowList& keys);

template <class T>
struct Segment {
  Rows q, k, v;
  std::int64_t num_queries = 0, num_keys = 0;
  T scale = 1;  // of the logits
  Rule<T> rule;
  Weighting weighting = Weighting::softmax;
  // Weights may be rounded to bf16 for the product with bf16 values. Must be false if the backward
  // pass takes differences with the output.
  bool round_weights = false;
  SegmentDropout dropout;
};

// Backward inputs of query rank t: its output gradient, times weight[slot], and lse[slot] and
// delta[slot] = gradient . output, with slot = index[t] or t * step.
template <class T>
struct RowGradients {
  Rows gradient;
  const T* weight = nullptr;  // optional
  const T* lse = nullptr;
  const T* delta = nullptr;
  const std::int32_t* index = nullptr;
  std::int64_t step = 1;
};

// Called between the exponentials and the products of a tile; lets centroid attention handle its
// top keys separately. Absent for all other mechanisms.
template <class T>
struct TileHook {
  // Forward: p[t] = exp(score - running maximum) of key rank begin + t is already in the row's sum.
  // `rescale` is the factor that was applied to earlier sums of the row. Dropout comes after it.
  std::function<void(std::int64_t row, std::int64_t query, std::int64_t begin, std::int64_t count,
                     T rescale, T* p)>
      forward;
  // Backward: may change dp, and sets entries of p_for_v that add nothing to value gradients to 0.
  // Both have been through dropout.
  std::function<void(std::int64_t query, std::int64_t begin, std::int64_t count, T* p_for_v, T* dp)>
      backward;
};

// Operands of bf16 products (kernels/kernels.h: PairProduct).
struct PairTiles {
  std::uint32_t *q, *g, *p;              // kQueryTile rows
  std::uint32_t *k_columns, *v_columns;  // transposed, as in Tiles
  std::uint32_t* v;                      // pairs of keys x value_row
};

// One worker's tiles, sized for rows of up to `key_width` and `value_width` elements.
template <class T>
struct Tiles {
  std::int64_t key_row = 0, value_row = 0;  // padded widths
  T *q, *g, *o, *dq;                        // kQueryTile rows
  T *k, *v;                                 // kKeyTile rows
  T *k_columns, *v_columns;                 // transposed: width x padded(keys of the tile)
  T *dk, *dv;                               // kKeyTile rows
  T *s, *dp, *p_for_v;                      // kQueryTile x kKeyTile
  PairTiles pairs;                          // if T is float
  T *max, *sum, *rescale, *lse, *delta;     // kQueryTile
  Range* ranges;                            // kQueryTile

  Tiles(Arena& arena, std::int64_t key_width, std::int64_t value_width);
};

// Tiles for every thread.
template <class T>
std::vector<Tiles<T>> make_tiles(Arena& arena, std::int64_t key_width, std::int64_t value_width) {
  std::vector<Tiles<T>> tiles;
  for (int worker = 0; worker < call_threads(); ++worker)
    tiles.emplace_back(arena, key_width, value_width);
  return tiles;
}

// Computes queries [first, first + count) of the segment, count <= kQueryTile. Writes normalised
// outputs to tiles.o and log-sum-exps to tiles.lse.
template <class T>
void forward_tile(const Segment<T>& segment, std::int64_t first, std::int64_t count,
                  Tiles<T>& tiles, const TileHook<T>* hook = nullptr);

// Writes the gradients of queries [first, first + count) to tiles.dq.
template <class T>
void backward_query_tile(const Segment<T>& segment, const RowGradients<T>& rows, std::int64_t first,
                         std::int64_t count, Tiles<T>& tiles, const TileHook<T>* hook = nullptr);

// Adds the current keys' part of the gradients of queries [first, first + count) to their sums with
// add_to_queries: tiles.dp times tiles.k, which includes the scale.
using QuerySums = std::function<void(std::int64_t first, std::int64_t count)>;

// Adds the gradients of keys [first, first + count), count <= kKeyTile and first a multiple of
// kKeyTile, to tiles.dk and tiles.dv; the caller clears them and calls this for every query head
// that shares the keys. With `sums` the gradients of queries are computed here instead of in
// backward_query_tile, which saves two of seven products.
template <class T>
void backward_key_tile(const Segment<T>& segment, const RowGradients<T>& rows, std::int64_t first,
                       std::int64_t count, Tiles<T>& tiles, const TileHook<T>* hook = nullptr,
                       const QuerySums* sums = nullptr);

// rows [first, first + count) += tiles.dp (count x keys) times tiles.k. The rows are of type T.
template <class T>
void add_to_queries(const Rows& rows, std::int64_t first, std::int64_t count, std::int64_t keys,
                    Tiles<T>& tiles);

// Writes delta = sum over keys of p (gradient . v) for queries [first, first + count) to
// tiles.delta; for queries whose outputs were not kept.
template <class T>
void delta_tile(const Segment<T>& segment, const RowGradients<T>& rows, std::int64_t first,
                std::int64_t count, Tiles<T>& tiles);

}  // namespace coterie::cpu
