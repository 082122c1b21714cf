// SPDX-License-Identifier: MIT
// Every shared case: equal bits for repeated runs and any number of threads; empty items and NaN
// are handled.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <variant>

#include "cases/cases.h"
#include "cases/problem.h"
#include "coterie/random.h"
#include "coterie/runtime.h"
#include "tests/support/expect.h"
#include "tests/support/tensors.h"

namespace coterie {
namespace {

using cases::Case;
using cases::Pass;
using cases::Problem;

using Index = std::int64_t;

std::vector<TensorView> gradients_of(const Pass& run) {
  const AttentionGradients& g = run.gradients;
  std::vector<TensorView> views;
  for (const TensorView& view : {g.dq, g.dk, g.dv, g.dcentroids, g.dgate, g.dlogit_scale}) {
    if (view.present()) views.push_back(view);
  }
  return views;
}

Pass run_both(const Problem& problem) {
  Pass run = cases::run_forward(problem);
  cases::run_backward(problem, run);
  return run;
}

void expect_same(const Pass& a, const Pass& b) {
  EXPECT_TRUE(test::same_bits(a.result.out, b.result.out));
  for (std::size_t s = 0; s < a.result.saved.size(); ++s) {
    EXPECT_TRUE(test::same_bits(a.result.saved[s], b.result.saved[s])) << "saved " << s;
  }
  const std::vector<TensorView> left = gradients_of(a), right = gradients_of(b);
  for (std::size_t g = 0; g < left.size(); ++g) {
    EXPECT_TRUE(test::same_bits(left[g], right[g])) << "gradient " << g;
  }
}

class EveryCaseTest : public ::testing::TestWithParam<Case> {
 protected:
  void TearDown() override { set_threads(2); }
};

INSTANTIATE_TEST_SUITE_P(Cases, EveryCaseTest, ::testing::ValuesIn(cases::all()),
                         [](const auto& c) { return c.param.name; });

TEST_P(EveryCaseTest, GivesTheSameBitsWithAnyNumberOfThreads) {
  const Problem problem = cases::make_problem(GetParam(), 1);
  set_threads(1);
  const Pass expected = run_both(problem);
  for (int count : {1, 2, 3, 5}) {
    SCOPED_TRACE(std::to_string(count) + " threads");
    set_threads(count);
    expect_same(expected, run_both(problem));
  }
}

// Repeating the selection and the backward pass in used memory gives the same bits.
TEST_P(EveryCaseTest, SelectsTheSameAgainInUsedMemory) {
  const Problem problem = cases::make_problem(GetParam(), 2);
  const Pass expected = run_both(problem);
  Pass again = run_both(problem);
  attention_select(problem.mechanism, problem.inputs, again.result.saved, again.workspace);
  for (std::size_t s = 0; s < again.selection_count; ++s) {
    EXPECT_TRUE(test::same_bits(expected.result.saved[s], again.result.saved[s])) << s;
  }
  cases::run_backward(problem, again);
  expect_same(expected, again);
}

TEST_P(EveryCaseTest, GivesZerosForEmptyItems) {
  Case c = GetParam();
  if (c.lengths == cases::Lengths::packed) c.lengths = cases::Lengths::none;
  Problem problem = cases::make_problem(c, 3);
  const HostTensor lengths(DType::i32, {c.B});  // all 0
  problem.inputs.q_sequences = problem.inputs.k_sequences = test::padded(lengths);
  const Pass run = run_both(problem);
  for (double value : read_values(run.result.out)) ASSERT_EQ(value, 0.0);
  for (const TensorView& gradient : gradients_of(run)) {
    for (double value : read_values(gradient)) ASSERT_EQ(value, 0.0);
  }
}

// Whether the case is refused if the numbers of queries and keys differ.
bool is_self_attention(const Case& c) {
  const bool strict =
      c.spec.starts_with("routing") && c.causal && c.spec.find("causal=paper") == std::string::npos;
  return strict || c.spec.starts_with("lsh") || c.spec.starts_with("cast") ||
         c.spec.find("share_qk=true") != std::string::npos ||
         c.spec.find("near=") != std::string::npos;
}

std::vector<Case> cases_where(bool self_attention) {
  std::vector<Case> chosen;
  for (const Case& c : cases::all())
    if (is_self_attention(c) == self_attention) chosen.push_back(c);
  return chosen;
}

// The problem of a case with its queries but without keys in any sequence.
struct WithoutKeys {
  Problem problem;
  HostTensor none;

