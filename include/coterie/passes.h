// SPDX-License-Identifier: MIT
// The passes of one mechanism in memory from the caller, for tensor libraries with their own
// allocators. coterie/attention.h has a class that allocates, and the contract.
//
// A forward pass has two halves: attention_select decides which tokens attend to which (clusters,
// top keys, members; no gradient), attention_attend computes outputs for that selection. The
// selection and everything else the backward pass needs are in `saved` tensors, which the caller
// allocates as attention_saved says: selections can be inspected, kept and reused.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "coterie/inputs.h"
#include "coterie/mechanism.h"
#include "coterie/result.h"
#include "coterie/tensor.h"

namespace coterie {

// The tensors of `saved`, in order. The first `selection_count` are the selection.
struct SavedLayout {
  std::vector<TensorLayout> tensors;
  std::size_t selection_count = 0;
};
SavedLayout attention_saved(const Mechanism& mechanism, const AttentionInputs& inputs);

// Workspace bytes of select, attend, forward and backward; the memory must be 64-byte aligned.
std::int64_t attention_workspace_bytes(const Mechanism& mechanism, const AttentionInputs& inputs);

// Fills the selection part of `saved`.
void attention_select(const Mechanism& mechanism, const AttentionInputs& inputs,
                      const std::vector<TensorView>& saved, const Workspace& workspace);

// Computes `out` and the rest of `saved` from the inputs and the selection.
void attention_attend(const Mechanism& mechanism, const AttentionInputs& inputs,
                      const AttentionResult& result, const Workspace& workspace);

// attention_select, then attention_attend.
void attention_forward(const Mechanism& mechanism, const AttentionInputs& inputs,
                       const AttentionResult& result, const Workspace& workspace);

// Gradients of sum(out * grad_out), with the selection held constant. `result` is that of forward.
void attention_backward(const Mechanism& mechanism, const AttentionInputs& inputs,
                        const AttentionResult& result, const TensorView& grad_out,
                        const AttentionGradients& gradients, const Workspace& workspace);

}  // namespace coterie
