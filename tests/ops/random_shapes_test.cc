// SPDX-License-Identifier: MIT
// Random problems of every mechanism (tests/support/draw.h, smaller draws of the GPU stress test)
// against the specification, and row by row. Every run uses the same seeds. COTERIE_TEST_SEED=n
// runs only problem n; COTERIE_TEST_PROBLEMS=n sets the number of problems.
#include <gtest/gtest.h>

#include <cstdlib>
#include <iostream>

#include "cases/problem.h"
#include "coterie/runtime.h"
#include "tests/support/draw.h"
#include "tests/support/expect.h"
#include "tests/support/row_bounds.h"
#include "tests/support/selection_rule.h"

namespace coterie {
namespace {

using cases::Case;
using cases::Data;
using cases::Pass;
using cases::Problem;

constexpr std::uint64_t kFirstSeed = 1000;
constexpr std::uint64_t kProblems = 720, kLongProblems = 27;

// Whether there are ties that rounding decides, with too many outcomes to try: covariances of tied
// keys, Laplace affinities that round to 1, normalised integers, and opposite differences of two
// keys, which cancel.
bool has_rounded_ties(const Case& c) {
  const bool tied = c.data == Data::equal || c.data == Data::integers || c.data == Data::repeated ||
                    c.data == Data::huge || c.data == Data::zeros;
  return c.spec.find("laplace") != std::string::npos ||
         (tied && c.spec.find("clustering=keys") != std::string::npos) ||
         (c.S <= 4 && c.spec.find("hamming-keys") != std::string::npos) ||
         (tied && (c.spec.starts_with("routing") || c.spec.starts_with("cast")));
}

std::vector<TensorView> selection_of(const Pass& run) {
  return {run.result.saved.begin(),
          run.result.saved.begin() + static_cast<std::ptrdiff_t>(run.selection_count)};
}

void check_problem(std::uint64_t seed) {
  const Case c = test::draw_case(seed, test::Form::cpu);
  SCOPED_TRACE("COTERIE_TEST_SEED=" + std::to_string(seed) +
               " repeats this problem: " + test::describe(c));
  try {
    const Problem problem = cases::make_problem(c, seed);
    Pass run = cases::run_forward(problem);
    const bool finite = c.data != Data::nonfinite;
    if (finite) test::expect_written(run, false);
    if (finite && !has_rounded_ties(c)) test::expect_selection(problem, run);
    cases::run_backward(problem, run);
    if (finite) test::expect_written(run, true);
    const std::vector<TensorView> selection = selection_of(run);
    EXPECT_EQ(test::check_selection(problem, selection, seed), "");
    if (::testing::Test::HasFatalFailure()) return;
    // Logits of huge rows have errors above 1.
    if (finite && c.data != Data::huge) {
      test::expect_forward(problem, run);
      test::expect_backward(problem, run);
    }
    const test::RowRule rule(problem, selection);
    for (const test::RowFinding& finding : rule.check(run.result.out, run.gradients))
      ADD_FAILURE() << test::describe(finding);
  } catch (const std::exception& error) {
    ADD_FAILURE() << error.what();
  }
}

// The draws of the GPU stress test, computed on the CPU in their own type.
void check_long_problem(std::uint64_t seed) {
  const Case c = test::draw_case(seed, test::Form::gpu);
  SCOPED_TRACE("COTERIE_TEST_SEED=" + std::to_string(seed) +
               " repeats this problem: " + test::describe(c));
  try {
    const Problem problem = cases::make_problem(c, seed);
    Pass run = cases::run_forward(problem);
    cases::run_backward(problem, run);
    EXPECT_EQ(test::check_selection(problem, selection_of(run), seed), "");
    const test::RowRule rule(problem, selection_of(run));
    for (const test::RowFinding& finding : rule.check(run.result.out, run.gradients))
      ADD_FAILURE() << test::describe(finding);
  } catch (const std::exception& error) {
    ADD_FAILURE() << error.what();
  }
}

// Calls check(seed) for the requested seeds.
template <class Check>
void run_all(std::uint64_t problems, const Check& check) {
  set_threads(2);
  if (std::getenv("COTERIE_TEST_SEED") != nullptr)
    return check(test::number_from("COTERIE_TEST_SEED", 0));
  const std::uint64_t count = test::number_from("COTERIE_TEST_PROBLEMS", problems);
  std::cout << "problems " << kFirstSeed << " to " << kFirstSeed + count - 1 << "\n";
  for (std::uint64_t seed = kFirstSeed; seed < kFirstSeed + count; ++seed) check(seed);
}

TEST(RandomShapesTest, FollowTheSpecification) { run_all(kProblems, check_problem); }

TEST(RandomShapesTest, LongOnesFollowTheirRows) { run_all(kLongProblems, check_long_problem); }

// One row of a tensor with a thousand rows is set to 0.
TEST(RowRuleTest, FindsOneWrongRow) {
  for (const char* spec : {"full", "local(window=64)", "strided(stride=9)", "oracle-top(topk=20)",
                           "clustered(clusters=20)", "i-clustered(clusters=20,topk=20)",
                           "lsh(rounds=2,chunk=32,buckets=16)", "routing(clusters=8,window=64)",
                           "routing(clusters=8,membership=balanced)", "cast(clusters=8,size=40)"}) {
    SCOPED_TRACE(spec);
    const Problem problem =
        cases::make_problem(cases::make_case("one", spec, "B1 H4:2 N256 D64 bf16 scale=0.125"), 1);
    Pass run = cases::run_forward(problem);
    cases::run_backward(problem, run);
    const test::RowRule rule(problem, selection_of(run));
    ASSERT_TRUE(rule.check(run.result.out, run.gradients).empty());
    const AttentionGradients& g = run.gradients;
    for (const TensorView& tensor : {run.result.out, g.dq, g.dk, g.dv}) {
      if (!tensor.present()) continue;
      const TensorView row = tensor.narrowed(1, 1, 1).narrowed(2, 100, 1);
      const std::vector<double> values = read_values(row);
      fill(row, [](std::int64_t) { return 0.0; });
      const std::vector<test::RowFinding> found = rule.check(run.result.out, g);
      ASSERT_EQ(found.size(), 1u) << describe(tensor);
      EXPECT_EQ(found[0].wrong, 1);
      EXPECT_EQ(found[0].row, 256 + 100);
      write_values(row, values);
    }
  }
}

}  // namespace
}  // namespace coterie
