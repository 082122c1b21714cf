// SPDX-License-Identifier: MIT
// Row normalisation: zero mean and unit variance, without scale or bias.
#pragma once

#include <cmath>

#include "ref/matrix.h"

namespace coterie::ref {

// y = (x - mean) / sigma, sigma = sqrt(variance + 1e-6).
template <class T>
struct NormalisedRow {
  T mean = 0, sigma = 0;
};

template <class T>
NormalisedRow<T> moments_of_row(const Matrix<T>& x, Index row) {
  T mean = 0, variance = 0;
  for (Index d = 0; d < x.cols; ++d) mean += x(row, d);
  mean /= static_cast<T>(x.cols);
  for (Index d = 0; d < x.cols; ++d) variance += (x(row, d) - mean) * (x(row, d) - mean);
  variance /= static_cast<T>(x.cols);
  return {.mean = mean, .sigma = std::sqrt(variance + static_cast<T>(1e-6))};
}

template <class T>
Matrix<T> normalised_rows(Matrix<T> x) {
  for (Index i = 0; i < x.rows; ++i) {
    const NormalisedRow<T> moments = moments_of_row(x, i);
    for (Index d = 0; d < x.cols; ++d) x(i, d) = (x(i, d) - moments.mean) / moments.sigma;
  }
  return x;
}

// dx = (dy - mean(dy) - y mean(dy y)) / sigma; exact also with the constant in sigma.
template <class T>
Matrix<T> normalised_rows_backward(const Matrix<T>& x, const Matrix<T>& dy) {
  const Matrix<T> y = normalised_rows(x);
  Matrix<T> dx(x.rows, x.cols);
  for (Index i = 0; i < x.rows; ++i) {
    T mean = 0, mean_product = 0;
    for (Index d = 0; d < x.cols; ++d) {
      mean += dy(i, d) / static_cast<T>(x.cols);
      mean_product += dy(i, d) * y(i, d) / static_cast<T>(x.cols);
    }
    const T sigma = moments_of_row(x, i).sigma;
    for (Index d = 0; d < x.cols; ++d)
      dx(i, d) = (dy(i, d) - mean - y(i, d) * mean_product) / sigma;
  }
  return dx;
}

}  // namespace coterie::ref
