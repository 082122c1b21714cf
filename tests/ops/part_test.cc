// SPDX-License-Identifier: MIT
// Every shared case: calls on some heads or some sequences of a call, which say so (CallPart),
// compute the bits of the call on all.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "cases/cases.h"
#include "cases/problem.h"
#include "coterie/mechanism.h"
#include "coterie/passes.h"
#include "tests/support/expect.h"
#include "tests/support/tensors.h"

namespace coterie {
namespace {

using cases::Case;
using cases::Pass;
using cases::Problem;
using test::error_of;

using Index = std::int64_t;

TensorView slice(const TensorView& tensor, int dim, Index index, Index count) {
  if (!tensor.present()) return {};
  const Index own = tensor.size(dim) / count;
  return tensor.narrowed(dim, index * own, own);
}

// Part `index` of `count` of the heads. Its views are those of `whole`.
Problem heads_of(const Problem& whole, Index index, Index count) {
  Problem part;
  part.mechanism = whole.mechanism;
  part.layout = whole.layout;
  part.inputs = whole.inputs;
  AttentionInputs& inputs = part.inputs;
  for (auto* tensor : {&inputs.q, &inputs.k, &inputs.v, &inputs.mask})
    *tensor = slice(*tensor, 1, index, count);
  for (auto* tensor : {&inputs.centroids, &inputs.logit_scale})
    *tensor = slice(*tensor, 0, index, count);
  part.grad_out = slice(whole.grad_out, 1, index, count);
  inputs.part.head_part = whole.inputs.part.head_part * count + index;
  inputs.part.head_parts = whole.inputs.part.head_parts * count;
  return part;
}

// One batch entry of padded or full sequences.
Problem row_of(const Problem& whole, Index row) {
  Problem part;
  part.mechanism = whole.mechanism;
  part.layout = whole.layout;
  part.inputs = whole.inputs;
  AttentionInputs& inputs = part.inputs;
  const Index rows = inputs.q.size(0);
  for (auto* tensor : {&inputs.q, &inputs.k, &inputs.v, &inputs.mask, &inputs.gate,
                       &inputs.q_sequences.lengths, &inputs.k_sequences.lengths})
    *tensor = slice(*tensor, 0, row, rows);
  part.grad_out = slice(whole.grad_out, 0, row, rows);
  inputs.part.first_item += row;
  return part;
}

// `selection` is that of a call on all heads, or empty.
Pass run(const Problem& problem, const std::vector<TensorView>& selection = {}) {
  Pass pass;
  if (selection.empty()) {
    pass = cases::run_forward(problem);
  } else {
    pass = cases::prepare(problem);
    for (std::size_t i = 0; i < selection.size(); ++i) {
      const std::vector<double> values = read_values(selection[i]);
      write_values(pass.result.saved[i], values);
    }
    attention_attend(problem.mechanism, problem.inputs, pass.result, pass.workspace);
  }
  cases::run_backward(problem, pass);
  return pass;
}

// The cases with at least two of something.
std::vector<Case> cases_with_several(Index Case::*number) {
  std::vector<Case> chosen = cases::all();
  std::erase_if(chosen, [&](const Case& c) { return c.*number < 2; });
  return chosen;
}

class HeadsTest : public ::testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Cases, HeadsTest, ::testing::ValuesIn(cases_with_several(&Case::Hkv)),
                         [](const auto& c) { return c.param.name; });

TEST_P(HeadsTest, ComputeWhatTheyDoAmongAll) {
  const Problem whole = cases::make_problem(GetParam(), 4);
  const Index heads = whole.inputs.v.size(1);  // key/value heads
  const Pass expected = run(whole);
  std::vector<TensorView> selection;
  if (selects_together(whole.mechanism))
    selection.assign(expected.result.saved.begin(),
                     expected.result.saved.begin() + expected.selection_count);
  for (Index index = 0; index < heads; ++index) {
    const Problem part = heads_of(whole, index, heads);
    const Pass own = run(part, selection);
    const auto expect_same = [&](const TensorView& got, const TensorView& all, int dim,
                                 const char* what) {
      if (!all.present()) return;
      EXPECT_TRUE(test::same_bits(got, slice(all, dim, index, heads))) << what << " " << index;
    };
    expect_same(own.result.out, expected.result.out, 1, "out");
    const AttentionGradients &got = own.gradients, &all = expected.gradients;
    expect_same(got.dq, all.dq, 1, "dq");
    expect_same(got.dk, all.dk, 1, "dk");
    expect_same(got.dv, all.dv, 1, "dv");
    expect_same(got.dcentroids, all.dcentroids, 0, "dcentroids");
    expect_same(got.dlogit_scale, all.dlogit_scale, 0, "dlogit_scale");
  }
}

class SequencesTest : public ::testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Cases, SequencesTest, ::testing::ValuesIn(cases_with_several(&Case::B)),
                         [](const auto& c) { return c.param.name; });

TEST_P(SequencesTest, ComputeWhatTheyDoAmongAll) {
  const Problem whole = cases::make_problem(GetParam(), 5);
  const Index rows = whole.inputs.q.size(0);
  const Pass expected = run(whole);
  for (Index row = 0; row < rows; ++row) {
    const Pass own = run(row_of(whole, row));
    EXPECT_TRUE(test::same_bits(own.result.out, slice(expected.result.out, 0, row, rows))) << row;
    EXPECT_TRUE(test::same_bits(own.gradients.dq, slice(expected.gradients.dq, 0, row, rows)));
    EXPECT_TRUE(test::same_bits(own.gradients.dv, slice(expected.gradients.dv, 0, row, rows)));
  }
}

TEST(Part, OneThatDoesNotExistIsRefused) {
  Problem problem = cases::make_problem(cases::make_case("full", "full", "N8 D8"), 1);
  problem.inputs.part = {0, 2, 2};
  EXPECT_EQ(error_of([&] { cases::run_forward(problem); }),
            "[full] expected a first item of at least 0 and a part of the heads below their "
            "number; got item 0 and part 2 of 2");
}

}  // namespace
}  // namespace coterie
