// SPDX-License-Identifier: MIT
#include "train/schedule.h"

#include <gtest/gtest.h>

#include <cmath>

namespace coterie::train {
namespace {

ScheduleConfig schedule(std::int64_t warmup, const std::string& decay, double floor = 0.0) {
  return {.warmup = warmup, .decay = decay, .floor = floor};
}

TEST(Schedule, RisesInEqualStepsAndReachesTheRateAtTheEndOfTheWarmUp) {
  for (const char* decay : {"constant", "rsqrt", "cosine"}) {
    EXPECT_DOUBLE_EQ(rate_factor(schedule(4, decay), 1, 100), 0.25);
    EXPECT_DOUBLE_EQ(rate_factor(schedule(4, decay), 3, 100), 0.75);
    EXPECT_DOUBLE_EQ(rate_factor(schedule(4, decay), 4, 100), 1.0);
  }
}

TEST(Schedule, ConstantStays) { EXPECT_EQ(rate_factor(schedule(4, "constant"), 99, 100), 1.0); }

TEST(Schedule, InverseSquareRootHalvesWhenStepsQuadruple) {
  EXPECT_DOUBLE_EQ(rate_factor(schedule(10, "rsqrt"), 40, 100), 0.5);
  EXPECT_DOUBLE_EQ(rate_factor(schedule(0, "rsqrt"), 1, 100), 1.0);
  EXPECT_DOUBLE_EQ(rate_factor(schedule(0, "rsqrt"), 4, 100), 0.5);
}

TEST(Schedule, CosineIsHalfwayInTheMiddleAndEndsAtItsFloor) {
  EXPECT_DOUBLE_EQ(rate_factor(schedule(20, "cosine"), 60, 100), 0.5);
  EXPECT_NEAR(rate_factor(schedule(20, "cosine"), 100, 100), 0.0, 1e-15);
  EXPECT_DOUBLE_EQ(rate_factor(schedule(20, "cosine", 0.1), 100, 100), 0.1);
  EXPECT_DOUBLE_EQ(rate_factor(schedule(0, "cosine", 0.5), 50, 100), 0.75);
}

TEST(Schedule, AWarmUpLongerThanTheRunOnlyRises) {
  for (std::int64_t step = 1; step <= 10; ++step) {
    const double factor = rate_factor(schedule(20, "cosine"), step, 10);
    EXPECT_DOUBLE_EQ(factor, static_cast<double>(step) / 20);
  }
}

}  // namespace
}  // namespace coterie::train
