// SPDX-License-Identifier: MIT
// Preconditions of operations on rows of tokens x (B, H, N, D) and their clusters.
#pragma once

#include <cstdint>
#include <vector>

#include "core/items.h"
#include "coterie/inputs.h"

namespace coterie::ops {

// Checks x, of a floating type and on the CPU, and its sequences.
std::vector<Span> check_tokens(const char* op, const TensorView& x, const Sequences& sequences);

// The same on any device. For a GPU, where kernels read the sequences, there are no spans.
std::vector<Span> check_tokens_anywhere(const char* op, const TensorView& x,
                                        const Sequences& sequences);

void check_labels(const char* op, const TensorView& x, const TensorView& labels);

// Checks that `centroid_heads` divides the number of heads of x.
void check_head_count(const char* op, const TensorView& x, std::int64_t centroid_heads);

}  // namespace coterie::ops
