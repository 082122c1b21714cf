// SPDX-License-Identifier: MIT
// Attention dropout: how often weights are dropped and with which factor, that the choices of rows,
// keys, heads, items and seeds are independent, that members of a cluster share theirs, and that
// the mean over seeds is the output without dropout. Gradients: tests/ref/gradient_test.cc; equal
// bits for any number of threads: the shared cases.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "cases/problem.h"
#include "tests/support/expect.h"
#include "tests/support/tensors.h"

namespace coterie {
namespace {

using cases::Case;
using cases::Pass;
using cases::Problem;

using Index = std::int64_t;

constexpr Index kDropItems = 3, kDropHeads = 4, kDropRows = 48;

// Values are the unit vectors, so an output is its row of weights: (items, heads, rows, keys).
Problem dropout_problem(const char* spec, double p, std::uint64_t seed = 1) {
  Case c{.name = "weights",
         .spec = spec,
         .B = kDropItems,
         .H = kDropHeads,
         .N = kDropRows,
         .Dk = 8,
         .Dv = kDropRows,
         .dtype = DType::f64};
  c.dropout = p;
  Problem problem = cases::make_problem(cases::completed(c), 1);
  problem.inputs.dropout_seed = seed;
  fill(problem.inputs.v,
       [](Index i) { return i / kDropRows % kDropRows == i % kDropRows ? 1.0 : 0.0; });
  return problem;
}

std::vector<double> dropped_weights(const Problem& problem) {
  return read_values(cases::run_forward(problem).result.out);
}

std::size_t weight_place(Index item, Index head, Index row, Index key) {
  return static_cast<std::size_t>(((item * kDropHeads + head) * kDropRows + row) * kDropRows + key);
}

// Whether `count` of `total` is within five standard deviations of the share.
void expect_share(double count, double total, double share) {
  EXPECT_NEAR(count / total, share, 5 * std::sqrt(share * (1 - share) / total));
}

class DropoutTest : public testing::TestWithParam<double> {};

TEST_P(DropoutTest, KeepsTheShareOfWeightsAndTheirFactor) {
  const double p = GetParam();
  const std::vector<double> whole = dropped_weights(dropout_problem("full", 0)),
                            some = dropped_weights(dropout_problem("full", p));
  double kept = 0;
  for (std::size_t i = 0; i < some.size(); ++i) {
    if (some[i] == 0) continue;
    ++kept;
    EXPECT_NEAR(some[i] * (1 - p), whole[i], 1e-9 * whole[i]);
  }
  expect_share(kept, static_cast<double>(some.size()), 1 - p);
}

TEST_P(DropoutTest, IsIndependentBetweenRowsKeysHeadsItemsAndSeeds) {
  const double p = GetParam();
  const std::vector<double> some = dropped_weights(dropout_problem("full", p)),
                            other = dropped_weights(dropout_problem("full", p, 2));
  const double equal = p * p + (1 - p) * (1 - p);
  const auto compare = [&](const char* name, const std::vector<double>& with, Index item,
                           Index head, Index row, Index key) {
    SCOPED_TRACE(name);
    double agreements = 0, pairs = 0;
    for (Index b = 0; b + item < kDropItems; ++b)
      for (Index h = 0; h + head < kDropHeads; ++h)
        for (Index i = 0; i + row < kDropRows; ++i)
          for (Index j = 0; j + key < kDropRows; ++j, ++pairs)
            agreements += (some[weight_place(b, h, i, j)] == 0) ==
                          (with[weight_place(b + item, h + head, i + row, j + key)] == 0);
    expect_share(agreements, pairs, equal);
  };
  compare("rows", some, 0, 0, 1, 0);
  compare("keys", some, 0, 0, 0, 1);
  compare("keys, two apart", some, 0, 0, 0, 2);
  compare("diagonal", some, 0, 0, 1, 1);
  compare("heads", some, 0, 1, 0, 0);
  compare("items", some, 1, 0, 0, 0);
  compare("seeds", other, 0, 0, 0, 0);
}

// The keys that a row keeps vary as independent draws do: the variance of their number.
TEST_P(DropoutTest, NumbersOfKeptKeysHaveTheVarianceOfIndependentDraws) {
  const double p = GetParam();
  const std::vector<double> some = dropped_weights(dropout_problem("full", p));
  const Index rows = kDropItems * kDropHeads * kDropRows;
  double squares = 0;
  for (Index r = 0; r < rows; ++r) {
    double kept = 0;
    for (Index j = 0; j < kDropRows; ++j)
      kept += some[static_cast<std::size_t>(r * kDropRows + j)] != 0;
    squares += std::pow(kept - (1 - p) * kDropRows, 2);
  }
  const double variance = kDropRows * p * (1 - p);
  // A sample variance of n normal numbers has a relative deviation of sqrt(2 / n).
  EXPECT_NEAR(squares / rows, variance, 5 * variance * std::sqrt(2.0 / rows));
}

INSTANTIATE_TEST_SUITE_P(Probabilities, DropoutTest, testing::Values(0.1, 0.5, 0.9));

TEST(Dropout, MembersOfAClusterDropTheSameKeys) {
  for (const char* spec : {"clustered(clusters=5)", "i-clustered(clusters=5,topk=6)"}) {
    SCOPED_TRACE(spec);
    const Problem problem = dropout_problem(spec, 0.5);
    const Pass run = cases::run_forward(problem);
    const std::vector<double> weights = read_values(run.result.out),
                              labels = read_values(run.result.saved[0]);
    const bool top = run.selection_count > 3;
    const std::vector<double> lists = top ? read_values(run.result.saved[3]) : labels;
    Index shared = 0, own = 0;
    for (Index h = 0; h < kDropItems * kDropHeads; ++h)
      for (Index i = 1; i < kDropRows; ++i) {
        const auto row = static_cast<std::size_t>(h * kDropRows + i);
        const auto first =
            static_cast<std::size_t>(std::find(labels.begin() + h * kDropRows,
                                               labels.begin() + h * kDropRows + i, labels[row]) -
                                     labels.begin());
        if (first == row) continue;
        for (Index j = 0; j < kDropRows; ++j) {
          const auto list = lists.begin() + (h * 5 + static_cast<Index>(labels[row])) * 6;
          const bool listed = top && std::find(list, list + 6, static_cast<double>(j)) != list + 6;
          const bool equal = (weights[row * kDropRows + static_cast<std::size_t>(j)] == 0) ==
                             (weights[first * kDropRows + static_cast<std::size_t>(j)] == 0);
          if (listed)
            own += !equal;
          else
            EXPECT_TRUE(equal);
          shared += !listed;
        }
      }
    EXPECT_GT(shared, 0);
    EXPECT_EQ(own > 0, top);  // top keys are dropped for each query
  }
}

// Over many seeds, with the selection of one of them.
TEST(Dropout, MeanOverSeedsIsTheOutputWithoutDropout) {
  constexpr int kDropSeeds = 300;
  for (const char* spec :
       {"full", "oracle-top(topk=9)", "clustered(clusters=5)", "i-clustered(clusters=5,topk=6)",
        "i-clustered(clusters=5,topk=6,near=4)", "lsh(rounds=2,chunk=8,buckets=4)",
        "routing(clusters=4,window=16)", "cast(clusters=4,size=12)"}) {
    SCOPED_TRACE(spec);
    Case c{.name = "mean", .spec = spec, .B = 1, .H = 2, .N = 40, .Dk = 8, .dtype = DType::f64};
    Problem problem = cases::make_problem(cases::completed(c), 3);
    const Pass run = cases::run_forward(problem);
    const std::vector<double> whole = read_values(run.result.out);
    std::vector<double> sum(whole.size()), squares(whole.size());
    problem.inputs.dropout = 0.3;
    for (int seed = 0; seed < kDropSeeds; ++seed) {
      problem.inputs.dropout_seed = static_cast<std::uint64_t>(seed);
      attention_attend(problem.mechanism, problem.inputs, run.result, run.workspace);
      const std::vector<double> out = read_values(run.result.out);
      for (std::size_t i = 0; i < out.size(); ++i) {
        sum[i] += out[i] / kDropSeeds;
        squares[i] += out[i] * out[i] / kDropSeeds;
      }
    }
    for (std::size_t i = 0; i < sum.size(); ++i) {
      const double deviation = std::sqrt(std::max(squares[i] - sum[i] * sum[i], 0.0) / kDropSeeds);
      EXPECT_EQ(deviation > 0, whole[i] != 0);  // routing: a token in no cluster
      EXPECT_NEAR(sum[i], whole[i], 6 * deviation) << "element " << i;
    }
  }
}

TEST(Dropout, BelowTheLeastProbabilityNothingChanges) {
  for (const char* spec : {"full", "i-clustered(clusters=5,topk=6,near=4)"}) {
    const Pass without = cases::run_forward(dropout_problem(spec, 0));
    const Pass with = cases::run_forward(dropout_problem(spec, 1e-11));
    EXPECT_TRUE(test::same_bits(without.result.out, with.result.out)) << spec;
  }
}

TEST(Dropout, NormalisersAreThoseBeforeDropout) {
  for (const char* spec :
       {"full", "i-clustered(clusters=5,topk=6)", "clustered(clusters=5,near=4)"}) {
    const Pass without = cases::run_forward(dropout_problem(spec, 0));
    const Pass with = cases::run_forward(dropout_problem(spec, 0.5));
    const std::size_t last = without.result.saved.size() - 1;  // the log-sum-exps of queries
    EXPECT_TRUE(test::same_bits(without.result.saved[last], with.result.saved[last])) << spec;
  }
}

TEST(Dropout, RefusesOtherProbabilities) {
  for (const double p : {-0.1, 1.0, 2.0, std::nan(""), std::numeric_limits<double>::infinity()}) {
    Problem problem = dropout_problem("full", 0);
    problem.inputs.dropout = p;
    try {
      attention_saved(problem.mechanism, problem.inputs);
      ADD_FAILURE() << p << " was accepted";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("expected a dropout probability from 0 to below 1"),
                std::string::npos);
    }
  }
}

}  // namespace
}  // namespace coterie
