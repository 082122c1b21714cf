// SPDX-License-Identifier: MIT
// Strict routing, from slots of runs back to tokens: one softmax over several clusters and the own
// key; and the gradient of the logits' factor.
#pragma once

#include <cuda_runtime.h>

#include "core/call.h"
#include "cuda/lists/lists.h"
#include "cuda/routing/slot_tokens.h"

namespace coterie::cuda {

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

// dlogit_scale (H): for every head the sum over its rows of q . dq, divided by its factor.
void logit_scale_gradient(const AttentionCall& call, const float* products, const float* head_scale,
                          const TensorView& dlogit_scale, cudaStream_t stream);

// Copies the factors of the logits (H); in place of 0 a number so small that no weight changes, for
// their own gradient divides by them.
void nonzero_scale(const AttentionCall& call, float* scale, cudaStream_t stream);

}  // namespace coterie::cuda
