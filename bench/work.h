// SPDX-License-Identifier: MIT
// What an attention has to do at least, counted from its shape.
#pragma once

#include <optional>

#include "bench/attention.h"

namespace coterie::bench {

// Multiplications and additions of the products with keys and values, of pairs that meet: 4 D a
// pair forward, 10 D backward (the logits once more, and four products). The selection is not
// counted. Nothing for attentions whose pairs depend on the data.
std::optional<double> attention_flops(const Entry& entry, const Problem& problem, Pass pass);

// Queries, keys, values and outputs, once each; for the backward pass also their gradients.
double least_bytes(const Problem& problem, Pass pass);

}  // namespace coterie::bench
