// SPDX-License-Identifier: MIT
// The least work of an attention, counted from its shape.
#pragma once

#include <optional>

#include "bench/attention.h"

namespace coterie::bench {

// Multiplications and additions of the products with keys and values: 4 D per query-key pair
// forward, 10 D backward (the logits again, and four products). The selection is not counted.
// Nothing for attentions whose pairs depend on the data.
std::optional<double> attention_flops(const Entry& entry, const Problem& problem, Pass pass);

// Bytes of queries, keys, values and outputs once each; for the backward pass also their gradients.
double least_bytes(const Problem& problem, Pass pass);

}  // namespace coterie::bench
