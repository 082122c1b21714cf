// SPDX-License-Identifier: MIT
// Every shared case, on every instruction set of the machine, against the specification.
#include "coterie/attention.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <tuple>
#include <variant>

#include "cases/cases.h"
#include "cases/problem.h"
#include "coterie/runtime.h"
#include "coterie/spec.h"
#include "tests/support/expect.h"

namespace coterie {
namespace {

using cases::Case;

constexpr std::uint64_t kSeed = 20240607;

class AttentionTest : public ::testing::TestWithParam<std::tuple<Case, CpuIsa>> {
 protected:
  void SetUp() override {
    force_cpu_isa(std::get<CpuIsa>(GetParam()));
    set_threads(2);
  }
  void TearDown() override { force_cpu_isa(supported_cpu_isas().back()); }

  const Case& the_case() const { return std::get<Case>(GetParam()); }
};

// Scores of equal rows are equal with any rounding; scores of small integers are exact.
bool has_exact_scores(const Case& c) {
  const bool products_only = c.spec.starts_with("oracle-top");
  return c.data == cases::Data::equal || (c.data == cases::Data::integers && products_only);
}

TEST_P(AttentionTest, FollowsTheSpecification) {
  const cases::Problem problem = cases::make_problem(the_case(), kSeed);
  cases::Pass run = cases::run_forward(problem);
  test::expect_written(run, false);
  test::expect_selection(problem, run, has_exact_scores(the_case()));
  if (HasFailure()) return;  // with a wrong selection the outputs say nothing
  test::expect_forward(problem, run);
  cases::run_backward(problem, run);
  test::expect_written(run, true);
  test::expect_backward(problem, run);
}

// Products of bf16 are exact with every instruction. The log-sum-exps of two instruction sets
// therefore differ only by the rounding of sums, over 64 products and over the weights of 129 keys.
// If an instruction set rounds weights to bf16, outputs differ by half a unit of each weight and of
// the result.
TEST(Bf16Test, LevelsDifferByTheRoundingOfSumsAndWeights) {
  const Case wide{.name = "wide", .spec = "full", .N = 129, .Dk = 64, .dtype = DType::bf16};
  const cases::Problem problem = cases::make_problem(wide, kSeed);
  force_cpu_isa(supported_cpu_isas().front());
  const cases::Pass expected = cases::run_forward(problem);
  const std::vector<double> out = read_values(expected.result.out);
  const std::vector<double> lse = read_values(expected.result.saved[0]);
  for (const CpuIsa isa : supported_cpu_isas()) {
    force_cpu_isa(isa);
    const cases::Pass run = cases::run_forward(problem);
    const std::vector<double> other = read_values(run.result.saved[0]);
    for (std::size_t i = 0; i < lse.size(); ++i)
      ASSERT_NEAR(other[i], lse[i], 0x1p-24 * (64 + 129) * std::max(1.0, std::abs(lse[i])))
          << cpu_isa_name(isa) << " " << i;
    double largest = 0;  // of the values, whose mean an output is
    for (const double value : read_values(problem.inputs.v))
      largest = std::max(largest, std::abs(value));
    const std::vector<double> rounded = read_values(run.result.out);
    for (std::size_t i = 0; i < out.size(); ++i)
      ASSERT_NEAR(rounded[i], out[i], largest * 0x1p-9 + std::abs(out[i]) * 0x1p-7)
          << cpu_isa_name(isa) << " " << i;
  }
}

std::string test_name(const ::testing::TestParamInfo<AttentionTest::ParamType>& info) {
  return std::get<Case>(info.param).name + "_" + cpu_isa_name(std::get<CpuIsa>(info.param));
}

INSTANTIATE_TEST_SUITE_P(Cases, AttentionTest,
                         ::testing::Combine(::testing::ValuesIn(cases::all()),
                                            ::testing::ValuesIn(supported_cpu_isas())),
                         test_name);

TEST(CasesTest, NamesAreUniqueAndEveryMechanismAndTypeIsThere) {
  std::set<std::string> names;
  std::set<std::pair<std::size_t, DType>> seen;
  for (const Case& c : cases::all()) {
    EXPECT_TRUE(names.insert(c.name).second) << c.name;
    seen.insert({AttentionSpec::parse(c.spec).groups.at(0).mechanism.index(), c.dtype});
  }
  for (std::size_t mechanism = 0; mechanism < std::variant_size_v<Mechanism>; ++mechanism) {
    for (DType dtype : {DType::f32, DType::f64, DType::bf16, DType::f16}) {
      EXPECT_TRUE(seen.contains({mechanism, dtype}))
          << "mechanism " << mechanism << " in " << dtype_name(dtype);
    }
  }
}

// A selection can be reused: select followed by attend equals the forward pass.
TEST(AttentionPassesTest, SelectThenAttendIsForward) {
  for (const Case& c : cases::all()) {
    SCOPED_TRACE(c.name);
    const cases::Problem problem = cases::make_problem(c, kSeed);
    const cases::Pass forward = cases::run_forward(problem);
    cases::Pass halves = cases::prepare(problem);
    attention_select(problem.mechanism, problem.inputs, halves.result.saved, halves.workspace);
    attention_attend(problem.mechanism, problem.inputs, halves.result, halves.workspace);
    EXPECT_TRUE(test::same_bits(forward.result.out, halves.result.out));
    for (std::size_t s = 0; s < forward.result.saved.size(); ++s) {
      EXPECT_TRUE(test::same_bits(forward.result.saved[s], halves.result.saved[s])) << s;
    }
  }
}

// A gradient does not depend on which others are requested.
TEST(AttentionPassesTest, GradientsCanBeAskedForOneByOne) {
  for (const Case& c : cases::all()) {
    SCOPED_TRACE(c.name);
    const cases::Problem problem = cases::make_problem(c, kSeed);
    cases::Pass together = cases::run_forward(problem);
    cases::run_backward(problem, together);
    for (auto member : {&AttentionGradients::dq, &AttentionGradients::dk, &AttentionGradients::dv,
                        &AttentionGradients::dcentroids, &AttentionGradients::dgate,
                        &AttentionGradients::dlogit_scale}) {
      if (!(together.gradients.*member).present()) continue;
      cases::Pass alone = cases::run_forward(problem);
      AttentionGradients only;
      only.*member = alone.gradients.*member;
      attention_backward(problem.mechanism, problem.inputs, alone.result, problem.grad_out, only,
                         alone.workspace);
      EXPECT_TRUE(test::same_bits(together.gradients.*member, alone.gradients.*member));
    }
  }
}

}  // namespace
}  // namespace coterie
