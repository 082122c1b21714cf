// SPDX-License-Identifier: MIT
// Host memory for the passes of one mechanism: output, saved tensors and workspace, of exactly the
// sizes that coterie/passes.h asks for.
#pragma once

#include <cstdint>
#include <vector>

#include "coterie/passes.h"

namespace coterie::cases {

class Buffers {
 public:
  Buffers() = default;
  Buffers(const Mechanism& mechanism, const AttentionInputs& inputs)
      : out_(inputs.q.dtype,
             {inputs.q.size(0), inputs.q.size(1), inputs.q.size(2), inputs.v.size(3)}),
        workspace_(DType::u8, {attention_workspace_bytes(mechanism, inputs)}) {
    for (const TensorLayout& layout : attention_saved(mechanism, inputs).tensors)
      saved_.emplace_back(layout);
  }

  // Views that stay valid when the object is moved.
  AttentionResult result() const {
    return {out_, std::vector<TensorView>(saved_.begin(), saved_.end())};
  }
  Workspace workspace() const {
    return {workspace_.view().data, workspace_.view().count(), nullptr};
  }

 private:
  HostTensor out_, workspace_;
  std::vector<HostTensor> saved_;
};

}  // namespace coterie::cases
