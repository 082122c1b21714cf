// SPDX-License-Identifier: MIT
// All head groups of a layer on the rows of one projection: positions, attention and commitment
// losses without copies of head slices.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "coterie/layer.h"
#include "coterie/torch/functional.h"
#include "head_group.h"

namespace coterie::torch_api {

struct PackedGroup {
  Mechanism mechanism;  // resolved; not cast
  AttentionOptions options;
  HeadSlice slice;
  bool rotary = false;
  double rotary_base = 10000.0;
};

// Heads of the rows (B, N, queries + keys + values, D), in this order.
struct PackedHeads {
  std::int64_t queries = 0, keys = 0, values = 0;
};

struct PackedOutput {
  at::Tensor out;              // (B, N, queries, D)
  at::Tensor commitment;       // weighted sum over routing groups; undefined without any
  std::vector<HeadRows> rows;  // of the groups, (B, h, N, D), with positions, without gradients
  std::vector<std::vector<at::Tensor>> labels;  // of the groups: routing's for queries and keys
};

// Positions are added to `rows` in place: nothing but its producer's backward pass, which must not
// need its values, may use it afterwards. `bias` (f32, of all heads together, or undefined) is part
// of the rows already, as a constant; its gradient is computed here, with theirs.
PackedOutput packed_attention(const at::Tensor& rows, const at::Tensor& bias,
                              const PackedHeads& heads, const std::vector<PackedGroup>& groups);

}  // namespace coterie::torch_api
