// SPDX-License-Identifier: MIT
// Row normalisation of routing: y = (x - mean) / sigma, sigma = sqrt(variance + 1e-6), without
// scale or bias. A row's result depends on the row alone, so that training and decoding agree.
#pragma once

#include <cstdint>
#include <vector>

#include "core/arena.h"
#include "core/items.h"
#include "cpu/engine/segment.h"

namespace coterie::cpu {

// Normalises rows of `width` elements in place; the columns up to tile_row (padded) stay 0.
// inverse_sigma may be null.
template <class T>
void normalise_tile(T* tile, std::int64_t rows, std::int64_t width, std::int64_t tile_row,
                    T* inverse_sigma);

// dy becomes dx = (dy - mean(dy) - y mean(dy y)) / sigma.
template <class T>
void normalise_backward_tile(const T* y, const T* inverse_sigma, std::int64_t rows,
                             std::int64_t width, std::int64_t tile_row, T* dy);

// A normalised copy of a (B, heads, N, D) tensor in the accumulator type.
template <class T>
struct NormalisedRows {
  TensorView rows;   // (B, heads, N, D)
  T* inverse_sigma;  // (B, heads, N), or null

  NormalisedRows(Arena& arena, const TensorView& x);
  explicit NormalisedRows(const TensorView& out) : rows(out), inverse_sigma(nullptr) {}

  T* sigma_at(const Span& span, std::int64_t head) const {
    return inverse_sigma + (span.batch * rows.size(1) + head) * rows.size(2) + span.begin;
  }
};

// Fills the rows of the spans.
template <class T>
void normalise_rows(const TensorView& x, const std::vector<Span>& spans,
                    const NormalisedRows<T>& normalised, std::vector<Tiles<T>>& tiles);

}  // namespace coterie::cpu
