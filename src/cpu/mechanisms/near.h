// SPDX-License-Identifier: MIT
// Clustered attention with exact near keys. Positions are cut in blocks; the near keys of a query
// are those of its own block and the two beside it. With c the query's cluster, T_c its top keys
// (none in plain clustered attention), s the logits of the query and z those of the mean:
//   w_j = exp(s_j) if j is near or in T_c, else exp(z_cj)      out = sum w_j v_j / sum w_j
//
// The sum over far keys is that of the blocks before the near ones and of those after them, so
// nothing is subtracted. In the backward pass the same holds for sums over the members of a cluster
// that are far from a block of keys.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <vector>

#include "cpu/mechanisms/centroid_attention.h"

namespace coterie::cpu {

struct NearTensors {
  ClusterLists lists;    // keys absent in plain clustered attention
  TensorView labels;     // (B, H, N)
  TensorView centroids;  // (items, H, C, Dk)
  TensorView lse;        // (B, H, N)

  bool listed() const { return lists.keys.present(); }
};

// The blocks of an item's positions.
struct Blocks {
  std::int64_t width, rows;

  std::int64_t count() const { return (rows + width - 1) / width; }
  std::int64_t of(std::int64_t row) const { return row / width; }
  // Rows of blocks [first, end).
  Range span(std::int64_t first, std::int64_t end) const {
    return {std::clamp<std::int64_t>(first, 0, count()) * width,
            std::min(std::clamp<std::int64_t>(end, 0, count()) * width, rows)};
  }
  // Rows that are near any of the rows [begin, end).
  Range near(const Range& of_rows) const {
    return span(of(of_rows.begin) - 1, of(of_rows.end - 1) + 2);
  }
  // Which of the keys are near a row, counted from the first of them.
  Range near_columns(std::int64_t row, const Range& keys) const {
    const Range seen = near({row, row + 1});
    return {std::clamp(seen.begin, keys.begin, keys.end) - keys.begin,
            std::clamp(seen.end, keys.begin, keys.end) - keys.begin};
  }
  // Blocks whose queries are computed together: at least 32 rows.
  std::int64_t together() const { return std::max<std::int64_t>(1, 32 / width); }
};

// Attention sums of kQueryTile rows relative to their maxima: sum of exp(score - max), and of that
// times the values.
template <class T>
struct Sums {
  T *max = nullptr, *sum = nullptr, *out = nullptr;
};

// Per-thread memory of the far keys' sums.
template <class T>
struct FarTiles {
  std::vector<Sums<T>> cells;          // of the blocks of a chunk
  std::vector<Sums<T>> totals, tails;  // of chunks: all of their blocks; all but the first
  Sums<T> before, after, beyond, beyond_next;
  std::int64_t* listed = nullptr;        // kQueryTile positions in lists of top keys
  T* gradients = nullptr;                // blocks of a key tile x kQueryTile x value_row
  T *shift = nullptr, *delta = nullptr;  // blocks of a key tile x kQueryTile

  FarTiles(Arena& arena, const AttentionCall& call, std::int64_t near);
};

// Per-thread memory of near rows. Backward pass: up to kNearRows queries around a tile of keys.
// Forward pass: columns of up to kNearRows keys in q, their values in g.
constexpr std::int64_t kNearRows = 384;
template <class T>
struct NearTiles {
  T *q, *g, *dq;   // kNearRows rows
  T *lse, *delta;  // kNearRows

  NearTiles(Arena& arena, const AttentionCall& call);
};

// Sums over the members of a cluster in the chunks before, or after, one chunk of rows: of
// exp(shift - lse_i) times the output gradient and its delta. shift is the smallest lse.
template <class T>
struct MemberSums {
  std::int64_t chunk = 0;       // rows, a multiple of the block width
  std::int64_t chunks = 0;      // of the longest item
  T *gradient, *delta, *shift;  // (items, H, chunks, C, Dv or 1)
};

// Starts to fetch a row that is needed soon: those of a cluster's members are far apart in memory.
template <class T>
void prefetch_row(const T* row, std::int64_t width) {
  for (std::int64_t d = 0; d < width; d += 64 / static_cast<std::int64_t>(sizeof(T)))
    __builtin_prefetch(row + d);
}

struct NearSizes {
  std::int64_t near, clusters, topk = 0;
};

template <class T>
struct NearWorkspace {
  ListWorkspace<T> lists;
  std::vector<FarTiles<T>> far;
  std::vector<NearTiles<T>> near;
  T *out, *max, *sum;  // (B, H, N, Dv or 1): sums of queries
  // Backward pass
  MemberSums<T> before, after;
  T* dq;              // (B, H, N, Dk): of near keys
  T* dmean;           // (items, H, C, Dk)
  KeySlots<T> slots;  // of top keys

  NearWorkspace(Arena& arena, const AttentionCall& call, const NearSizes& sizes);
};

// Called with the finished rows of a tile of queries: tiles.o and tiles.lse of rows [tile.first,
// tile.first + tile.count) of the item.
template <class T>
using FinishRows = std::function<void(const RowTile& tile, Tiles<T>& tiles)>;

// Outputs of all queries, from the centroids.
template <class T>
void near_rows(const AttentionCall& call, std::int64_t near, const NearTensors& tensors,
               NearWorkspace<T>& workspace, const FinishRows<T>& finish);

// The forward pass after the selection: centroids, lse and out.
template <class T>
void near_forward(const AttentionCall& call, std::int64_t near, const NearTensors& tensors,
                  const TensorView& out, NearWorkspace<T>& workspace);

template <class T>
void near_backward(const AttentionCall& call, std::int64_t near, const NearTensors& tensors,
                   const ListGradients& gradients, NearWorkspace<T>& workspace);

// Queries of each cluster over its top keys that are not near.
template <class T>
ListCall<T> near_top_plan(const AttentionCall& call, std::int64_t near, const ClusterLists& lists);

}  // namespace coterie::cpu
