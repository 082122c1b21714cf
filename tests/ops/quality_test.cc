// SPDX-License-Identifier: MIT
// Quality of forward passes: full attention's weights, kept mass, error and bounds, on every case.
#include "coterie/quality.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "cases/cases.h"
#include "cases/problem.h"
#include "coterie/error.h"
#include "coterie/runtime.h"
#include "ref/ref.h"
#include "tests/support/draw.h"

namespace coterie {
namespace {

using cases::Case;
using cases::Pass;
using cases::Problem;
using Index = std::int64_t;

// Of a few hundred operations in double on logits of a few thousand at the most.
constexpr double kRounding = 1e-9;

class QualityOfCase : public ::testing::TestWithParam<Case> {
 protected:
  void TearDown() override { set_threads(2); }
};

std::vector<Case> finite_cases() {
  std::vector<Case> found;
  for (const Case& c : cases::all()) {
    if (c.data != cases::Data::nonfinite && c.dropout == 0) found.push_back(c);
  }
  return found;
}

INSTANTIATE_TEST_SUITE_P(Cases, QualityOfCase, ::testing::ValuesIn(finite_cases()),
                         [](const auto& c) { return c.param.name; });

Problem double_problem(Case c) {
  c.dtype = DType::f64;
  return cases::make_problem(c, 1);
}

// The keys of the mechanisms that attend to some keys only, with the weights of full attention.
bool selects(const Mechanism& mechanism) {
  return takes_mask(mechanism) || std::holds_alternative<RoutingParams>(mechanism);
}

TEST_P(QualityOfCase, FullWeightsAreThoseOfTheSpecification) {
  const Problem problem = double_problem(GetParam());
  const std::vector<double> weights = full_attention_weights(problem.mechanism, problem.inputs);
  const Index keys = problem.inputs.v.size(2);
  for (std::size_t row = 0; row < weights.size() / keys; ++row) {
    double sum = 0;
    for (Index j = 0; j < keys; ++j) sum += weights[row * keys + j];
    EXPECT_NEAR(sum, sum > 0.5 ? 1 : 0, kRounding);
  }
  if (row_form(problem.mechanism) != RowForm::plain) return;
  AttentionInputs inputs = problem.inputs;
  inputs.centroids = inputs.gate = {};
  inputs.causal = resolve_causality(problem.mechanism, inputs.causal) != Causality::none;
  const std::vector<double> wanted = ref::weights<double>(FullParams{}, inputs, {});
  ASSERT_EQ(weights.size(), wanted.size());
  for (std::size_t i = 0; i < wanted.size(); ++i) EXPECT_NEAR(weights[i], wanted[i], kRounding);
}

TEST_P(QualityOfCase, MassAndErrorsAreThoseOfTheWeights) {
  const Problem problem = double_problem(GetParam());
  if (problem.inputs.q_sequences.lengths.present()) return;  // not every row is in the sample
  const Pass pass = cases::run_forward(problem);
  const Index B = problem.inputs.q.size(0), H = problem.inputs.q.size(1),
              N = problem.inputs.q.size(2), S = problem.inputs.v.size(2),
              D = problem.inputs.v.size(3), sharing = H / problem.inputs.v.size(1);
  const AttentionQuality quality =
      attention_quality(problem.mechanism, problem.inputs, pass.result, N);
  ASSERT_EQ(quality.rows, N);
  const std::vector<double> full = full_attention_weights(problem.mechanism, problem.inputs);
  const std::vector<double> own =
      ref::weights<double>(problem.mechanism, problem.inputs, pass.result.saved);
  const std::vector<double> v = read_values(problem.inputs.v), out = read_values(pass.result.out);
  for (Index row = 0; row < B * H * N; ++row) {
    const Index head = row / N, b = head / H, first = (b * H + head % H) / sharing * S;
    double kept = 0, error = 0, norm = 0;
    for (Index j = 0; j < S; ++j) {
      if (own[row * S + j] > 0) kept += full[row * S + j];
    }
    for (Index d = 0; d < D; ++d) {
      double exact = 0;
      for (Index j = 0; j < S; ++j) {  // rows outside of items are NaN
        if (full[row * S + j] > 0) exact += full[row * S + j] * v[(first + j) * D + d];
      }
      error += std::pow(out[row * D + d] - exact, 2);
      norm += exact * exact;
    }
    EXPECT_NEAR(quality.error[row], std::sqrt(error), kRounding * (1 + std::sqrt(norm)));
    EXPECT_NEAR(quality.norm[row], std::sqrt(norm), kRounding * (1 + std::sqrt(norm)));
    if (!quality.mass.empty() && selects(problem.mechanism) && !std::isnan(quality.mass[row])) {
      EXPECT_NEAR(quality.mass[row], kept, kRounding) << "row " << row;
    }
  }
}

TEST_P(QualityOfCase, BoundsHoldAndDoNotDependOnTheNumberOfThreads) {
  const Problem problem = cases::make_problem(GetParam(), 1);
  const Pass pass = cases::run_forward(problem);
  set_threads(1);
  const AttentionQuality one =
      attention_quality(problem.mechanism, problem.inputs, pass.result, 40);
  for (std::size_t i = 0; i < one.bound.size(); ++i) EXPECT_LE(one.error[i], one.bound[i]) << i;
  set_threads(3);
  const AttentionQuality three =
      attention_quality(problem.mechanism, problem.inputs, pass.result, 40);
  EXPECT_EQ(one.error, three.error);
  EXPECT_EQ(one.bound, three.bound);
}

TEST(Quality, RefusesDropout) {
  Problem problem = cases::make_problem(cases::all()[0], 1);
  problem.inputs.dropout = 0.1;
  const Pass pass = cases::run_forward(problem);
  EXPECT_THROW(attention_quality(problem.mechanism, problem.inputs, pass.result, 1), Error);
}

// Of every mechanism that has bounds, with all types, layouts and kinds of data.
TEST(Quality, BoundsHoldOnRandomProblems) {
  const std::uint64_t first = test::number_from("COTERIE_TEST_SEED", 3000);
  const std::uint64_t last =
      first + test::number_from("COTERIE_TEST_PROBLEMS", first == 3000 ? 900 : 1);
  Index rows = 0;
  std::vector<double> ratios;  // of clustered forms
  for (std::uint64_t seed = first; seed < last; ++seed) {
    Case c = test::draw_case(seed, test::Form::cpu);
    if (c.data == cases::Data::nonfinite) continue;
    c.dropout = 0;
    SCOPED_TRACE("COTERIE_TEST_SEED=" + std::to_string(seed) +
                 " repeats this problem: " + test::describe(c));
    const Problem problem = cases::make_problem(c, seed);
    const Pass pass = cases::run_forward(problem);
    const AttentionQuality quality =
        attention_quality(problem.mechanism, problem.inputs, pass.result, 32);
    for (std::size_t i = 0; i < quality.bound.size(); ++i) {
      ASSERT_LE(quality.error[i], quality.bound[i]) << "row " << i;
      ++rows;
      const bool clustered = c.spec.find("clustered") != std::string::npos;
      if (clustered && c.dtype != DType::bf16 && c.dtype != DType::f16 &&
          quality.error[i] > 1e-3 * quality.norm[i])
        ratios.push_back(quality.bound[i] / quality.error[i]);
    }
  }
  if (first != 3000) return;
  EXPECT_GT(rows, 5000);
  ASSERT_GT(ratios.size(), 500u);
  std::nth_element(ratios.begin(), ratios.begin() + ratios.size() / 2, ratios.end());
  EXPECT_LT(ratios[ratios.size() / 2], 20);
}

TEST(Quality, RefusesASampleWithoutRows) {
  const Problem problem = cases::make_problem(cases::all()[0], 1);
  const Pass pass = cases::run_forward(problem);
  EXPECT_THROW(attention_quality(problem.mechanism, problem.inputs, pass.result, 0), Error);
}

}  // namespace
}  // namespace coterie
