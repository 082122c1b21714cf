// SPDX-License-Identifier: MIT
// Attention by any mechanism, forward and backward.
//
// A forward pass has two halves: attention_select decides which tokens meet (clusters, top keys,
// members; no gradient), attention_attend computes outputs for that selection. The selection and
// whatever else the backward pass needs lie in `saved` tensors, which the caller allocates as
// attention_saved says, so that selections can be inspected, kept and reused.
//
// Contract of every mechanism: rows beyond an item's length, and queries with nothing to attend to,
// get output 0, log-sum-exp -inf and gradient 0. Ties go to the lower index. The same inputs and
// seed give the same bits for any number of threads, backward included. An argument a mechanism
// cannot honour is refused with an Error.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "coterie/inputs.h"
#include "coterie/mechanism.h"
#include "coterie/result.h"
#include "coterie/tensor.h"

namespace coterie {

// What `saved` must hold, in order. The first `selection_count` of them are the selection.
struct SavedLayout {
  std::vector<TensorLayout> tensors;
  std::size_t selection_count = 0;
};
SavedLayout attention_saved(const Mechanism& mechanism, const AttentionInputs& inputs);

// Bytes that select, attend, forward and backward need; 64-byte aligned memory.
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

// Gradients of sum(out * grad_out), the selection held constant. `result` is the forward pass's.
void attention_backward(const Mechanism& mechanism, const AttentionInputs& inputs,
                        const AttentionResult& result, const TensorView& grad_out,
                        const AttentionGradients& gradients, const Workspace& workspace);

// Host memory for one call: `out`, the saved tensors and the workspace as the functions above ask.
// For programs without a tensor library.
class AttentionBuffers {
 public:
  AttentionBuffers() = default;  // of no call
  AttentionBuffers(const Mechanism& mechanism, const AttentionInputs& inputs);

  // Views of the memory, good for the lifetime of whichever object it was moved to.
  AttentionResult result() const;
  Workspace workspace() const;

  AttentionBuffers(AttentionBuffers&&) = default;
  AttentionBuffers& operator=(AttentionBuffers&&) = default;
  AttentionBuffers(const AttentionBuffers&) = delete;
  AttentionBuffers& operator=(const AttentionBuffers&) = delete;
  ~AttentionBuffers() = default;

 private:
  HostTensor out_, workspace_;
  std::vector<HostTensor> saved_;
};

}  // namespace coterie
