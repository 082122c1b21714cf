// SPDX-License-Identifier: MIT
// How far each row of a result may be off, and whether it is: docs/numerics.md, "Row by row". The
// rule is for whoever computes in f32, bf16 or f16, on any device; the exact values come from the
// CPU in a longer type, for the selection that was made.
#pragma once

#include <string>
#include <vector>

#include "cases/problem.h"

namespace coterie::test {

// A tensor that broke the rule.
struct RowFinding {
  std::string tensor;
  std::int64_t row = 0;                   // of all leading dimensions
  std::int64_t wrong = 0;                 // rows above their tolerance
  std::int64_t judged = 0;                // rows that were compared
  std::vector<std::int64_t> first_wrong;  // some of them
  double error = 0.0, tolerance = 0.0, norm = 0.0;
};
std::string describe(const RowFinding& finding);

// What the rows of a problem must be near to, for a selection.
class RowRule {
 public:
  // `selection`: the first tensors of `saved`, in host memory.
  RowRule(const cases::Problem& problem, const std::vector<TensorView>& selection);

  // Everything that is wrong with the output and the gradients that are present.
  std::vector<RowFinding> check(const TensorView& out, const AttentionGradients& gradients) const;

  // Row sizes that a tensor's tolerances are relative to; -1: not judged.
  struct Rows {
    HostTensor exact;
    std::vector<double> tolerance;  // of the row's norm; negative: not judged
  };

 private:
  Rows out_, dq_, dk_, dv_, dcentroids_, dgate_, dlogit_scale_;
};

}  // namespace coterie::test
