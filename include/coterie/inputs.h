// SPDX-License-Identifier: MIT
// Inputs of an attention call, and the gradients with respect to them. coterie/result.h has the
// outputs, coterie/attention.h the calls.
#pragma once

#include <cstdint>

#include "coterie/random.h"
#include "coterie/view.h"

namespace coterie {

// Which rows of a (B, H, N, ...) tensor form a sequence (an "item"). Both absent: every batch entry
// is one item of length N. `lengths` int32 (B): the first lengths[b] rows of entry b. `cu_seqlens`
// int32 (items+1), B = 1: item t is rows [cu_seqlens[t], cu_seqlens[t+1]). At most one is given.
struct Sequences {
  ConstTensorView lengths;
  ConstTensorView cu_seqlens;
};

// Query head h reads key/value head h / (H / Hkv). The last dimension must be contiguous. With
// `causal`, query i of an item is at key position i + (key length - query length).
struct AttentionInputs {
  ConstTensorView q;  // (B, H, N, Dk)
  ConstTensorView k;  // (B, Hkv, S, Dk); absent or equal to q for lsh and routing with share_qk
  ConstTensorView v;  // (B, Hkv, S, Dv)
  Sequences q_sequences;
  Sequences k_sequences;
  ConstTensorView mask;         // u8 (B, H, N, S), stride 0 to broadcast: nonzero = may attend;
                                // full, local, strided and oracle-top only
  ConstTensorView centroids;    // routing: (Hkv, C, Dk); cast: surrogate tokens (H, C, Dk)
  ConstTensorView gate;         // cast: gate logits (B, N)
  ConstTensorView logit_scale;  // routing, optional: (H) factors of the logits
  double scale = 0.0;           // factor of the logits; 0 = 1/sqrt(Dk), or 1 for routing
  bool causal = false;
  std::uint64_t seed = 0;  // of clusterings and hashes
  double dropout = 0.0;    // probability that a normalised weight is dropped, in [0, 1);
                           // log-sum-exps and masses are those before dropout
  std::uint64_t dropout_seed = 0;
  // Lets the backward pass of full attention and of windows in 16 bits take sums of gradient times
  // output from the rounded output, as cuDNN does: on Hopper up to 2.5 times as fast, with larger
  // errors of dq and dk.
  bool delta_from_output = false;
  CallPart part;  // of a larger call, for random numbers
};

// Gradients, with the shapes and types of the inputs. Each view is overwritten; absent ones are not
// computed. With shared queries and keys dq gets the sum and dk must be absent.
struct AttentionGradients {
  TensorView dq, dk, dv;
  TensorView dcentroids;    // cast only (routing's centroids are constants)
  TensorView dgate;         // cast
  TensorView dlogit_scale;  // routing
};

}  // namespace coterie
