// SPDX-License-Identifier: MIT
// Sorted queries cut in tiles of one cluster each, one per thread block, without a list of tiles.
#pragma once

#include <cstdint>

#include "core/call.h"
#include "cuda/device/problem.cuh"

namespace coterie::cuda {

// Rows [first, first + count) of the sorted order of an item's head; count 0: no tile here.
struct QueryTile {
  int item, cluster, first, count;
  ItemSpan span;
};

// The tiles of cluster c of item t have consecutive numbers from
//   t * clusters + c + (rows before its first one) / kRows (+ batch * room for one more)
// on. A cluster of n rows has at most n / kRows + 1 tiles, so numbers never meet.
template <int kRows>
struct QueryTiles {
  int clusters, items, per_item;  // per_item: numbers of an item, 0 for packed items
  int total;

  __device__ int first_tile(const SequenceSpans& queries, int item) const {
    if (per_item > 0) return item * per_item;
    return item * clusters + min(max(queries.cu_seqlens[item], 0), queries.rows) / kRows;
  }

  // By all lanes of a warp. `offsets` is (items, H, clusters + 1).
  __device__ QueryTile find(const SequenceSpans& queries, const std::int32_t* offsets, int heads,
                            int head, int number) const {
    int item = 0;
    if (per_item > 0) {
      item = number / per_item;
    } else {
      int high = items;
      while (high - item > 1) {
        const int middle = (item + high) / 2;
        (first_tile(queries, middle) <= number ? item : high) = middle;
      }
    }
    QueryTile tile{item, 0, 0, 0, queries.span(item)};
    const std::int32_t* starts =
        offsets + (static_cast<std::int64_t>(item) * heads + head) * (clusters + 1);
    // Packed rows are counted from the start of the tensor, others from that of the item.
    const int before = per_item > 0 ? 0 : tile.span.begin;
    const int origin = per_item > 0 ? item * per_item : item * clusters;
    const int lane = threadIdx.x % 32;
    for (int left = clusters;
         left > 1;) {  // the last cluster whose first tile is not after this one
      const int step = (left + 31) / 32, c = tile.cluster + lane * step;
      const bool reached =
          lane * step < left && origin + c + (before + starts[c]) / kRows <= number;
      tile.cluster += step * (31 - __clz(__ballot_sync(~0u, reached) | 1));
      left = min(step, clusters - tile.cluster);
    }
    const int start = starts[tile.cluster], size = starts[tile.cluster + 1] - start;
    const int skipped = (number - origin - tile.cluster - (before + start) / kRows) * kRows;
    tile.first = start + skipped;
    tile.count = min(max(size - skipped, 0), kRows);
    return tile;
  }
};

template <int kRows>
QueryTiles<kRows> query_tiles(const AttentionCall& call, std::int64_t clusters) {
  const bool packed = call.inputs.q_sequences.cu_seqlens.present();
  QueryTiles<kRows> tiles;
  tiles.clusters = static_cast<int>(clusters);
  tiles.items = static_cast<int>(call.num_items());
  tiles.per_item = packed ? 0 : static_cast<int>(clusters + call.N / kRows + 1);
  tiles.total = packed ? static_cast<int>(tiles.items * clusters + call.N / kRows + 1)
                       : tiles.items * tiles.per_item;
  return tiles;
}

}  // namespace coterie::cuda
