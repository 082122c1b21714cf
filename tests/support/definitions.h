// SPDX-License-Identifier: MIT
// Small reference implementations in double for tests of operations.
#pragma once

#include <cmath>
#include <cstddef>
#include <vector>

namespace coterie::test {

// argmax_c x . centroid_c + bias_c of every row over one head's centroids; the first one if tied.
inline std::vector<double> nearest_rows(const std::vector<double>& x,
                                        const std::vector<double>& centroids,
                                        const std::vector<double>& bias, std::size_t dim) {
  std::vector<double> labels;
  for (std::size_t i = 0; i < x.size(); i += dim) {
    double best_score = 0;
    std::size_t best = 0;
    for (std::size_t c = 0; c * dim < centroids.size(); ++c) {
      double score = bias.empty() ? 0.0 : bias[c];
      for (std::size_t d = 0; d < dim; ++d) score += x[i + d] * centroids[c * dim + d];
      if (c == 0 || score > best_score) {
        best = c;
        best_score = score;
      }
    }
    labels.push_back(static_cast<double>(best));
  }
  return labels;
}

enum class Normalisation { unit_variance, unit_length };

// Rows of zero mean and unit variance, or of unit length.
inline std::vector<double> normalised(std::vector<double> x, std::size_t dim,
                                      Normalisation kind = Normalisation::unit_variance) {
  for (std::size_t first = 0; first < x.size(); first += dim) {
    double mean = 0, square = 0;
    for (std::size_t d = first; d < first + dim; ++d) mean += x[d] / static_cast<double>(dim);
    if (kind == Normalisation::unit_length) mean = 0;
    for (std::size_t d = first; d < first + dim; ++d) square += (x[d] - mean) * (x[d] - mean);
    const double norm = kind == Normalisation::unit_length
                            ? std::sqrt(square)
                            : std::sqrt(square / static_cast<double>(dim) + 1e-6);
    for (std::size_t d = first; d < first + dim; ++d) x[d] = (x[d] - mean) / norm;
  }
  return x;
}

}  // namespace coterie::test
