// SPDX-License-Identifier: MIT
// The tolerance rule of docs/numerics.md: an error may be at most twice the naive implementation's,
// plus two units in the last place of the result's scale and of the terms that it sums.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "coterie/tensor.h"

namespace coterie::test {

// Distance between neighbouring numbers of a floating-point type at this magnitude.
double ulp(DType dtype, double magnitude);

// The values after a round trip through the type.
std::vector<double> rounded(DType dtype, const std::vector<double>& values);

// Expected values of a tensor, row-major: by the specification in double, by the naive
// implementation (the specification in float, not rounded further), and the size of the terms that
// are summed (magnitude.h).
struct Expected {
  std::vector<double> exact;
  std::vector<double> naive;
  double magnitude = 0.0;
};

::testing::AssertionResult follows_rule(const std::string& name, const TensorView& actual,
                                        const Expected& expected);

// Compares two computations of the same values; the bounds of both add up.
::testing::AssertionResult agrees(const std::string& name, const TensorView& actual,
                                  const TensorView& other, const Expected& expected);

}  // namespace coterie::test
