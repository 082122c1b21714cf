// SPDX-License-Identifier: MIT
#include "cpu/engine/rows.h"

#include <algorithm>

#include "core/parallel.h"

namespace coterie::cpu {

Rows list_rows(const TensorView& tensor, const Span& span, std::int64_t head, const RowList& list) {
  const std::int64_t bytes = dtype_bytes(tensor.dtype);
  const std::int64_t first = span.batch * tensor.stride(0) + head * tensor.stride(1) +
                             (span.begin + list.first) * tensor.stride(2);
  Rows rows;
  rows.base = static_cast<char*>(tensor.data) + first * bytes;
  rows.stride_bytes = tensor.stride(2) * list.step * bytes;
  rows.width = tensor.size(3);
  rows.dtype = tensor.dtype;
  rows.index = list.index;
  return rows;
}

template <class T>
Rows memory_rows(T* base, std::int64_t width) {
  Rows rows;
  rows.base = base;
  rows.stride_bytes = width * static_cast<std::int64_t>(sizeof(T));
  rows.width = width;
  rows.dtype = sizeof(T) == 8 ? DType::f64 : DType::f32;
  return rows;
}
template Rows memory_rows(float*, std::int64_t);
template Rows memory_rows(double*, std::int64_t);

void fill_padding(const TensorView& tensor, const std::vector<Span>& spans, double value) {
  std::int64_t rows = 0;
  for (const Span& span : spans) rows += span.length;
  if (rows == tensor.size(0) * tensor.size(2)) return;  // no padding
  // Spans of one batch entry ascend and do not overlap; padding is the rows between them.
  parallel_for(tensor.size(0) * tensor.size(1), [&](std::int64_t task, int) {
    const std::int64_t b = task / tensor.size(1), h = task % tensor.size(1);
    const TensorView head = tensor.narrowed(0, b, 1).narrowed(1, h, 1);
    std::int64_t end = 0;
    for (const Span& span : spans) {
      if (span.batch != b) continue;
      fill(head.narrowed(2, end, span.begin - end), [&](std::int64_t) { return value; });
      end = span.begin + span.length;
    }
    fill(head.narrowed(2, end, tensor.size(2) - end), [&](std::int64_t) { return value; });
  });
}

std::vector<Span> query_spans(const AttentionCall& call) {
  std::vector<Span> spans;
  for (const Item& item : call.items) spans.push_back(item.q);
  return spans;
}

std::vector<Span> key_spans(const AttentionCall& call) {
  std::vector<Span> spans;
  for (const Item& item : call.items) spans.push_back(item.k);
  return spans;
}

}  // namespace coterie::cpu
