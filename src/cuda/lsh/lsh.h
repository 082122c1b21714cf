// SPDX-License-Identifier: MIT
// LSH attention on the GPU: the sorted orders of its rounds, and what they let queries see.
//
// A round is one list (lists/lists.h) of all tokens of an item in the order of their buckets, cut
// in chunks. A chunk sees itself and the one before it: a band of the list. With combine=lse the
// first chunk also sees the last one, by lists of their own (the "wrap").
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/arena.h"
#include "core/call.h"
#include "coterie/inputs.h"
#include "coterie/params.h"
#include "cuda/lists/lists.h"

namespace coterie::cuda {

// Fills order (B, H, R, N): the tokens by (bucket, position), -1 in padding. Scratch memory comes
// from the arena; with one that only counts nothing is launched. select.cu
void lsh_select(const LshParams& params, const AttentionCall& call, const TensorView& order,
                Arena& arena, cudaStream_t stream);

// What an order implies. "Slots" are places in a round's list, counted from the item.
struct LshLists {
  int rounds, chunk;  // chunk: at most N
  bool merges;        // combine=lse: own keys are dropped and the first chunk sees the last
  bool wraps;         // merges, and an item may have two chunks
  float round_weight;
  RowStatistics* norms = nullptr;      // (B, H, N): mean 0, 1 / |q| or 0 for a zero row
  std::int32_t* slots = nullptr;       // (B, H, R, N): the slot of every token
  std::uint8_t* drop_own = nullptr;    // (B, H, N): another key is in sight in some round
  std::int32_t* wrap_first = nullptr;  // (items, H, R, chunk): the first chunk, where there is a
  std::int32_t* wrap_last = nullptr;   // second one, and the last; -1 beyond

  LshLists(Arena& arena, const LshParams& params, const AttentionCall& call);
  // Rows of arrays by slot of the band, and of the wrap.
  std::int64_t band_slots(const AttentionCall& call) const;
  std::int64_t wrap_slots(const AttentionCall& call) const;
  ListCall band(const AttentionCall& call, const TensorView& order) const;
  ListCall wrap(const AttentionCall& call) const;
};

// Fills the arrays of `lists`. lists.cu
void find_lsh_lists(const AttentionCall& call, const LshLists& lists, const TensorView& order,
                    cudaStream_t stream);

// Gradients with respect to q, which are queries and keys, and v. With an arena that only counts
// nothing is launched. backward.cu
struct LshBackward {
  TensorView order, lse, grad_out;
  AttentionGradients gradients;
};
void lsh_backward(const LshParams& params, const AttentionCall& call, const LshBackward& pass,
                  Arena& arena, cudaStream_t stream);

}  // namespace coterie::cuda
