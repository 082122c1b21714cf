// SPDX-License-Identifier: MIT
// LSH attention on the GPU: the plan of a call, its stages, and tokens as kernels see them.
//
// A round is one list (lists/lists.h) of all tokens of an item in the order of their buckets, split
// into chunks. A chunk sees itself and the one before it: a band of the list. With combine=lse the
// first chunk also sees the last one, through separate lists (the "wrap"). "Slots" are places in a
// round's list, counted from the start of the item.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/arena.h"
#include "core/call.h"
#include "coterie/inputs.h"
#include "coterie/params.h"
#include "cuda/lists/lists.h"
#include "cuda/prim/tensor.cuh"

namespace coterie::cuda {

struct LshTokens {
  SequenceSpans spans;
  int items, H, rounds, chunk;  // chunk: at most N
  bool wraps;                   // an item may have two chunks, and the first sees the last
  std::int32_t* slots;          // (B, H, R, N): the slot of every token
};

// What an order implies, and where the results are stored.
struct LshPlan {
  LshTokens tokens;
  bool merges;  // combine=lse: rounds are one softmax, own keys are dropped
  float round_weight;
  std::int64_t band_slots, wrap_slots;  // rows of arrays by slot
  RowStatistics* norms = nullptr;       // (B, H, N): mean 0, 1 / |q| or 0 for a zero row
  std::uint8_t* drop_own = nullptr;     // (B, H, N): another key is visible in some round
  std::int32_t* wrap_first = nullptr;   // (items, H, R, chunk): the first chunk, if there is
  std::int32_t* wrap_last = nullptr;    // a second one, and the last; -1 beyond
  ListCall band, wrap;

  LshPlan(const LshParams& params, const AttentionCall& call, const TensorView& order,
          Arena& arena);
};

// With an arena that only counts, the stages launch nothing.

// Fills order (B, H, R, N): the tokens by (bucket, position), -1 in padding. select.cu
void lsh_select(const LshParams& params, const AttentionCall& call, const TensorView& order,
                Arena& arena, cudaStream_t stream);
// Fills the arrays of a plan. lists.cu
void lsh_find_lists(const LshPlan& plan, const AttentionCall& call, const TensorView& order,
                    cudaStream_t stream);
// Gradients with respect to q, which serves as queries and keys, and v. backward.cu
struct LshBackward {
  TensorView order, lse, grad_out;
  AttentionGradients gradients;
};
void lsh_backward(const LshParams& params, const AttentionCall& call, const LshBackward& pass,
                  Arena& arena, cudaStream_t stream);

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

// A thread or a group of lanes per token of `heads` heads, `each` a block: y = head, z = batch.
inline dim3 lsh_token_grid(const AttentionCall& call, std::int64_t each, std::int64_t heads) {
  return {static_cast<unsigned>((call.N + each - 1) / each), static_cast<unsigned>(heads),
          static_cast<unsigned>(call.B)};
}

}  // namespace coterie::cuda
