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
  // Sums are divided by the number of slots + eps; optional (B, heads, rows): the factors.
  bool mean = false;
  float eps = 0.0f;
  float* weights = nullptr;
};
// What the kernel ahead of a sum had waited for before it let the sum start.
enum class SlotSumStart {
  behind,       // nothing: the sum waits for it
  slots_ready,  // the tokens' slots, which the sum reads early
  beside,       // all that the sum reads
};
// Up to three of them in one launch.
void sum_slots(const AttentionCall& call, const std::vector<SlotSum>& sums, SlotSumStart start,
               cudaStream_t stream);

}  // namespace coterie::cuda
