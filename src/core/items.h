// SPDX-License-Identifier: MIT
// The sequences of a batch, padded or packed, as one list.
#pragma once

#include <cstdint>
#include <vector>

#include "coterie/inputs.h"

namespace coterie {

// Rows [begin, begin + length) of batch entry `batch`.
struct Span {
  std::int64_t batch = 0, begin = 0, length = 0;
};

// The items of a tensor with `batches` entries of `rows` rows; checks lengths and offsets.
std::vector<Span> make_spans(const char* op, const Sequences& sequences, std::int64_t batches,
                             std::int64_t rows);

// Number of items, without reading device memory.
std::int64_t item_count(const Sequences& sequences, std::int64_t batches);

struct Item {
  Span q, k;
};

// Query and key rows of each item of a call; checks that they agree in number.
std::vector<Item> make_items(const char* op, const AttentionInputs& inputs);

}  // namespace coterie
