// SPDX-License-Identifier: MIT
#include "cpu/mechanisms/lsh_pass.h"

#include <algorithm>
#include <cmath>

namespace coterie::cpu {

template <class T>
TokenSums<T>::TokenSums(Arena& arena, const AttentionCall& call, std::int64_t num_heads,
                        std::int64_t width)
    : batches(call.B),
      heads(num_heads),
      tokens(call.N),
      row(padded(width)),
      sums(arena.take<T>(batches * heads * tokens * row)) {}

template <class T>
void TokenSums<T>::clear() {
  std::fill_n(sums, batches * heads * tokens * row, T(0));
}

template <class T>
void TokenSums<T>::add(const Span& span, std::int64_t head, const RowList& list,
                       const RowTile& tile, const T* rows) {
  for (std::int64_t r = 0; r < tile.count; ++r)
    kernels<T>().row_add(at(span, head, list.row(tile.first + r)), rows + r * row, row, T(1));
}

template <class T>
void TokenSums<T>::store(const AttentionCall& call, T factor, const TensorView& tensor) const {
  fill_padding(tensor, query_spans(call), 0);
  for_tiles(span_tiles(query_spans(call), heads), [&](const RowTile& tile, int) {
    const Span& span = call.item(tile.item).q;
    kernels<T>().store(span_rows(tensor, span, tile.head), tile.first, tile.count, factor,
                       at(span, tile.head, tile.first), row);
  });
}

template <class T>
LshPass<T>::LshPass(Arena& arena, const LshParams& lsh, const AttentionCall& attention)
    : params(lsh),
      call(attention),
      lists(arena, call),
      alone(arena.take<std::uint8_t>(call.B * call.H * call.N)) {
  call.k = TensorView::contiguous(arena.take<T>(call.B * call.H * call.N * call.Dk),
                                  accumulator_dtype(call.inputs.q.dtype),
                                  {call.B, call.H, call.N, call.Dk});
}

template <class T>
void LshPass<T>::prepare(const TensorView& order) {
  for_tokens([&](const RowTile& tile, Tiles<T>& tiles) {
    const Span& span = call.item(tile.item).q;
    kernels<T>().load(span_rows(call.inputs.q, span, tile.head), tile.first, tile.count, T(1),
                      tiles.q, tiles.key_row);
    for (std::int64_t r = 0; r < tile.count; ++r) {
      T* row = tiles.q + r * tiles.key_row;
      kernels<T>().row_scale(row, tiles.key_row, inverse_norm(row, tiles.key_row));
    }
    kernels<T>().store(span_rows(call.k, span, tile.head), tile.first, tile.count, T(1), tiles.q,
                       tiles.key_row);
  });
  if (merges()) lsh_find_alone(params, call, order, alone);
}

template <class T>
T inverse_norm(const T* row, std::int64_t width) {
  const T square = kernels<T>().row_dot(row, row, width);
  return square == T(0) ? T(0) : T(1) / std::sqrt(square);
}

#define COTERIE_INSTANTIATE(T)  \
  template struct TokenSums<T>; \
  template struct LshPass<T>;   \
  template T inverse_norm(const T*, std::int64_t);
COTERIE_INSTANTIATE(float)
COTERIE_INSTANTIATE(double)
#undef COTERIE_INSTANTIATE

}  // namespace coterie::cpu
