// SPDX-License-Identifier: MIT
// Rows of tokens as sums over rows of the inputs' type of their slots.
#pragma once

#include <cuda_runtime.h>

#include <vector>

#include "core/call.h"
#include "cuda/lists/slots.h"

namespace coterie::cuda {

struct SlotSum {
  TokenSlots tokens;             // with `slots`; its heads are those of the lists: all, or one
  const void* values = nullptr;  // (slots of value_heads, width)
  std::int64_t value_heads = 0;  // so many times those of `to`, which neighbours add up to
  TensorView to;                 // (B, heads, rows, width); zeros in padding, unless added
  bool added = false;            // to what is there already; then there are as many heads
  bool zeroed = false;           // rows of tokens without slots are 0 already
  bool listed = false;           // the kernel ahead had the tokens' slots before it let this start
  // Sums are divided by the number of slots + eps; optional (B, heads, rows): the factors.
  bool mean = false;
  float eps = 0.0f;
  float* weights = nullptr;
};
// Up to three of them in one launch. It may run `beside` the kernel ahead, if that has waited for
// all that is read here before it let this one start.
void sum_slots(const AttentionCall& call, const std::vector<SlotSum>& sums, bool beside,
               cudaStream_t stream);

}  // namespace coterie::cuda
