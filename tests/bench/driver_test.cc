// SPDX-License-Identifier: MIT
#include "bench/driver.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <thread>

#include "bench/attention.h"
#include "coterie/error.h"

namespace coterie::bench {
namespace {

TEST(Driver, QuantilesLieBetweenNeighbours) {
  EXPECT_EQ(quantile({}, 0.5), 0.0);
  EXPECT_EQ(quantile({7}, 0.2), 7.0);
  EXPECT_EQ(quantile({3, 1, 2}, 0.5), 2.0);
  EXPECT_EQ(quantile({4, 1, 2, 3}, 0.5), 2.5);
  EXPECT_DOUBLE_EQ(quantile({0, 10, 20, 30, 40, 50}, 0.2), 10.0);
}

TEST(Driver, ContendersTakeTurnsAndWarmUpIsNotCounted) {
  std::string order;
  const std::vector<Contender> contenders = {{"a", {[&] { order += 'a'; }}},
                                             {"b", {[&] { order += 'b'; }}}};
  int told = 0;
  const std::vector<StagedTiming> timings =
      time_interleaved(contenders, {.warmups = 1, .repeats = 3, .min_repeats = 3},
                       [&](const Contender&, int, int rounds) {
                         ++told;
                         EXPECT_EQ(rounds, 4);
                       });
  EXPECT_EQ(order, "abababab");
  EXPECT_EQ(told, 8);
  ASSERT_EQ(timings.size(), 2u);
  EXPECT_EQ(timings[0].total.repeats, 3);
  EXPECT_LE(timings[1].total.fastest_ms, timings[1].total.p20_ms);
  EXPECT_LE(timings[1].total.p20_ms, timings[1].total.p80_ms);
}

TEST(Driver, StagesAreTimedOneByOne) {
  const auto nap = [](int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); };
  const Contender contender{"naps", {[&] { nap(2); }, [&] { nap(6); }}};
  const StagedTiming timing = time_interleaved({contender}, {.repeats = 1, .min_repeats = 1})[0];
  ASSERT_EQ(timing.stages.size(), 2u);
  EXPECT_GE(timing.stages[0].median_ms, 2.0);
  EXPECT_GE(timing.stages[1].median_ms, 6.0);
  EXPECT_DOUBLE_EQ(timing.total.median_ms, timing.stages[0].median_ms + timing.stages[1].median_ms);
}

TEST(Driver, StopsWhenTimeIsUpButNotTooEarly) {
  const auto nap = [] { std::this_thread::sleep_for(std::chrono::milliseconds(2)); };
  const TimingPlan plan{.warmups = 1, .repeats = 1000, .min_repeats = 3, .seconds = 0.001};
  const Timing timing = time_interleaved({{"nap", {nap}}}, plan)[0].total;
  EXPECT_EQ(timing.repeats, 3);
  EXPECT_GE(timing.median_ms, 2.0);
}

TEST(Crossover, IsWhereTheLastWinsBegin) {
  EXPECT_FALSE(crossover({}));
  EXPECT_FALSE(crossover({{512, 0.5}, {1024, 0.9}}));
  EXPECT_FALSE(crossover({{512, 2.0}, {1024, 0.9}}));
  EXPECT_EQ(crossover({{512, 1.5}, {1024, 3}}), 512.0);
  EXPECT_NEAR(*crossover({{512, 0.5}, {2048, 2.0}}), 1024.0, 1e-6);
  EXPECT_NEAR(*crossover({{256, 2.0}, {512, 0.5}, {2048, 2.0}}), 1024.0, 1e-6);
}

TEST(BenchEntry, NamedCausalFormsMakeTheEntryCausal) {
  EXPECT_FALSE(make_entry("full", false).causal);
  EXPECT_TRUE(make_entry("full", true).causal);
  const Entry mixed =
      make_entry("4*local(window=8)+4*routing(clusters=2,window=8,causal=strict)", false);
  EXPECT_TRUE(mixed.causal);
  EXPECT_FALSE(leaks_future(mixed));
  EXPECT_TRUE(leaks_future(make_entry("routing(clusters=2,window=8,causal=paper)", false)));
  EXPECT_TRUE(leaks_future(make_entry("lsh", true)));
  EXPECT_THROW(make_entry("clustered(clusters=2)", true), Error);
  EXPECT_TRUE(is_full(make_entry("full", false)));
  EXPECT_FALSE(is_full(mixed));
}

TEST(Driver, TakesTimesFromTheStopwatchAndPreparesOutsideOfThem) {
  std::string order;
  const Contender contender{"a", {[&] { order += 'a'; }}, [&] { order += 'p'; }};
  const Stopwatch fixed = [&](const Contender& one) {
    for (const auto& stage : one.stages) stage();
    order += 't';
    return std::vector<double>{7.0};
  };
  const TimingPlan plan{.warmups = 1, .repeats = 2, .min_repeats = 2};
  const StagedTiming timing = time_interleaved({contender}, plan, {}, fixed)[0];
  EXPECT_EQ(order, "patpatpat");
  EXPECT_EQ(timing.total.median_ms, 7.0);
  EXPECT_EQ(timing.total.repeats, 2);
}

}  // namespace
}  // namespace coterie::bench
