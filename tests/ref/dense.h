// SPDX-License-Identifier: MIT
// A second implementation of every mechanism, to check the specification in code (src/ref): the
// weight matrix W of one item and head, written from the definition, dense, in double and without
// any function of src/ref. out = W v.
//
// Numbers carry a derivative (forward mode), so gradients need no finite differences. Selections
// compare values only and are constant for the derivative.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "coterie/mechanism.h"

namespace coterie::dense {

using Index = std::int64_t;

struct Number {
  double value = 0.0, slope = 0.0;

  Number() = default;
  Number(double v, double s = 0.0)
      : value(v), slope(s) {}  // NOLINT: implicit conversion of constants
};

inline Number operator+(Number a, Number b) { return {a.value + b.value, a.slope + b.slope}; }
inline Number operator-(Number a, Number b) { return {a.value - b.value, a.slope - b.slope}; }
inline Number operator*(Number a, Number b) {
  return {a.value * b.value, a.slope * b.value + a.value * b.slope};
}
inline Number operator/(Number a, Number b) {
  return {a.value / b.value, (a.slope - a.value / b.value * b.slope) / b.value};
}
inline Number& operator+=(Number& a, Number b) { return a = a + b; }
inline Number exp(Number x) { return {std::exp(x.value), std::exp(x.value) * x.slope}; }
inline Number log(Number x) { return {std::log(x.value), x.slope / x.value}; }
inline Number sqrt(Number x) { return {std::sqrt(x.value), x.slope / (2 * std::sqrt(x.value))}; }
inline Number erf(Number x) {
  return {std::erf(x.value), 2 / std::sqrt(M_PI) * std::exp(-x.value * x.value) * x.slope};
}

using Row = std::vector<Number>;
using Matrix = std::vector<Row>;

// The valid tokens of an item as one query head sees them.
struct Head {
  Matrix q, k, v;  // k is q where queries and keys are shared
  Matrix centroids;
  Row gate;
  Number logit_scale = 1.0;
  std::vector<std::vector<bool>> mask;  // empty: no mask
  double scale = 0.0;                   // as given; 0: the mechanism's default
  bool causal = false;
  std::uint64_t seed = 0;
  std::uint32_t problem = 0, kv_problem = 0;  // for random streams

  Index queries() const { return static_cast<Index>(q.size()); }
  Index keys() const { return static_cast<Index>(k.size()); }
};

// W of head `h`, queries x keys. The mechanism must be resolved; `heads` are all heads of the item.
Matrix weights(const Mechanism& mechanism, const std::vector<Head>& heads, std::size_t h);

}  // namespace coterie::dense
