// SPDX-License-Identifier: MIT
// Chunks of the keys (or rows) of an item, one per thread block. Only the device knows how many
// chunks an item has; slots number the chunks without a scan, and partial results are kept by slot.
#pragma once

#include <cstdint>

#include "core/call.h"
#include "cuda/prim/tensor.cuh"

namespace coterie::cuda {

// One chunk of an item: rows [begin, end) counted from its first.
struct ItemChunk {
  int item;
  int split;  // number of the chunk in its item
  ItemSpan span;
  int begin, end;
};

// Slot of chunk s of item t: t * per_item + s, or for packed items (first key) / chunk + t + s,
// which is distinct for all chunks because an item of n keys has at most n / chunk + 1 of them.
struct ItemChunks {
  int chunk;     // keys in a chunk, a multiple of the key tiles
  int per_item;  // slots of an item; 0 for packed items
  int items;
  int slots;  // in all

  __host__ __device__ int count(int keys) const { return (keys + chunk - 1) / chunk; }

  __device__ int first_slot(const SequenceSpans& keys, int item) const {
    if (per_item > 0) return item * per_item;
    return min(max(keys.cu_seqlens[item], 0), keys.rows) / chunk + item;
  }

  // The chunk of a slot; an empty one when the slot is not used.
  __device__ ItemChunk find(const SequenceSpans& keys, int slot) const {
    int item = 0;
    if (per_item > 0) {
      item = slot / per_item;
    } else {
      int high = items;  // the last item whose first slot is not after this one
      while (high - item > 1) {
        const int middle = (item + high) / 2;
        if (first_slot(keys, middle) <= slot)
          item = middle;
        else
          high = middle;
      }
    }
    ItemChunk found{item, slot - first_slot(keys, item), keys.span(item), 0, 0};
    const std::int64_t begin = static_cast<std::int64_t>(found.split) * chunk;
    found.begin = static_cast<int>(min(begin, static_cast<std::int64_t>(found.span.length)));
    found.end = min(found.begin + chunk, found.span.length);
    return found;
  }
};

// Tiles of `rows` rows, each of one item.
inline ItemChunks row_tiles(const SequenceSpans& spans, int items, int rows) {
  const int per_item = (spans.rows + rows - 1) / rows;
  if (spans.cu_seqlens) return {rows, 0, items, items + spans.rows / rows};
  return {rows, per_item, items, items * per_item};
}

// Cuts the keys so that `rows` row tiles per item keep `blocks` resident thread blocks busy:
// minimises waves x (keys of a chunk + a block's overhead, in keys).
inline ItemChunks key_chunks(const AttentionCall& call, std::int64_t rows, std::int64_t blocks) {
  constexpr std::int64_t kStep = 128, kOverhead = 256, kMost = 256;
  const std::int64_t keys = max(call.S, std::int64_t{1}),
                     tiles = max(rows * call.B, std::int64_t{1});
  const std::int64_t most = min((keys + kStep - 1) / kStep, kMost);
  std::int64_t best = 0, least = 0;
  for (std::int64_t splits = 1; splits <= most; ++splits) {
    const std::int64_t waves = (tiles * splits + blocks - 1) / blocks;
    splits = min(max(waves * blocks / tiles, splits), most);  // as many as fit into the waves
    const std::int64_t length = ((keys + splits - 1) / splits + kStep - 1) / kStep * kStep;
    const std::int64_t time = (tiles * splits + blocks - 1) / blocks * (length + kOverhead);
    if (best == 0 || time < least) {
      best = length;
      least = time;
    }
  }
  return row_tiles(sequence_spans(call.inputs.k_sequences, keys),
                   static_cast<int>(call.num_items()), static_cast<int>(best));
}

}  // namespace coterie::cuda
