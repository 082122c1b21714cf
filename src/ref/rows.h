// SPDX-License-Identifier: MIT
// Softmax over lists of keys. Every mechanism's weights are built from it.
//
//   W(i, j) = sum over the rows of query i of
//             factor * #(j in keys) * exp(s_ij) / (sum over l in keys of exp(s_il))
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "ref/matrix.h"

namespace coterie::ref {

// A query and the keys it attends to. A query may have several rows and a key may occur several
// times in one row; a row without keys has weight 0.
struct Row {
  Index query = 0;
  std::vector<Index> keys;
  double factor = 1.0;
};

// The weight of each entry of row.keys, without the factor.
template <class T>
std::vector<T> softmax(const Matrix<T>& logits, const Row& row) {
  T top = -std::numeric_limits<T>::infinity();
  for (Index key : row.keys) top = std::max(top, logits(row.query, key));
  std::vector<T> weights;
  T sum = 0;
  for (Index key : row.keys) {
    weights.push_back(std::exp(logits(row.query, key) - top));
    sum += weights.back();
  }
  for (T& weight : weights) weight /= sum;
  return weights;
}

template <class T>
Matrix<T> softmax_rows(const Matrix<T>& logits, const std::vector<Row>& rows) {
  Matrix<T> weights(logits.rows, logits.cols);
  for (const Row& row : rows) {
    const std::vector<T> p = softmax(logits, row);
    for (std::size_t e = 0; e < p.size(); ++e)
      weights(row.query, row.keys[e]) += static_cast<T>(row.factor) * p[e];
  }
  return weights;
}

// Adds the gradient of the logits: ds = factor p (dw - sum p dw).
template <class T>
void softmax_rows_backward(const Matrix<T>& logits, const std::vector<Row>& rows,
                           const Matrix<T>& dweights, Matrix<T>& dlogits) {
  for (const Row& row : rows) {
    const std::vector<T> p = softmax(logits, row);
    T mean = 0;
    for (std::size_t e = 0; e < p.size(); ++e) mean += p[e] * dweights(row.query, row.keys[e]);
    for (std::size_t e = 0; e < p.size(); ++e)
      dlogits(row.query, row.keys[e]) +=
          static_cast<T>(row.factor) * p[e] * (dweights(row.query, row.keys[e]) - mean);
  }
}

}  // namespace coterie::ref
