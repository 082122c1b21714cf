// SPDX-License-Identifier: MIT
// The executable specification on every shared case: results are finite, zero in padding and for
// rows without keys, and float results are close to double results.
#include <gtest/gtest.h>

#include <algorithm>

#include "cases/cases.h"
#include "tests/ref/support.h"

namespace coterie::ref {
namespace {

class CaseTest : public testing::TestWithParam<cases::Case> {};

void expect_finite(const char* name, const std::vector<double>& values) {
  EXPECT_TRUE(std::ranges::all_of(values, [](double value) { return std::isfinite(value); }))
      << name;
}

TEST_P(CaseTest, IsFiniteAndNearlyTheSameInFloat) {
  const Selected selected = make_selected(GetParam());
  const cases::Problem& problem = selected.problem;
  const std::vector<double> out = selected.attend();
  const std::vector<double> grad_out = read_values(problem.grad_out);
  expect_finite("out", out);
  for (std::size_t e = 0; e < out.size(); ++e)
    EXPECT_TRUE(!std::isnan(grad_out[e]) || out[e] == 0.0) << "padding, element " << e;
  const Gradients<double> gradients = selected.backward();
  expect_finite("dq", gradients.dq);
  expect_finite("dk", gradients.dk);
  expect_finite("dv", gradients.dv);
  expect_finite("dcentroids", gradients.dcentroids);
  expect_finite("dgate", gradients.dgate);
  expect_finite("dlogit_scale", gradients.dlogit_scale);

  // A logit of size 16, summed from Dk products, has an error of at most 16 (Dk + 4) u, u = 2^-24.
  // A weight has twice that relative error (numerator and sum), and an output that times the
  // largest value, 4.
  const std::vector<float> in_float =
      attend<float>(problem.mechanism, problem.inputs, selected.saved);
  const double bound = std::ldexp(1.0, -24) * 16 * 2 * 4 * static_cast<double>(GetParam().Dk + 4);
  EXPECT_LT(largest_difference(out, {in_float.begin(), in_float.end()}), bound);
}

INSTANTIATE_TEST_SUITE_P(Table, CaseTest, testing::ValuesIn(cases::all()),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace coterie::ref
