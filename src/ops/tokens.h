// SPDX-License-Identifier: MIT
// Preconditions of operations on rows of tokens x (B, H, N, D) and their clusters.
#pragma once

#include <cstdint>
#include <vector>

#include "core/items.h"
#include "coterie/inputs.h"

namespace coterie::ops {

// x of a floating type with its sequences, on the CPU.
std::vector<Span> check_tokens(const char* op, const TensorView& x, const Sequences& sequences);

// The same on any device; a GPU reads its sequences itself and gets no spans.
std::vector<Span> check_tokens_anywhere(const char* op, const TensorView& x,
                                        const Sequences& sequences);

void check_labels(const char* op, const TensorView& x, const TensorView& labels);

// Centroids of `centroid_heads` heads serve the heads of x.
void check_head_count(const char* op, const TensorView& x, std::int64_t centroid_heads);

}  // namespace coterie::ops
