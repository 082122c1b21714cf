// SPDX-License-Identifier: MIT
// Dense row-major matrices and the three products that the formulas use.
#pragma once

#include <cstdint>
#include <vector>

namespace coterie::ref {

using Index = std::int64_t;

template <class T>
struct Matrix {
  Index rows = 0, cols = 0;
  std::vector<T> values;

  Matrix() = default;
  Matrix(Index num_rows, Index num_cols)
      : rows(num_rows), cols(num_cols), values(static_cast<std::size_t>(num_rows * num_cols)) {}

  T& operator()(Index i, Index j) { return values[static_cast<std::size_t>(i * cols + j)]; }
  T operator()(Index i, Index j) const { return values[static_cast<std::size_t>(i * cols + j)]; }
};

// a b
template <class T>
Matrix<T> multiply(const Matrix<T>& a, const Matrix<T>& b) {
  Matrix<T> product(a.rows, b.cols);
  for (Index i = 0; i < a.rows; ++i)
    for (Index k = 0; k < a.cols; ++k)
      for (Index j = 0; j < b.cols; ++j) product(i, j) += a(i, k) * b(k, j);
  return product;
}

// a^T b
template <class T>
Matrix<T> transposed_multiply(const Matrix<T>& a, const Matrix<T>& b) {
  Matrix<T> product(a.cols, b.cols);
  for (Index k = 0; k < a.rows; ++k)
    for (Index i = 0; i < a.cols; ++i)
      for (Index j = 0; j < b.cols; ++j) product(i, j) += a(k, i) * b(k, j);
  return product;
}

// a b^T: the inner product of every row of a with every row of b.
template <class T>
Matrix<T> inner_products(const Matrix<T>& a, const Matrix<T>& b) {
  Matrix<T> product(a.rows, b.rows);
  for (Index i = 0; i < a.rows; ++i)
    for (Index j = 0; j < b.rows; ++j)
      for (Index d = 0; d < a.cols; ++d) product(i, j) += a(i, d) * b(j, d);
  return product;
}

template <class T>
Matrix<T> scaled(Matrix<T> matrix, T factor) {
  for (T& value : matrix.values) value *= factor;
  return matrix;
}

template <class T>
void add(Matrix<T>& sum, const Matrix<T>& term) {
  for (std::size_t t = 0; t < sum.values.size(); ++t) sum.values[t] += term.values[t];
}

}  // namespace coterie::ref
