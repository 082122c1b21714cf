// SPDX-License-Identifier: MIT
// The sequences of a batch, padded or packed, as one list.
#pragma once

#include <cstdint>
#include <vector>

#include "core/item.h"
#include "coterie/inputs.h"

namespace coterie {

// Checks sequences without reading their elements: types, shapes, number.
void check_sequences(const char* op, const Sequences& sequences, std::int64_t batches);

// The same for a call's queries and keys, which must have the same number of sequences.
void check_items(const char* op, const AttentionInputs& inputs);

// The items of a tensor with `batches` entries of `rows` rows; checks lengths and offsets.
std::vector<Span> make_spans(const char* op, const Sequences& sequences, std::int64_t batches,
                             std::int64_t rows);

// Query and key rows of each item of a call; checks them.
std::vector<Item> make_items(const char* op, const AttentionInputs& inputs);

}  // namespace coterie