  explicit WithoutKeys(const Case& c) : problem(cases::make_problem(c, 4)) {
    const bool packed = c.lengths == cases::Lengths::packed;
    none = HostTensor(DType::i32,
                      {packed ? problem.inputs.k_sequences.cu_seqlens.size(0) : c.B});  // all 0
    problem.inputs.k_sequences = packed ? test::packed(none) : test::padded(none);
  }
};

class CrossAttentionTest : public EveryCaseTest {};
INSTANTIATE_TEST_SUITE_P(Cases, CrossAttentionTest, ::testing::ValuesIn(cases_where(false)),
                         [](const auto& c) { return c.param.name; });

TEST_P(CrossAttentionTest, GivesZerosWithoutKeys) {
  const WithoutKeys without(GetParam());
  const Pass run = run_both(without.problem);
  for (double value : read_values(run.result.out)) ASSERT_EQ(value, 0.0);
  for (const TensorView& gradient : gradients_of(run)) {
    for (double value : read_values(gradient)) ASSERT_EQ(value, 0.0);
  }
}

class SelfAttentionTest : public EveryCaseTest {};
INSTANTIATE_TEST_SUITE_P(Cases, SelfAttentionTest, ::testing::ValuesIn(cases_where(true)),
                         [](const auto& c) { return c.param.name; });

TEST_P(SelfAttentionTest, RefusesQueriesWithoutKeys) {
  const WithoutKeys without(GetParam());
  const std::string message = test::error_of([&] { run_both(without.problem); });
  EXPECT_NE(message.find("as many keys"), std::string::npos) << message;
}

// Number of tokens of the longest sequence; `rows` is the size in memory.
Index longest(const Sequences& sequences, Index rows) {
  Index most = sequences.lengths.present() || sequences.cu_seqlens.present() ? 0 : rows;
  for (double length : read_values(sequences.lengths))
    most = std::max(most, static_cast<Index>(length));
  const std::vector<double> ends = read_values(sequences.cu_seqlens);
  for (std::size_t i = 1; i < ends.size(); ++i)
    most = std::max(most, static_cast<Index>(ends[i] - ends[i - 1]));
  return most;
}

struct NumberOfClusters {
  Index operator()(const ClusteredParams& params) const { return params.clustering.clusters; }
  Index operator()(const ImprovedClusteredParams& params) const {
    return params.clustering.clusters;
  }
  Index operator()(const RoutingParams& params) const { return params.clusters; }
  template <class Params>
  Index operator()(const Params&) const {
    return 0;  // has no labels
  }
};

// The smallest and largest value that a selection of this name may have: labels are clusters,
// offsets are slots, and all others are tokens of a sequence.
std::pair<double, double> bounds_of(const Problem& problem, const TensorLayout& tensor) {
  const AttentionInputs& inputs = problem.inputs;
  const bool of_keys = tensor.name == "top_keys" || tensor.name.starts_with("k_");
  const Index tokens = of_keys ? longest(inputs.k_sequences, inputs.v.size(2))
                               : longest(inputs.q_sequences, inputs.q.size(2));
  if (tensor.name.ends_with("labels"))
    return {-1.0, std::visit(NumberOfClusters{}, problem.mechanism) - 1.0};
  if (!tensor.name.ends_with("offsets")) return {-1.0, tokens - 1.0};
  const auto* routing = std::get_if<RoutingParams>(&problem.mechanism);
  const Index in = routing && !of_keys ? std::min(routing->queries_in, routing->clusters) : 1;
  return {0.0, static_cast<double>(tokens * in)};
}

// NaN and infinities in the first batch entry: no crash, no index out of range, and no effect on
// the other entries.
TEST_P(EveryCaseTest, SurvivesNaN) {
  const Case& c = GetParam();
  const Problem clean = cases::make_problem(c, 5), spoilt = cases::make_problem(c, 5);
  const double odd[] = {std::nan(""), std::numeric_limits<double>::infinity(),
                        -std::numeric_limits<double>::infinity(), 1e30};
  std::uint32_t number = 0;
  for (const TensorView& tensor : {spoilt.inputs.q, spoilt.inputs.k, spoilt.inputs.v}) {
    if (!tensor.present()) continue;
    const RandomStream stream{6, RandomUse::data, number++};
    const TensorView first = tensor.narrowed(0, 0, 1);
    const std::vector<double> values = read_values(first);
    fill(first, [&](Index at) {
      const std::uint32_t draw = random_below(stream, static_cast<std::uint64_t>(at), 40);
      return draw < 4 ? odd[draw] : values[at];
    });
  }
  const Pass expected = run_both(clean), actual = run_both(spoilt);
  const SavedLayout layout = attention_saved(spoilt.mechanism, spoilt.inputs);
  for (std::size_t s = 0; s < actual.selection_count; ++s) {
    const auto [least, most] = bounds_of(spoilt, layout.tensors[s]);
    for (double index : read_values(actual.result.saved[s])) {
      ASSERT_GE(index, least) << layout.tensors[s].name;
      ASSERT_LE(index, most) << layout.tensors[s].name;
    }
  }
  for (Index b = 1; b < c.B; ++b) {
    const auto same = [&](const TensorView& a, const TensorView& d) {
      return test::same_bits(a.narrowed(0, b, 1), d.narrowed(0, b, 1));
    };
    EXPECT_TRUE(same(expected.result.out, actual.result.out));
    EXPECT_TRUE(same(expected.gradients.dq, actual.gradients.dq));
    EXPECT_TRUE(same(expected.gradients.dv, actual.gradients.dv));
    if (expected.gradients.dk.present()) {
      EXPECT_TRUE(same(expected.gradients.dk, actual.gradients.dk));
    }
  }
}

TEST(SeedTest, ChangesRandomClustersAndNothingElse) {
  for (const char* spec :
       {"clustered(clusters=7)", "clustered(clusters=7,clustering=hamming)",
        "clustered(clusters=7,clustering=hamming-keys)", "lsh(rounds=2,chunk=8,buckets=8)"}) {
    Problem problem = cases::make_problem({.spec = spec, .N = 113}, 1);
    const Pass before = cases::run_forward(problem);
    problem.inputs.seed += 1;
    const Pass after = cases::run_forward(problem);
    EXPECT_FALSE(test::same_bits(before.result.saved[0], after.result.saved[0])) << spec;
  }
  for (const char* spec :
       {"full", "oracle-top(topk=5)", "routing(clusters=4,window=9)", "cast(clusters=4,size=9)"}) {
    Problem problem = cases::make_problem({.spec = spec, .N = 113}, 1);
    const Pass before = cases::run_forward(problem);
    problem.inputs.seed += 1;
    EXPECT_TRUE(test::same_bits(before.result.out, cases::run_forward(problem).result.out)) << spec;
  }
}

TEST(SeedTest, HeadsAndItemsDrawTheirOwnNumbers) {
  const Problem problem =
      cases::make_problem({.spec = "clustered(clusters=7)", .N = 113, .Dk = 8}, 1);
  for (const TensorView& tensor : {problem.inputs.q, problem.inputs.k}) {  // all heads alike
    const std::vector<double> head = read_values(tensor.narrowed(0, 0, 1).narrowed(1, 0, 1));
    fill(tensor, [&](Index at) { return head[static_cast<std::size_t>(at) % head.size()]; });
  }
  const Pass run = cases::run_forward(problem);
  const auto labels = [&](Index b, Index h) {
    return run.result.saved[0].narrowed(0, b, 1).narrowed(1, h, 1);
  };
  EXPECT_FALSE(test::same_bits(labels(0, 0), labels(0, 1)));
  EXPECT_FALSE(test::same_bits(labels(0, 0), labels(1, 0)));
}

}  // namespace
}  // namespace coterie
