// SPDX-License-Identifier: MIT
#include "cpu/engine/fold.h"

#include <algorithm>

#include "core/parallel.h"

namespace coterie::cpu {

SlotIndex::SlotIndex(Arena& arena, std::int64_t slots, std::int64_t heads, std::int64_t rows,
                     std::int64_t items)
    : starts_(arena.take<std::int32_t>(heads * (rows + items))),
      slots_(arena.take<std::int32_t>(slots)) {}

void SlotIndex::build(const SlotSide& side, const std::vector<Span>& spans) {
  side_ = side;
  spans_ = spans;
  first_start_.clear();
  std::int64_t next = 0;
  for (const Span& span : spans)
    for (std::int64_t head = 0; head < side.heads; ++head) {
      first_start_.push_back(next);
      next += span.length + 1;
    }
  parallel_for(static_cast<std::int64_t>(side.blocks.size()), [&](std::int64_t number, int) {
    const SlotBlock& block = side.blocks[static_cast<std::size_t>(number)];
    const std::int64_t tokens = spans[static_cast<std::size_t>(number / side.heads)].length;
    std::int32_t* starts = starts_ + first_start_[static_cast<std::size_t>(number)];
    std::int32_t* slots = slots_ + block.first;
    std::fill_n(starts, tokens + 1, 0);
    for (std::int64_t s = 0; s < block.count; ++s)
      if (block.tokens[s] >= 0) ++starts[block.tokens[s] + 1];
    for (std::int64_t t = 0; t < tokens; ++t) starts[t + 1] += starts[t];
    // Filling moves each token's start to its end, which is the next start; then all shift back by
    // one.
    for (std::int64_t s = 0; s < block.count; ++s)
      if (block.tokens[s] >= 0) slots[starts[block.tokens[s]]++] = static_cast<std::int32_t>(s);
    for (std::int64_t t = tokens; t > 0; --t) starts[t] = starts[t - 1];
    starts[0] = 0;
  });
}

template <class T>
void add_slots(const SlotRows<T>& rows, const RowTile& tile, T* sums, std::int64_t sums_row) {
  const std::int64_t sharing = rows.index->side().heads / rows.heads;
  for (std::int64_t head = tile.head * sharing; head < (tile.head + 1) * sharing; ++head) {
    const T* block = rows.rows + rows.index->side().block(tile.item, head).first * rows.width;
    for (std::int64_t r = 0; r < tile.count; ++r) {
      T* sum = sums + r * sums_row;
      for (const std::int32_t slot : rows.index->slots_of(tile.item, head, tile.first + r)) {
        const T* row = block + slot * rows.width;
        for (std::int64_t d = 0; d < rows.width; ++d) sum[d] += row[d];
      }
    }
  }
}

template <class T>
RowSums<T> slot_sums(const SlotRows<T>& rows) {
  return [rows](const RowTile& tile, T* sums, std::int64_t sums_row) {
    add_slots(rows, tile, sums, sums_row);
  };
}

template <class T>
void write_sums(const RowSums<T>& sums, const std::vector<Span>& spans, const TensorView& tensor,
                std::vector<Tiles<T>>& tiles) {
  fill_padding(tensor, spans, 0);
  for_tiles(span_tiles(spans, tensor.size(1)), tiles, [&](const RowTile& tile, Tiles<T>& own) {
    const std::int64_t row = padded(tensor.size(3));
    T* memory = row <= own.value_row ? own.o : own.dq;
    std::fill_n(memory, tile.count * row, T(0));
    sums(tile, memory, row);
    kernels<T>().store(span_rows(tensor, spans[static_cast<std::size_t>(tile.item)], tile.head),
                       tile.first, tile.count, T(1), memory, row);
  });
}

#define COTERIE_INSTANTIATE(T)                                                             \
  template void add_slots(const SlotRows<T>&, const RowTile&, T*, std::int64_t);           \
  template RowSums<T> slot_sums(const SlotRows<T>&);                                       \
  template void write_sums(const RowSums<T>&, const std::vector<Span>&, const TensorView&, \
                           std::vector<Tiles<T>>&);
COTERIE_INSTANTIATE(float)
COTERIE_INSTANTIATE(double)
#undef COTERIE_INSTANTIATE

}  // namespace coterie::cpu
