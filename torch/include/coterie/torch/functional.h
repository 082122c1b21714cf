// SPDX-License-Identifier: MIT
// Attention by any mechanism on torch tensors, differentiable by torch's autograd.
//
// The contract is that of coterie/attention.h, on the device of q (CPU, or CUDA on its current
// stream, without synchronisation). Inputs may have any strides; those whose last dimension is not
// contiguous are copied. The backward pass works on the selection of the forward pass, and a
// forward pass that is repeated (activation checkpointing) selects the same. Derivatives are of
// first order. Errors of the core pass through as coterie::Error.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "coterie/mechanism.h"

namespace coterie::torch_api {

// What a head group takes besides q, k and v.
struct GroupState {
  at::Tensor centroids{};    // routing: (Hkv, C, Dk), constants; cast: surrogate tokens (H, C, Dk)
  at::Tensor gate{};         // cast: gate logits (B, N)
  at::Tensor logit_scale{};  // routing, optional: (H) factors of the logits
};

// What attention takes besides q, k and v; undefined tensors are absent. ({}: designated
// initialisers may leave members out without a warning.)
struct AttentionOptions {
  at::Tensor q_lengths{}, k_lengths{};        // (B) integers: rows of each batch entry that count
  at::Tensor cu_seqlens_q{}, cu_seqlens_k{};  // (items+1) integers, B = 1: packed sequences
  at::Tensor mask{};                          // bool, broadcast to (B, H, N, S): true = may attend
  at::Tensor centroids{}, gate{}, logit_scale{};  // as GroupState, for specs of one head group
  std::vector<GroupState> state{};                // for specs of several: one per group
  double scale = 0.0;  // factor of the logits; 0 = 1/sqrt(Dk), for routing 1
  bool causal = false;
  std::uint64_t seed = 0;
};

// q (B, H, N, Dk), k (B, Hkv, S, Dk), v (B, Hkv, S, Dv) give (B, H, N, Dv), laid out in memory as q
// is, heads before tokens or tokens before heads. Head groups of the spec take consecutive heads of
// q and their share of the heads of k and v. k has no heads for groups whose keys are the queries
// (lsh, and routing with share_qk), and is undefined where all are. Gradients flow to q, k, v,
// gate, logit_scale and the centroids of cast.
at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     std::string_view spec, const AttentionOptions& options = {});
// By the parameters of one mechanism.
at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const Mechanism& mechanism, const AttentionOptions& options = {});

struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

// The output and what the forward pass kept (attention_saved has names and shapes): first the
// selection, of int32, then log-sum-exps and their like. No gradients flow through these.
struct AttentionDetails {
  at::Tensor out;
  std::vector<NamedTensor> saved;
  std::size_t selection_count = 0;

  // Throws Error, naming what there is, when there is no such tensor.
  const at::Tensor& get(const std::string& name) const;
};
AttentionDetails attention_details(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                   const Mechanism& mechanism,
                                   const AttentionOptions& options = {});

}  // namespace coterie::torch_api
