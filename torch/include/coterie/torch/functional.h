// SPDX-License-Identifier: MIT
// Attention by any mechanism on torch tensors, differentiable by torch's autograd.
//
// The contract is that of coterie/attention.h, on the device of q (CPU, or CUDA on its current
// stream, without synchronisation). Inputs may have any strides; those whose last dimension is not
// contiguous are copied. The backward pass reuses the selection of the forward pass, and a repeated
// forward pass (activation checkpointing) selects the same. Double backward is not supported.
// Errors of the core pass through as coterie::Error.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "coterie/mechanism.h"
#include "coterie/random.h"

namespace coterie::torch_api {

// Inputs of a head group besides q, k and v.
struct GroupState {
  at::Tensor centroids{};    // routing: (Hkv, C, Dk), constants; cast: surrogate tokens (H, C, Dk)
  at::Tensor gate{};         // cast: gate logits (B, N)
  at::Tensor logit_scale{};  // routing, optional: (H) factors of the logits
};

// Inputs of attention besides q, k and v; undefined tensors are absent. ({} lets designated
// initialisers leave members out without a warning.)
struct AttentionOptions {
  at::Tensor q_lengths{}, k_lengths{};        // (B) integers: valid rows of each batch entry
  at::Tensor cu_seqlens_q{}, cu_seqlens_k{};  // (items+1) integers, B = 1: packed sequences
  at::Tensor mask{};                          // bool, broadcast to (B, H, N, S): true = may attend
  at::Tensor centroids{}, gate{}, logit_scale{};  // as GroupState, for specs of one head group
  std::vector<GroupState> state{};                // one per group, for specs of several
  double scale = 0.0;  // factor of the logits; 0 = 1/sqrt(Dk), for routing 1
  bool causal = false;
  std::uint64_t seed = 0;          // of clusterings and hashes
  double dropout = 0.0;            // probability that a weight is dropped (docs/mechanisms.md)
  std::uint64_t dropout_seed = 0;  // of several head groups: group_seed(dropout_seed, 0, group)
  CallPart part{};                 // of a larger call, for random numbers
  std::vector<at::Tensor> selection{};  // of attention_select for one head group; empty: chosen
};

// Returns (B, H, N, Dv) for q (B, H, N, Dk), k (B, Hkv, S, Dk), v (B, Hkv, S, Dv), in the memory
// order of q: heads before tokens or tokens before heads. Head groups of the spec take consecutive
// heads of q and their share of the heads of k and v. k has no heads for groups whose keys are the
// queries (lsh, and routing with share_qk), and is undefined if all groups are such. Gradients flow
// to q, k, v, gate, logit_scale and the centroids of cast.
at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     std::string_view spec, const AttentionOptions& options = {});
// The same for one mechanism, given by its parameters.
at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const Mechanism& mechanism, const AttentionOptions& options = {});

// The selection that attention() would make (int32): of a call on all heads, for calls on some of
// them by mechanisms with selects_together. Of v only the shape counts.
std::vector<at::Tensor> attention_select(const at::Tensor& q, const at::Tensor& k,
                                         const at::Tensor& v, const Mechanism& mechanism,
                                         const AttentionOptions& options = {});

struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

// The output and the tensors that the forward pass saved (attention_saved lists names and shapes):
// first the selection (int32), then log-sum-exps and similar values. None has gradients.
struct AttentionDetails {
  at::Tensor out;
  std::vector<NamedTensor> saved;
  std::size_t selection_count = 0;

  // If there is no such tensor, throws Error with the names of all.
  const at::Tensor& get(const std::string& name) const;
};
AttentionDetails attention_details(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                   const Mechanism& mechanism,
                                   const AttentionOptions& options = {});

// The weights (B, H, N, S), f64, of full attention over the mechanism's logits (coterie/quality.h);
// for tensors on the CPU.
at::Tensor full_attention_weights(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                  const Mechanism& mechanism, const AttentionOptions& options = {});

}  // namespace coterie::torch_api
