// SPDX-License-Identifier: MIT
// Sums slots per token: each token row has one writer, which adds its slots in ascending order of
// head, group and rank.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "core/arena.h"
#include "core/items.h"
#include "cpu/engine/members.h"
#include "cpu/engine/row_tiles.h"

namespace coterie::cpu {

// The slots of one token, ascending, counted from the start of their block.
struct TokenSlots {
  const std::int32_t *first, *last;
  const std::int32_t* begin() const { return first; }
  const std::int32_t* end() const { return last; }
  std::int64_t count() const { return last - first; }
};

// The slots of every token of one side.
class SlotIndex {
 public:
  // Memory for `slots` slots of the whole call, which has `heads` heads, `rows` tokens and `items`
  // items.
  SlotIndex(Arena& arena, std::int64_t slots, std::int64_t heads, std::int64_t rows,
            std::int64_t items);

  void build(const SlotSide& side, const std::vector<Span>& spans);

  TokenSlots slots_of(std::int64_t item, std::int64_t head, std::int64_t token) const {
    const std::size_t block = static_cast<std::size_t>(item * side_.heads + head);
    const std::int32_t* start = starts_ + first_start_[block] + token;
    const std::int32_t* slots = slots_ + side_.blocks[block].first;
    return {slots + start[0], slots + start[1]};
  }
  const SlotSide& side() const { return side_; }
  const std::vector<Span>& spans() const { return spans_; }

 private:
  std::int32_t *starts_, *slots_;  // tokens + 1 starts per block, relative to its first slot
  std::vector<std::int64_t> first_start_;  // (items, heads)
  SlotSide side_;
  std::vector<Span> spans_;
};

// Rows of slots to be summed; consecutive heads of the side are summed into one of `heads`.
template <class T>
struct SlotRows {
  const SlotIndex* index;
  const T* rows;  // (slots, width)
  std::int64_t width, heads;
};

// Adds the slots of token tile.first + r to row r of `sums`.
template <class T>
void add_slots(const SlotRows<T>& rows, const RowTile& tile, T* sums, std::int64_t sums_row);

// Adds the slots of token tile.first + r, and possibly more terms, to row r of `sums`.
template <class T>
using RowSums = std::function<void(const RowTile& tile, T* sums, std::int64_t sums_row)>;
template <class T>
RowSums<T> slot_sums(const SlotRows<T>& rows);

// Writes tensor (B, heads, N, D); rows outside the spans become 0.
template <class T>
void write_sums(const RowSums<T>& sums, const std::vector<Span>& spans, const TensorView& tensor,
                std::vector<Tiles<T>>& tiles);

// Gradients of the rows of all query heads, key heads and value heads.
template <class T>
struct GradientSums {
  RowSums<T> dq, dk, dv;
};

}  // namespace coterie::cpu
