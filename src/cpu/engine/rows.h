// SPDX-License-Identifier: MIT
// Rows of tensors by (item, head), and lists of them.
#pragma once

#include <cstdint>
#include <vector>

#include "core/call.h"
#include "cpu/kernels/kernels.h"

namespace coterie::cpu {

// Rows of an item in list order: entry t is row index[t], or first + t * step.
struct RowList {
  std::int64_t count = 0;
  const std::int32_t* index = nullptr;
  std::int64_t first = 0, step = 1;

  std::int64_t row(std::int64_t t) const { return index ? index[t] : first + t * step; }
};

// The rows of a (B, H, N, D) tensor that `list` contains.
Rows list_rows(const TensorView& tensor, const Span& span, std::int64_t head, const RowList& list);

// All rows of a span.
inline Rows span_rows(const TensorView& tensor, const Span& span, std::int64_t head) {
  return list_rows(tensor, span, head, {span.length});
}

// Contiguous rows of T in memory, such as centroids.
template <class T>
Rows memory_rows(T* base, std::int64_t width);

// First element of (item, head) in a contiguous (items, heads, ...) tensor.
template <class T>
T* block_at(const TensorView& tensor, std::int64_t item, std::int64_t head) {
  std::int64_t inner = 1;
  for (int dim = 2; dim < tensor.rank; ++dim) inner *= tensor.size(dim);
  return static_cast<T*>(tensor.data) + (item * tensor.size(1) + head) * inner;
}

// First element of a span in a contiguous (B, H, N) tensor, or (B, H, N * per_row).
template <class T>
T* span_at(const TensorView& tensor, const Span& span, std::int64_t head,
           std::int64_t per_row = 1) {
  return block_at<T>(tensor, span.batch, head) + span.begin * per_row;
}

// Writes `value` to every row of a (B, H, N) or (B, H, N, D) tensor that lies in no span.
void fill_padding(const TensorView& tensor, const std::vector<Span>& spans, double value);

std::vector<Span> query_spans(const AttentionCall& call);
std::vector<Span> key_spans(const AttentionCall& call);

}  // namespace coterie::cpu
