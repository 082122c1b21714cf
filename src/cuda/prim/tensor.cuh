// SPDX-License-Identifier: MIT
// Tensors and sequences as kernels see them: plain structs passed by value.
#pragma once

#include <cstdint>

#include "coterie/inputs.h"
#include "coterie/view.h"

namespace coterie::cuda {

// Rows of one (batch, head): row r starts at data + r * pitch.
template <class T>
struct Rows {
  T* data;
  std::int64_t pitch;
  int width;     // elements of a row
  bool aligned;  // rows start and end at multiples of 16 bytes

  __device__ T* row(std::int64_t r) const { return data + r * pitch; }
};

// A (B, H, N, D) tensor by its strides, the last one 1.
template <class T>
struct Tensor4 {
  T* data;
  std::int64_t batch, head, row;  // strides in elements
  int width;
  bool aligned;

  __device__ Rows<T> rows(int b, int h, std::int64_t begin) const {
    return {data + b * batch + h * head + begin * row, row, width, aligned};
  }
};

template <class T>
Tensor4<T> tensor4(const TensorView& view) {
  constexpr std::int64_t kVector = 16 / static_cast<std::int64_t>(sizeof(T));
  bool aligned = reinterpret_cast<std::uintptr_t>(view.data) % 16 == 0;
  for (int dim = 0; dim < 3; ++dim)
    aligned = aligned && (view.size(dim) <= 1 || view.stride(dim) % kVector == 0);
  aligned = aligned && view.size(3) % kVector == 0;
  return {static_cast<T*>(view.data),     view.stride(0), view.stride(1), view.stride(2),
          static_cast<int>(view.size(3)), aligned};
}

// Rows [begin, begin + length) of batch entry `batch`.
struct ItemSpan {
  int batch, begin, length;
};

// Sequences of one side. Lengths and offsets are on the device and were not checked: they are
// clamped, so wrong ones give wrong rows but no invalid address.
struct SequenceSpans {
  const std::int32_t* lengths;     // (B), or null
  const std::int32_t* cu_seqlens;  // (items + 1), or null
  int rows;                        // of a batch entry

  __device__ ItemSpan span(int item) const {
    if (cu_seqlens) {
      const int begin = min(max(cu_seqlens[item], 0), rows);
      return {0, begin, min(max(cu_seqlens[item + 1], begin), rows) - begin};
    }
    return {item, 0, lengths ? min(max(lengths[item], 0), rows) : rows};
  }

  // The item that a row of a batch entry belongs to; -1 for padding.
  __device__ int item_of(int batch, int row, int items) const {
    int item = batch;
    if (cu_seqlens) {
      item = 0;
      for (int high = items; high - item > 1;) {
        const int middle = (item + high) / 2;
        (cu_seqlens[middle] <= row ? item : high) = middle;
      }
    }
    const ItemSpan found = span(item);
    return row >= found.begin && row < found.begin + found.length ? item : -1;
  }
};

inline SequenceSpans sequence_spans(const Sequences& sequences, std::int64_t rows) {
  return {static_cast<const std::int32_t*>(sequences.lengths.data),
          static_cast<const std::int32_t*>(sequences.cu_seqlens.data), static_cast<int>(rows)};
}

struct ItemSpans {
  SequenceSpans q, k;
};

inline ItemSpans item_spans(const AttentionInputs& inputs) {
  return {sequence_spans(inputs.q_sequences, inputs.q.size(2)),
          sequence_spans(inputs.k_sequences, inputs.v.size(2))};
}

}  // namespace coterie::cuda
