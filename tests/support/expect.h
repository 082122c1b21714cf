// SPDX-License-Identifier: MIT
// What must hold after a pass over a problem, by the specification (src/ref) and the tolerance
// rule.
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

// The output, and the gradients that were asked for, follow the rule for the selection that was
// made; rows that see nothing and rows beyond an item's length are exactly 0.
void expect_forward(const cases::Problem& problem, const cases::Pass& run);
void expect_backward(const cases::Problem& problem, const cases::Pass& run);
void expect_gradients(const cases::Problem& problem, const cases::Pass& run,
                      const ExpectedGradients& expected);

// The selection is the specification's. Where it is not, rounding must be able to explain it. Of
// top keys: those that were exchanged have scores that differ by less than rounding. Of others: a
// float sum is the exact sum of terms moved by a few units in the last place (Higham, Accuracy and
// Stability, 3.1), so the specification itself, in double or float, must make that choice for
// inputs moved so little.
// exact: no such excuse, for data whose scores are exact.
void expect_selection(const cases::Problem& problem, const cases::Pass& run, bool exact = false);

// Every element was written, and none outside of the views.
void expect_written(const cases::Pass& run, bool with_gradients);

// The same bits in the same places.
::testing::AssertionResult same_bits(const TensorView& a, const TensorView& b);

}  // namespace coterie::test
