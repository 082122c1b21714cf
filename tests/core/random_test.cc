// SPDX-License-Identifier: MIT
#include "coterie/random.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <vector>

namespace coterie {
namespace {

std::vector<std::uint32_t> words(const RandomBits& bits) {
  return {bits.word[0], bits.word[1], bits.word[2], bits.word[3]};
}

// Known answers for philox4x32-10 from the authors' Random123 library.
TEST(RandomTest, PhiloxGivesThePublishedNumbers) {
  EXPECT_EQ(words(philox({{0, 0, 0, 0}}, 0, 0)),
            (std::vector<std::uint32_t>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  constexpr std::uint32_t kOnes = 0xffffffff;
  EXPECT_EQ(words(philox({{kOnes, kOnes, kOnes, kOnes}}, kOnes, kOnes)),
            (std::vector<std::uint32_t>{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(
      words(philox({{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}}, 0xa4093822, 0x299f31d0)),
      (std::vector<std::uint32_t>{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(RandomTest, StreamsDifferBySeedUseProblemAndIndex) {
  const RandomStream stream{.seed = 5, .use = RandomUse::data, .problem = 3};
  std::set<std::vector<std::uint32_t>> seen;
  for (std::uint64_t index : {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{1} << 32}) {
    EXPECT_TRUE(seen.insert(words(stream.at(index))).second);
    for (const RandomStream& other :
         {RandomStream{5 + (std::uint64_t{1} << 32), RandomUse::data, 3},
          RandomStream{5, RandomUse::key_pair, 3}, RandomStream{5, RandomUse::data, 4}}) {
      EXPECT_TRUE(seen.insert(words(other.at(index))).second);
    }
  }
}

TEST(RandomTest, UnitNumbersLieInsideTheOpenInterval) {
  EXPECT_GT(random_unit(0), 0.0);
  EXPECT_LT(random_unit(0xffffffff), 1.0);
  EXPECT_EQ(random_unit(0xffffffff), 1.0 - std::ldexp(0.5, -23));
  EXPECT_EQ(static_cast<double>(static_cast<float>(random_unit(0xffff0000))),
            random_unit(0xffff0000));
}

TEST(RandomTest, IntegersStayBelowTheirBoundAndReachAllValues) {
  const RandomStream stream{.seed = 11};
  for (std::uint32_t bound : {1u, 2u, 7u, 1000u}) {
    std::vector<int> counts(bound);
    const int draws = static_cast<int>(200 * bound);
    for (int i = 0; i < draws; ++i) {
      const std::uint32_t value = random_below(stream, static_cast<std::uint64_t>(i), bound);
      ASSERT_LT(value, bound);
      ++counts[value];
    }
    for (int count : counts) EXPECT_GT(count, 100);  // 200 expected, standard deviation 14
  }
}

TEST(RandomTest, SixtyFourBitsAreTwoWords) {
  const RandomStream stream{.seed = 1};
  const RandomBits bits = stream.at(9);
  EXPECT_EQ(random_u64(stream, 9), (static_cast<std::uint64_t>(bits.word[1]) << 32) | bits.word[0]);
}

TEST(RandomTest, NormalNumbersHaveTheMomentsOfTheNormalDistribution) {
  const RandomStream stream{.seed = 3, .use = RandomUse::data, .problem = 1};
  constexpr int kDraws = 40000;
  double mean = 0, square = 0, fourth = 0;
  for (int i = 0; i < kDraws; ++i) {
    const double x = random_normal(stream, static_cast<std::uint64_t>(i));
    mean += x / kDraws;
    square += x * x / kDraws;
    fourth += x * x * x * x / kDraws;
  }
  // Five standard deviations of each estimate: var x = 1, var x^2 = 2, var x^4 = 96.
  EXPECT_NEAR(mean, 0.0, 5 * std::sqrt(1.0 / kDraws));
  EXPECT_NEAR(square, 1.0, 5 * std::sqrt(2.0 / kDraws));
  EXPECT_NEAR(fourth, 3.0, 5 * std::sqrt(96.0 / kDraws));
}

TEST(RandomTest, PermutationsAreOnesForEveryLength) {
  for (std::uint32_t n : {1u, 2u, 3u, 4u, 5u, 16u, 17u, 63u, 64u, 65u, 1000u, 4097u}) {
    const RandomStream stream{.seed = n, .use = RandomUse::initial_centroid, .problem = 2};
    std::vector<bool> hit(n, false);
    for (std::uint32_t i = 0; i < n; ++i) {
      const std::uint32_t target = random_permutation(stream, i, n);
      ASSERT_LT(target, n);
      ASSERT_FALSE(hit[target]) << n;
      hit[target] = true;
    }
  }
}

TEST(RandomTest, PermutationsDifferBetweenStreamsAndStartAnywhere) {
  constexpr std::uint32_t kLength = 64;
  std::vector<int> first(kLength);
  for (std::uint32_t problem = 0; problem < 100 * kLength; ++problem) {
    const RandomStream stream{.seed = 1, .use = RandomUse::initial_centroid, .problem = problem};
    ++first[random_permutation(stream, 0, kLength)];
  }
  for (int count : first) EXPECT_NEAR(count, 100, 50);  // five standard deviations
}

}  // namespace
}  // namespace coterie
