// SPDX-License-Identifier: MIT
// From slots of lists (lists.h) back to tokens: the slots of every token, ascending.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/arena.h"
#include "cuda/prim/tensor.cuh"

namespace coterie::cuda {

// The slots of one side. Slots are counted from the start of their block, that of an item and head.
// Where every token has one slot, a run's, the index alone will do: then there is no `slots`.
struct TokenSlots {
  SequenceSpans spans;
  int items, heads;
  int per_row;                  // runs: slots of a row; 0 for members
  std::int64_t block;           // members: slots of an item and head
  int lists;                    // members: their number, where each ascends; else 0
  const std::int32_t* index;    // the tokens of all slots, -1 where there is none
  std::int32_t *first, *count;  // (B, heads, rows): a token's part of `slots`
  std::int32_t* slots;          // laid out as the index

  // First slot of an item and head over the call.
  __device__ std::int64_t start(int item, const ItemSpan& span, int head) const {
    if (per_row == 0) return (static_cast<std::int64_t>(item) * heads + head) * block;
    return ((static_cast<std::int64_t>(span.batch) * heads + head) * spans.rows + span.begin) *
           per_row;
  }
  __device__ std::int64_t row(const ItemSpan& span, int head, int token) const {
    return (static_cast<std::int64_t>(span.batch) * heads + head) * spans.rows + span.begin + token;
  }
};

// For an index (items, heads, block) of members, or (B, heads, rows * per_row) of runs; the other
// of `block` and `per_row` is 0. `lists` may be 0. Memory comes from the arena.
TokenSlots make_token_slots(Arena& arena, const Sequences& sequences, std::int64_t batches,
                            std::int64_t rows, std::int64_t heads, const std::int32_t* index,
                            std::int64_t block, std::int64_t per_row, std::int64_t lists = 0);

// The same for runs of one slot a token, without memory and nothing to fill.
TokenSlots make_single_slots(const Sequences& sequences, std::int64_t batches, std::int64_t rows,
                             std::int64_t heads, const std::int32_t* index);

// What follows from member lists, by query slot: ends (of the causal form with separate keys) are
// the keys of the list that are not after the query; bit 0 of a flag says that a query sees more
// than one key. Both may be null. routing/member_ends.cu, member_ends.cuh
struct MemberEnds {
  ItemSpans spans;
  bool causal;
  int items, heads, group, clusters, q_width, k_width;
  const std::int32_t *q_members, *k_members;
  std::int32_t* ends;
  std::uint8_t* flags;

  bool wanted() const { return ends || flags; }
};

// Fills first, count and slots, of two sides where there is a second one; with an arena that only
// counts nothing is launched. Whether `ends`, those of the first side, are found as well.
bool find_token_slots(const TokenSlots& tokens, std::int64_t batches, Arena& arena,
                      cudaStream_t stream, const TokenSlots* second = nullptr,
                      const MemberEnds& ends = {});

// The part of it that lists which ascend take, of sequences that are not packed; whether it did.
// member_slots.cu
bool find_member_slots(const TokenSlots& tokens, const TokenSlots* second, const MemberEnds& ends,
                       Arena& arena, cudaStream_t stream);

}  // namespace coterie::cuda
