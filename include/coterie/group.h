// SPDX-License-Identifier: MIT
// Tokens sorted by cluster: a stable counting sort, so that each cluster is a contiguous run in
// position order. Tensors are on the CPU; on a GPU whole mechanisms run (attention.h).
#pragma once

#include "coterie/attention.h"
#include "coterie/tensor.h"

namespace coterie {

// Indices count from the start of the item (all int32).
struct Groups {
  TensorView order;    // (B, H, N): slot -> token; -1 in padding
  TensorView inverse;  // (B, H, N): token -> slot; -1 in padding; may be absent
  TensorView offsets;  // (items, H, C+1): cluster c is slots [offsets[c], offsets[c+1])
};

// labels (B, H, N) int32 in [0, C), anything in padding. Throws on a label out of range.
void group_by_cluster(const TensorView& labels, const Sequences& sequences, const Groups& groups,
                      const Workspace& workspace = {});

}  // namespace coterie
