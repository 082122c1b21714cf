// SPDX-License-Identifier: MIT
// k-means of rows against the specification, and what every clustering has to fulfil.
#include <gtest/gtest.h>

#include "coterie/error.h"
#include "coterie/runtime.h"
#include "tests/support/kmeans.h"

namespace coterie {
namespace {

using test::KMeansCase;
using test::KMeansOutcome;

KMeansOutcome run(const KMeansCase& c, bool reference) {
  KMeansOutcome outcome(c);
  if (reference)
    ref::kmeans<double>(c.params, outcome.x, outcome.result());
  else
    kmeans(c.params, outcome.x, outcome.result());
  return outcome;
}

class KMeansTest : public ::testing::TestWithParam<KMeansCase> {};

TEST_P(KMeansTest, FollowsTheSpecification) {
  const KMeansOutcome got = run(GetParam(), false);
  test::expect_clustering(GetParam(), got);
  if (GetParam().exact) test::expect_equal(got, run(GetParam(), true));
}

TEST_P(KMeansTest, GivesEqualBitsForAnyNumberOfThreads) {
  const int before = threads();
  set_threads(1);
  const KMeansOutcome one = run(GetParam(), false);
  set_threads(5);
  const KMeansOutcome five = run(GetParam(), false);
  set_threads(before);
  EXPECT_EQ(read_values(one.centroids), read_values(five.centroids));
  EXPECT_EQ(read_values(one.labels), read_values(five.labels));
}

INSTANTIATE_TEST_SUITE_P(Cases, KMeansTest, ::testing::ValuesIn(test::kmeans_cases(true)),
                         [](const auto& test) { return test.param.name; });

TEST(KMeans, StartsFromGivenCentroids) {
  KMeansCase c{"given", DType::f32, 2, 60, 3, 4};
  c.params = {3, KMeansStart::random, false, 5};
  const KMeansOutcome whole = run(c, false);
  KMeansCase half = c;
  half.params.iterations = 1;
  KMeansOutcome first = run(half, false);
  half.params = {2, KMeansStart::given, false, 99};
  KMeansOutcome second(half);
  write_values(second.centroids, read_values(first.centroids));
  kmeans(half.params, second.x, second.result());
  EXPECT_EQ(read_values(whole.centroids), read_values(second.centroids));
  EXPECT_EQ(read_values(whole.labels), read_values(second.labels));
}

TEST(KMeans, RefusesWhatItCannotDo) {
  KMeansCase c{"bad", DType::f32, 1, 8, 2, 2};
  KMeansOutcome outcome(c);
  const auto message = [&](const KMeansParams& params, KMeansResult result) {
    try {
      kmeans(params, outcome.x, result);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_NE(message({-1}, outcome.result()).find("0 or more iterations; got -1"),
            std::string::npos);
  KMeansResult wrong = outcome.result();
  wrong.labels.dtype = DType::f32;
  EXPECT_NE(message({}, wrong).find("labels"), std::string::npos);
  wrong = outcome.result();
  wrong.centroids = wrong.centroids.narrowed(1, 0, 0);
  EXPECT_NE(message({}, wrong).find("1 or more clusters"), std::string::npos);
}

}  // namespace
}  // namespace coterie
