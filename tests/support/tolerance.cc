// SPDX-License-Identifier: MIT
#include "tests/support/tolerance.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace coterie::test {
namespace {

struct Format {
  int digits;        // of the significand, including the leading one
  int min_exponent;  // of the smallest normal number
};

Format format_of(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return {53, -1022};
    case DType::bf16:
      return {8, -126};
    case DType::f16:
      return {11, -14};
    default:
      return {24, -126};
  }
}

// Largest |a - b|; infinite if a NaN or an infinity has no equal counterpart.
double distance(const std::vector<double>& a, const std::vector<double>& b) {
  double largest = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (a[i] == b[i] || (std::isnan(a[i]) && std::isnan(b[i]))) continue;
    const double error = std::abs(a[i] - b[i]);
    if (!(error <= std::numeric_limits<double>::max())) {
      return std::numeric_limits<double>::infinity();
    }
    largest = std::max(largest, error);
  }
  return largest;
}

struct Bound {
  double naive_error = 0.0, scale = 0.0, allowed = 0.0;
};

Bound bound_of(DType dtype, const Expected& expected) {
  Bound bound;
  for (double value : expected.exact) {
    if (std::isfinite(value)) bound.scale = std::max(bound.scale, std::abs(value));
  }
  if (dtype == DType::f64) {
    // No naive computation is more precise than double, so scale float's error: errors are
    // proportional to the unit roundoff. The third multiple covers the specification's own error.
    bound.naive_error = std::ldexp(distance(expected.naive, expected.exact), 24 - 53);
    bound.allowed = 3.0 * bound.naive_error;
  } else {
    bound.naive_error = distance(rounded(dtype, expected.naive), expected.exact);
    bound.allowed = 2.0 * bound.naive_error;
  }
  bound.allowed +=
      2.0 * ulp(dtype, bound.scale) + 2.0 * ulp(accumulator_dtype(dtype), expected.magnitude);
  return bound;
}

::testing::AssertionResult judge(const std::string& name, double error, const Bound& bound) {
  if (error <= bound.allowed) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure()
         << name << ": error " << error << " above " << bound.allowed << "; the naive error is "
         << bound.naive_error << ", the largest value " << bound.scale;
}

}  // namespace

double ulp(DType dtype, double magnitude) {
  const Format format = format_of(dtype);
  const int exponent = magnitude > 0.0 ? std::ilogb(magnitude) : format.min_exponent;
  return std::ldexp(1.0, std::max(exponent, format.min_exponent) - format.digits + 1);
}

std::vector<double> rounded(DType dtype, const std::vector<double>& values) {
  const HostTensor tensor(dtype, {static_cast<std::int64_t>(values.size())});
  write_values(tensor, values);
  return read_values(tensor);
}

::testing::AssertionResult follows_rule(const std::string& name, const TensorView& actual,
                                        const Expected& expected) {
  const std::vector<double> values = read_values(actual);
  if (values.size() != expected.exact.size() || values.size() != expected.naive.size()) {
    return ::testing::AssertionFailure()
           << name << ": " << values.size() << " values; expected " << expected.exact.size();
  }
  return judge(name, distance(values, expected.exact), bound_of(actual.dtype, expected));
}

::testing::AssertionResult agrees(const std::string& name, const TensorView& actual,
                                  const TensorView& other, const Expected& expected) {
  Bound bound = bound_of(actual.dtype, expected);
  bound.allowed *= 2.0;
  return judge(name, distance(read_values(actual), read_values(other)), bound);
}

}  // namespace coterie::test
