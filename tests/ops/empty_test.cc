// SPDX-License-Identifier: MIT
// Calls without queries, keys or batch entries: all outputs are written, with the values of an
// empty sum. tests/gpu/empty_gpu_test.cc does the same on a GPU.
#include "tests/support/empty.h"

#include <gtest/gtest.h>

#include <cmath>

#include "tests/support/tensors.h"

namespace coterie {
namespace {

class EmptyTest : public ::testing::TestWithParam<test::EmptyCase> {};

TEST_P(EmptyTest, WritesEverything) {
  const cases::Problem problem = test::empty_problem(GetParam());
  cases::Pass run = cases::run_forward(problem);
  cases::run_backward(problem, run);
  for (double value : read_values(run.result.out)) ASSERT_EQ(value, 0);
  const AttentionGradients& gradients = run.gradients;
  for (const TensorView* gradient :
       {&gradients.dq, &gradients.dk, &gradients.dv, &gradients.dcentroids, &gradients.dgate,
        &gradients.dlogit_scale})
    for (double value : read_values(*gradient)) ASSERT_EQ(value, 0);
  const auto layout = attention_saved(problem.mechanism, problem.inputs).tensors;
  constexpr double kPoison = 0x7F7F7F7F;
  for (std::size_t i = 0; i < layout.size(); ++i)
    for (double value : read_values(run.result.saved[i])) {
      if (layout[i].name.find("lse") != std::string::npos) {
        ASSERT_EQ(value, -INFINITY) << layout[i].name;
      }
      ASSERT_FALSE(std::isnan(value)) << layout[i].name;
      ASSERT_NE(value, kPoison) << layout[i].name;
    }
}

INSTANTIATE_TEST_SUITE_P(Cases, EmptyTest, ::testing::ValuesIn(test::empty_cases()),
                         [](const auto& test) { return test.param.problem.name; });

TEST(EmptyHeadsTest, AreRefused) {
  AttentionInputs inputs;
  inputs.q = inputs.k = inputs.v = TensorView::contiguous(nullptr, DType::f32, {2, 0, 8, 16});
  EXPECT_NE(
      test::error_of([&] { attention_saved(FullParams{}, inputs); }).find("at least one head"),
      std::string::npos);
}

}  // namespace
}  // namespace coterie
