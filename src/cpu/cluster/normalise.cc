// SPDX-License-Identifier: MIT
#include "cpu/cluster/normalise.h"

#include <algorithm>
#include <cmath>

#include "cpu/engine/row_tiles.h"
#include "cpu/engine/rows.h"

namespace coterie::cpu {

namespace {

// Sum of element(0) .. element(n - 1), n a multiple of kColumnPad. Eight partial sums: fast enough
// without a kernel, and the same bits on every instruction set.
template <class T, class Element>
T sum_row(std::int64_t n, Element element) {
  constexpr std::int64_t kPartial = 8;
  static_assert(kColumnPad % kPartial == 0);
  T partial[kPartial] = {};
  for (std::int64_t d = 0; d < n; d += kPartial)
    for (std::int64_t lane = 0; lane < kPartial; ++lane) partial[lane] += element(d + lane);
  T sum = 0;
  for (const T part : partial) sum += part;
  return sum;
}

}  // namespace

template <class T>
void normalise_tile(T* tile, std::int64_t rows, std::int64_t width, std::int64_t tile_row,
                    T* inverse_sigma) {
  constexpr T kVarianceFloor = static_cast<T>(1e-6);
  const T size = static_cast<T>(width);
  for (std::int64_t r = 0; r < rows; ++r) {
    T* row = tile + r * tile_row;
    const T mean = sum_row<T>(tile_row, [&](std::int64_t d) { return row[d]; }) / size;
    for (std::int64_t d = 0; d < width; ++d) row[d] -= mean;
    const T squares = sum_row<T>(tile_row, [&](std::int64_t d) { return row[d] * row[d]; });
    const T factor = T(1) / std::sqrt(squares / size + kVarianceFloor);
    for (std::int64_t d = 0; d < width; ++d) row[d] *= factor;
    if (inverse_sigma) inverse_sigma[r] = factor;
  }
}

template <class T>
void normalise_backward_tile(const T* y, const T* inverse_sigma, std::int64_t rows,
                             std::int64_t width, std::int64_t tile_row, T* dy) {
  const T size = static_cast<T>(width);
  for (std::int64_t r = 0; r < rows; ++r) {
    const T* y_row = y + r * tile_row;
    T* row = dy + r * tile_row;
    const T mean = sum_row<T>(tile_row, [&](std::int64_t d) { return row[d]; }) / size;
    const T product =
        sum_row<T>(tile_row, [&](std::int64_t d) { return row[d] * y_row[d]; }) / size;
    for (std::int64_t d = 0; d < width; ++d)
      row[d] = (row[d] - mean - y_row[d] * product) * inverse_sigma[r];
  }
}

template <class T>
NormalisedRows<T>::NormalisedRows(Arena& arena, const TensorView& x)
    : rows(TensorView::contiguous(arena.take<T>(x.count()),
                                  sizeof(T) == 8 ? DType::f64 : DType::f32,
                                  {x.size(0), x.size(1), x.size(2), x.size(3)})),
      inverse_sigma(arena.take<T>(x.size(0) * x.size(1) * x.size(2))) {}

template <class T>
void normalise_rows(const TensorView& x, const std::vector<Span>& spans,
                    const NormalisedRows<T>& normalised, std::vector<Tiles<T>>& tiles) {
  const Kernels<T>& kernel = kernels<T>();
  for_tiles(span_tiles(spans, x.size(1)), tiles, [&](const RowTile& tile, Tiles<T>& own) {
    const Span& span = spans[static_cast<std::size_t>(tile.item)];
    T* inverse_sigma =
        normalised.inverse_sigma ? normalised.sigma_at(span, tile.head) + tile.first : nullptr;
    kernel.load(span_rows(x, span, tile.head), tile.first, tile.count, T(1), own.q, own.key_row);
    normalise_tile(own.q, tile.count, x.size(3), own.key_row, inverse_sigma);
    kernel.store(span_rows(normalised.rows, span, tile.head), tile.first, tile.count, T(1), own.q,
                 own.key_row);
  });
}

#define COTERIE_INSTANTIATE(T)                                                          \
  template void normalise_tile(T*, std::int64_t, std::int64_t, std::int64_t, T*);       \
  template void normalise_backward_tile(const T*, const T*, std::int64_t, std::int64_t, \
                                        std::int64_t, T*);                              \
  template struct NormalisedRows<T>;                                                    \
  template void normalise_rows(const TensorView&, const std::vector<Span>&,             \
                               const NormalisedRows<T>&, std::vector<Tiles<T>>&);
COTERIE_INSTANTIATE(float)
COTERIE_INSTANTIATE(double)
#undef COTERIE_INSTANTIATE

}  // namespace coterie::cpu
