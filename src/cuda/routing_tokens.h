// SPDX-License-Identifier: MIT
// From slots of routing's lists back to tokens: outputs that add up or share one softmax, gradients
// that add up, and the way back through the normalisation of rows.
#pragma once

#include <cuda_runtime.h>

#include "core/arena.h"
#include "core/call.h"
#include "cuda/lists.h"
#include "cuda/slots.h"

namespace coterie::cuda {

// Rows of floats by slot, which tokens add up.
struct SlotRows {
  TokenSlots tokens;
  const float* values = nullptr;  // (slots, width); null: none
};

// A token's factor of the rows of its slots: 1 / (their number + eps), or 1.
struct SlotWeight {
  bool mean;
  float eps;
};

// out (B, H, N, Dv) = weight * sum of the slots' rows, 0 in padding.
void combine_slots(const AttentionCall& call, const SlotRows& slots, const SlotWeight& weight,
                   const TensorView& out, cudaStream_t stream);
// weights (B, H, N) of the tokens.
void slot_weights(const AttentionCall& call, const TokenSlots& slots, const SlotWeight& weight,
                  float* weights, cudaStream_t stream);

// What strict routing knows of a query whose own key counts apart (include_self).
struct OwnKeys {
  const std::uint8_t* flags = nullptr;         // (B, H, N), see kAddOwnKey; null: no own keys
  float *weight = nullptr, *dlogit = nullptr;  // (B, H, N), backward: softmax weight of the own
                                               // key, and the gradient of its logit times the scale
  const RowStatistics *q_stats = nullptr, *k_stats = nullptr;
  float scale = 1.0f;
  const float* head_scale = nullptr;
};

// out (B, H, N, Dv) and lse (B, H, N): one softmax over a query's slots and its own key.
void merge_slots(const AttentionCall& call, const SlotRows& slots, const float* slot_lse,
                 const OwnKeys& own, const TensorView& out, float* lse, cudaStream_t stream);

// delta (B, H, N) = sum of the parts by slot and of the own key's; own.weight and own.dlogit.
void merge_deltas(const AttentionCall& call, const TokenSlots& slots, const float* parts,
                  const float* lse, const TensorView& grad_out, const OwnKeys& own, float* delta,
                  cudaStream_t stream);

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
  double* products = nullptr;  // optional: sums of gradient . normalised row, see take_products
};
void token_gradients(const AttentionCall& call, const TokenGradient& gradient, cudaStream_t stream);

// Room for the sums behind dlogit_scale, and dlogit_scale (H) from them: for every head the sum
// over its rows of q . dq, divided by its factor.
double* take_products(Arena& arena, const AttentionCall& call);
void logit_scale_gradient(const AttentionCall& call, const double* products,
                          const float* head_scale, const TensorView& dlogit_scale,
                          cudaStream_t stream);

// Copies the factors of the logits (H); in place of 0 a number so small that no weight changes, for
// their own gradient divides by them.
void nonzero_scale(const AttentionCall& call, float* scale, cudaStream_t stream);

}  // namespace coterie::cuda
