// SPDX-License-Identifier: MIT
// Rows of tokens as sums over the rows of their slots, of the inputs' type.
#pragma once

#include <cuda_runtime.h>

#include <vector>

#include "core/call.h"
#include "cuda/lists/slots.h"

namespace coterie::cuda {

struct SlotSum {
  TokenSlots tokens;             // with `slots`; its heads are those of the lists: all, or one
  const void* values = nullptr;  // (slots of value_heads, width)
  std::int64_t value_heads = 0;  // a multiple of the heads of `to`; neighbours are summed
  TensorView to;                 // (B, heads, rows, width); zeros in padding, unless added
  bool added = false;            // added to the present values; then heads are equal
  bool zeroed = false;           // rows of tokens without slots are 0 already
  // Sums are divided by the number of slots + eps; optional (B, heads, rows): these factors.
  bool mean = false;
  float eps = 0.0f;
  float* weights = nullptr;
};
// What the preceding kernel had waited for before it let the sum start.
enum class SlotSumStart {
  behind,       // nothing: the sum waits for that kernel
  slots_ready,  // the tokens' slots, which the sum reads early
  beside,       // everything that the sum reads
};
// Up to three sums in one launch.
void sum_slots(const AttentionCall& call, const std::vector<SlotSum>& sums, SlotSumStart start,
               cudaStream_t stream);

}  // namespace coterie::cuda
