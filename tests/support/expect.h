// SPDX-License-Identifier: MIT
// Checks of a pass over a problem against the specification (src/ref) and the tolerance rule.
#pragma once

#include <vector>

#include "cases/problem.h"
#include "tests/support/tolerance.h"

namespace coterie::test {

// Exact and naive results of the forward or backward pass for the selection in `saved`.
struct ExpectedGradients {
  Expected dq, dk, dv, dcentroids, dgate, dlogit_scale;
};
Expected expected_out(const cases::Problem& problem, const std::vector<TensorView>& saved);
ExpectedGradients expected_gradients(const cases::Problem& problem,
                                     const std::vector<TensorView>& saved);

// The output and the requested gradients follow the rule for the selection that was made. Rows
// without keys and rows beyond an item's length are exactly 0.
void expect_forward(const cases::Problem& problem, const cases::Pass& run);
void expect_backward(const cases::Problem& problem, const cases::Pass& run);
void expect_gradients(const cases::Problem& problem, const cases::Pass& run,
                      const ExpectedGradients& expected);

// The selection equals the specification's, or rounding explains the difference. For top keys, the
// scores of exchanged keys differ by less than rounding. For other selections, the specification
// itself, in double or float, must make the same choice for slightly perturbed inputs: a float sum
// is the exact sum of terms perturbed by a few units in the last place (Higham, Accuracy and
// Stability, 3.1).
// exact: the selections must be equal (for data whose scores are exact).
void expect_selection(const cases::Problem& problem, const cases::Pass& run, bool exact = false);

// Every element of the views was written, and nothing outside them.
void expect_written(const cases::Pass& run, bool with_gradients);

// The same bits in the same places.
::testing::AssertionResult same_bits(const TensorView& a, const TensorView& b);

}  // namespace coterie::test
