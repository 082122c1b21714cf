// SPDX-License-Identifier: MIT
// Tolerance of each row of a result, and the check against it: docs/numerics.md, "Row by row". The
// rule applies to results in f32, bf16 or f16 on any device. The exact values come from the CPU in
// a wider type, for the selection that was made.
#pragma once

#include <string>
#include <vector>

#include "cases/problem.h"

namespace coterie::test {

// A tensor that violates the rule.
struct RowFinding {
  std::string tensor;
  std::int64_t row = 0;                   // index over all leading dimensions
  std::int64_t wrong = 0;                 // rows above their tolerance
  std::int64_t judged = 0;                // rows that were compared
  std::vector<std::int64_t> first_wrong;  // the first few of them
  double error = 0.0, tolerance = 0.0, norm = 0.0;
};
std::string describe(const RowFinding& finding);

// Exact values and tolerances of the rows of a problem, for a given selection.
class RowRule {
 public:
  // `selection`: the first tensors of `saved`, in host memory.
  RowRule(const cases::Problem& problem, const std::vector<TensorView>& selection);

  // All violations in the output and the gradients that are present.
  std::vector<RowFinding> check(const TensorView& out, const AttentionGradients& gradients) const;

  // The exact rows of a tensor and their tolerances.
  struct Rows {
    HostTensor exact;
    std::vector<double> tolerance;  // of the error's norm; negative: not checked
  };

 private:
  Rows out_, dq_, dk_, dv_, dcentroids_, dgate_, dlogit_scale_;
};

}  // namespace coterie::test
