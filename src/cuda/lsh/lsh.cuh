// SPDX-License-Identifier: MIT
// A token of LSH attention and its slots in every round (lsh.h).
#pragma once

#include <cstdint>

#include "cuda/lsh/lsh.h"
#include "cuda/prim/tensor.cuh"

namespace coterie::cuda {

struct LshTokens {
  SequenceSpans spans;
  int items, H, rounds, chunk;
  bool wraps;
  const std::int32_t* slots;  // (B, H, R, N)
};

inline LshTokens lsh_tokens(const AttentionCall& call, const LshLists& lists) {
  return {item_spans(call.inputs).q,
          static_cast<int>(call.num_items()),
          static_cast<int>(call.H),
          lists.rounds,
          lists.chunk,
          lists.wraps,
          lists.slots};
}

// Places of a token in arrays by slot; -1: none.
struct LshPlaces {
  std::int64_t band;         // its slot in the band
  std::int64_t first, last;  // in the wrap, as a query of the first chunk and as a key of the last
};

// Token `row` of a batch entry and head.
struct LshToken {
  int batch, head, row;
  int item;  // -1 in the padding
  ItemSpan span;

  __device__ LshToken(const LshTokens& tokens, int b, int h, int r)
      : batch(b), head(h), row(r), item(tokens.spans.item_of(b, r, tokens.items)), span{} {
    if (item >= 0) span = tokens.spans.span(item);
  }
  __device__ LshPlaces places(const LshTokens& tokens, int round) const {
    const std::int64_t base =
        ((static_cast<std::int64_t>(batch) * tokens.H + head) * tokens.rounds + round) *
        tokens.spans.rows;
    const int slot = tokens.slots[base + row], size = tokens.chunk;
    LshPlaces places{base + span.begin + slot, -1, -1};
    const int last = (span.length - 1) / size * size;  // first slot of the last chunk
    if (!tokens.wraps || last == 0) return places;
    const std::int64_t wrap =
        ((static_cast<std::int64_t>(item) * tokens.H + head) * tokens.rounds + round) * size;
    if (slot < size) places.first = wrap + slot;
    if (slot >= last) places.last = wrap + slot - last;
    return places;
  }
};

}  // namespace coterie::cuda
