// SPDX-License-Identifier: MIT
// From slots of routing's lists back to tokens: outputs and gradients that add up, and the way back
// through the normalisation of rows.
#pragma once

#include <cuda_runtime.h>

#include <vector>

#include "core/call.h"
#include "cuda/lists/lists.h"
#include "cuda/lists/slots.h"

namespace coterie::cuda {

// Rows by slot, which tokens add up.
struct SlotRows {
  TokenSlots tokens;
  const void* values = nullptr;  // (slots, width); null: none
  bool zeroed = false;           // what tokens without slots add up to is 0 already
};

// A token's factor of the rows of its slots: 1 / (their number + eps), or 1.
struct SlotWeight {
  bool mean;
  float eps;
};

// out (B, H, N, Dv) = weight * sum of the slots' rows of the inputs' type, 0 in padding; weights
// (B, H, N).
void combine_slots(const AttentionCall& call, const SlotRows& slots, const SlotWeight& weight,
                   const TensorView& out, float* weights, cudaStream_t stream);

// Gradients of the rows of one of q, k and v from those of slots.
struct TokenGradient {
  SlotRows first, second;                // added up; only `first` counts for dlogit_scale
  TensorView rows;                       // q or k, for the normalisation; absent: none (values)
  const RowStatistics* stats = nullptr;  // of the rows
  TensorView gradient;                   // absent: only the sums for dlogit_scale
  const float* own_factor = nullptr;     // optional (B, H, N): factors of the own keys' rows ...
  TensorView own_rows;                   // ... which these are
  SequenceSpans own_spans{};
  const RowStatistics* own_stats = nullptr;  // null: as they are
  float* products = nullptr;                 // optional (B, heads, rows): gradient . normalised row
};
// Up to three of them in one launch. With `rounded` slots are of the inputs' type, and nothing but
// sums of `first` is wanted, of as many heads as the gradient has; else they are floats.
void token_gradients(const AttentionCall& call, const std::vector<TokenGradient>& gradients,
                     bool rounded, cudaStream_t stream);

}  // namespace coterie::cuda
