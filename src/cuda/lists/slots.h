// SPDX-License-Identifier: MIT
// From slots of lists (lists.h) back to tokens: the slots of every token, ascending.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/arena.h"
#include "cuda/prim/tensor.cuh"

namespace coterie::cuda {

// The slots of one side, counted from the start of their block (item and head). If every token has
// exactly one slot, in a run, the index alone is enough: then there is no `slots`.
struct TokenSlots {
  SequenceSpans spans;
  int items, heads;
  int per_row;  // runs: slots per row; 0 for members
  union {
    std::int64_t block;           // members: slots of an item and head
    const std::int32_t* offsets;  // runs: (items, heads, lists + 1)
  };
  int lists;                    // each ascending
  const std::int32_t* index;    // the tokens of all slots, -1 for empty slots
  std::int32_t *first, *count;  // (B, heads, rows): a token's part of `slots`
  std::int32_t* slots;          // same layout as the index

  // First slot of an item and head within the call.
  __device__ std::int64_t start(int item, const ItemSpan& span, int head) const {
    if (per_row == 0) return (static_cast<std::int64_t>(item) * heads + head) * block;
    return ((static_cast<std::int64_t>(span.batch) * heads + head) * spans.rows + span.begin) *
           per_row;
  }
  __device__ std::int64_t row(const ItemSpan& span, int head, int token) const {
    return (static_cast<std::int64_t>(span.batch) * heads + head) * spans.rows + span.begin + token;
  }
};

// For an index (items, heads, block) of members, or (B, heads, rows * per_row) of runs with
// `offsets`; the other of `block` and `per_row` is 0. Memory comes from the arena.
TokenSlots make_token_slots(Arena& arena, const Sequences& sequences, std::int64_t batches,
                            std::int64_t rows, std::int64_t heads, const std::int32_t* index,
                            std::int64_t block, std::int64_t per_row, std::int64_t lists,
                            const std::int32_t* offsets = nullptr);

// The same for runs with one slot per token; needs no memory and no filling.
TokenSlots make_single_slots(const Sequences& sequences, std::int64_t batches, std::int64_t rows,
                             std::int64_t heads, const std::int32_t* index);

// Fills first, count and slots, of two sides if there is a second; with an arena that only counts,
// nothing is launched. Do not use `early` after a cooperative kernel: blocks that start while it
// holds the shared memory are spread unevenly, which costs 10 of 140 us after select_top. slots.cu
void find_token_slots(const TokenSlots& tokens, const Arena& arena, cudaStream_t stream,
                      const TokenSlots* second = nullptr, bool early = true);

// Number of entries of an ascending list, padded with -1, that are at most `most`.
__device__ __forceinline__ int entries_up_to(const std::int32_t* list, int width, int most) {
  if (most < 0) return 0;
  int first = 0;
  for (int count = width; count > 0;) {
    const int half = count / 2;
    const bool in = static_cast<unsigned>(list[first + half]) <= static_cast<unsigned>(most);
    first += in ? half + 1 : 0;
    count = in ? count - half - 1 : half;
  }
  return first;
}

}  // namespace coterie::cuda
