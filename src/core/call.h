// SPDX-License-Identifier: MIT
// A checked attention call: its sizes, items and views.
#pragma once

#include <cstdint>

#include "core/dropout.h"
#include "core/item.h"
#include "coterie/inputs.h"

namespace coterie {

struct AttentionCall {
  const char* op = "";  // the mechanism's name, for messages
  AttentionInputs inputs;
  Device device = Device::cpu;
  ItemList items;  // empty for a GPU, where kernels read the lengths
  std::int64_t item_total = 0;
  TensorView k;  // inputs.k, or inputs.q where queries and keys are shared
  std::int64_t B = 0, H = 0, N = 0, S = 0, Dk = 0, Dv = 0;
  std::int64_t key_heads = 0, value_heads = 0;  // H and Hkv when shared, else both Hkv
  double scale = 1.0;
  bool causal = false;  // set by the inputs or by the mechanism's causal form
  Dropout dropout;

  const Item& item(std::int64_t number) const { return items[static_cast<std::size_t>(number)]; }
  std::int64_t num_items() const { return item_total; }
  std::int64_t key_head(std::int64_t h) const { return h / (H / key_heads); }
  std::int64_t value_head(std::int64_t h) const { return h / (H / value_heads); }
  // Key position of query row 0 of an item.
  std::int64_t position_offset(const Item& item) const {
    return causal ? item.k.length - item.q.length : 0;
  }
};

}  // namespace coterie
