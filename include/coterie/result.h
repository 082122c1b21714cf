// SPDX-License-Identifier: MIT
// Outputs of an attention call; coterie/attention.h has the calls.
#pragma once

#include <vector>

#include "coterie/view.h"

namespace coterie {

// Outputs of a forward pass: `out` (B, H, N, Dv) of q's type, `saved` as attention_saved lists.
struct AttentionResult {
  TensorView out;
  std::vector<TensorView> saved;
};

}  // namespace coterie
