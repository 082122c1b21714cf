// SPDX-License-Identifier: MIT
// The sequences of a batch: their number, one of them, and a list.
#pragma once

#include <cstddef>
#include <cstdint>

#include "coterie/inputs.h"

namespace coterie {

// Number of items, without reading device memory.
std::int64_t item_count(const Sequences& sequences, std::int64_t batches);

// Rows [begin, begin + length) of batch entry `batch`.
struct Span {
  std::int64_t batch = 0, begin = 0, length = 0;
};

struct Item {
  Span q, k;
};

// Owns its items. Not a vector: every kernel file includes this header, and would include <vector>.
class ItemList {
 public:
  ItemList() = default;
  ItemList(const Item* items, std::int64_t count);
  ItemList(const ItemList& other) : ItemList(other.data_, other.count_) {}
  ItemList(ItemList&& other) noexcept { swap(other); }
  ItemList& operator=(ItemList other) noexcept {
    swap(other);
    return *this;
  }
  ~ItemList() { delete[] data_; }

  const Item& operator[](std::size_t number) const { return data_[number]; }
  const Item* begin() const { return data_; }
  const Item* end() const { return data_ + count_; }

 private:
  void swap(ItemList& other) noexcept;

  Item* data_ = nullptr;
  std::int64_t count_ = 0;
};

}  // namespace coterie
