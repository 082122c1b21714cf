// SPDX-License-Identifier: MIT
// Tiles of queries that are sorted by cluster: one cluster per tile, one tile per thread block. A
// block finds its tile by binary search in the offsets; there is no list of tiles.
#pragma once

#include <cstdint>
#include <limits>

#include "core/call.h"
#include "cuda/launch/fail.h"
#include "cuda/prim/tensor.cuh"

namespace coterie::cuda {

// Rows [first, first + count) of the sorted order of an item's head; count 0: no tile here.
struct QueryTile {
  int item, cluster, first, count;
  ItemSpan span;
};

// The tiles of cluster c of item t have consecutive numbers, starting at
//   t * clusters + c + (rows of the tensor before its first one >> bits) for packed items, else
//   t * per_item + c + (rows of the item before its first one >> bits).
// A cluster of n rows has at most (n >> bits) + 1 tiles, so numbers never collide. A row of an item
// may be in per_row clusters; it then counts that often.
struct QueryTiles {
  int bits;                       // a tile has at most 1 << bits rows
  int clusters, items, per_item;  // per_item: numbers of an item, 0 for packed items
  int total;
  int per_row;

  __device__ int first_tile(const SequenceSpans& queries, int item) const {
    if (per_item > 0) return item * per_item;
    return item * clusters +
           (min(max(queries.cu_seqlens[item], 0), queries.rows) * per_row >> bits);
  }

  // Number of the first tile of a cluster that starts at `offset` of its item.
  __device__ int first_tile(int item, int cluster, const ItemSpan& span, int offset) const {
    return (per_item > 0 ? item * per_item + (offset >> bits)
                         : item * clusters + ((span.begin * per_row + offset) >> bits)) +
           cluster;
  }

  // Called by all lanes of a warp. `offsets` is (items, H, clusters + 1).
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
    const int before = per_item > 0 ? 0 : tile.span.begin * per_row;
    const int origin = per_item > 0 ? item * per_item : item * clusters;
    // The last cluster whose first tile is not after this one. A lane probes several places at
    // once: up to 256 clusters cost one memory latency.
    constexpr int kProbes = 8;
    const int lane = threadIdx.x % 32;
    for (int left = clusters; left > 1;) {
      const int step = (left + 32 * kProbes - 1) / (32 * kProbes);
      int start[kProbes], reached = 0;
#pragma unroll
      for (int i = 0; i < kProbes; ++i)
        start[i] = starts[min(tile.cluster + (32 * i + lane) * step, clusters)];
#pragma unroll
      for (int i = 0; i < kProbes; ++i) {
        const int place = (32 * i + lane) * step;
        const int first = origin + tile.cluster + place + ((before + start[i]) >> bits);
        reached += __popc(__ballot_sync(~0u, (place < left) & (first <= number)));
      }
      tile.cluster += step * max(reached - 1, 0);
      left = min(step, clusters - tile.cluster);
    }
    const int start = starts[tile.cluster], members = starts[tile.cluster + 1] - start;
    const int skipped = (number - origin - tile.cluster - ((before + start) >> bits)) << bits;
    tile.first = start + skipped;
    tile.count = min(max(members - skipped, 0), 1 << bits);
    return tile;
  }
};

// `rows` rows per batch entry; packed items share one entry.
inline QueryTiles query_tiles(bool packed, std::int64_t items, std::int64_t rows,
                              std::int64_t per_row, std::int64_t clusters, int bits) {
  const std::int64_t slots = rows * per_row, per_item = clusters + (slots >> bits) + 1;
  const std::int64_t total = packed ? items * clusters + (slots >> bits) + 1 : items * per_item;
  if (total > std::numeric_limits<int>::max())
    fail_more_than("lists", std::numeric_limits<int>::max(), "tiles of lists of a head", total);
  QueryTiles tiles;
  tiles.bits = bits;
  tiles.clusters = static_cast<int>(clusters);
  tiles.items = static_cast<int>(items);
  tiles.per_item = packed ? 0 : static_cast<int>(per_item);
  tiles.total = static_cast<int>(total);
  tiles.per_row = static_cast<int>(per_row);
  return tiles;
}

inline QueryTiles query_tiles(const AttentionCall& call, std::int64_t clusters, int bits) {
  return query_tiles(call.inputs.q_sequences.cu_seqlens.present(), call.num_items(), call.N, 1,
                     clusters, bits);
}

}  // namespace coterie::cuda
