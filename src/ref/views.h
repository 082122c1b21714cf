// SPDX-License-Identifier: MIT
// Converts between tensors of any type and strides and matrices and lists of one item and head.
#pragma once

#include <string>
#include <type_traits>
#include <vector>

#include "core/items.h"
#include "coterie/tensor.h"
#include "ref/matrix.h"

namespace coterie::ref {

using Lists = std::vector<std::vector<Index>>;

// One item and query head of a call, and the position of its rows in the call's tensors.
// Consecutive heads share a tensor with fewer heads; all items share one with a single item.
struct Place {
  Index item = 0, head = 0, num_heads = 1, num_kv_heads = 1;
  Span q, k;
  CallPart part{};

  // Numbers of the item and head, and of the item and key/value head, for random streams.
  std::uint32_t problem() const { return part.stream(item * num_heads + head, num_heads); }
  std::uint32_t kv_problem() const {
    const Index kv_head = head / (num_heads / num_kv_heads);
    return part.stream(item * num_kv_heads + kv_head, num_kv_heads);
  }
  TensorView queries(const TensorView& tensor) const;    // (B, H, N, ...): the item's queries
  TensorView keys(const TensorView& tensor) const;       // (B, H, S, ...): the item's keys
  TensorView item_head(const TensorView& tensor) const;  // (items, H, ...)
};

// The places of a call, item by item.
std::vector<Place> make_places(const char* op, const AttentionInputs& inputs);
// The places of one tensor x (B, H, N, ...), whose rows are both queries and keys; num_heads >= H.
std::vector<Place> make_places(const char* op, const Sequences& sequences, const TensorView& x,
                               Index num_heads);

// The last dimension becomes columns, the others rows.
template <class T>
Matrix<T> read_matrix(const TensorView& tensor) {
  Matrix<T> matrix;
  matrix.cols = tensor.size(tensor.rank - 1);
  for (double value : read_values(tensor)) matrix.values.push_back(static_cast<T>(value));
  matrix.rows = 1;
  for (int dim = 0; dim + 1 < tensor.rank; ++dim) matrix.rows *= tensor.size(dim);
  return matrix;
}

template <class T>
void write_matrix(const TensorView& tensor, const Matrix<T>& matrix) {
  write_values(tensor, {matrix.values.begin(), matrix.values.end()});
}

template <class T>
void add_matrix(const TensorView& tensor, const Matrix<T>& matrix) {
  Matrix<T> sum = read_matrix<T>(tensor);
  add(sum, matrix);
  write_matrix(tensor, sum);
}

// A view of a dense result.
template <class T>
TensorView dense_view(std::vector<T>& values, std::initializer_list<Index> sizes) {
  return TensorView::contiguous(values.data(), std::is_same_v<T, double> ? DType::f64 : DType::f32,
                                sizes);
}

// Index tensors. Lists run along the last dimension and end with -1 entries.
std::vector<Index> read_indices(const TensorView& tensor);
void write_indices(const TensorView& tensor, const std::vector<Index>& indices);
Lists read_lists(const TensorView& tensor);
void write_lists(const TensorView& tensor, const Lists& lists);

// Codes do not fit into the doubles of read_values. Only the last dimension may be larger than 1.
std::vector<std::uint64_t> read_codes(const TensorView& tensor);
void write_codes(const TensorView& tensor, const std::vector<std::uint64_t>& codes);

}  // namespace coterie::ref
