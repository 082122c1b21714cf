// SPDX-License-Identifier: MIT
#include "coterie/layer.h"

#include <gtest/gtest.h>

#include "coterie/error.h"

namespace coterie {
namespace {

TEST(Layer, SlicesFollowEachOther) {
  const auto spec = AttentionSpec::parse("4*local(window=2)+2*lsh+2*strided(stride=2)");
  const std::vector<HeadSlice> slices = head_slices(spec, 8, 4);
  ASSERT_EQ(slices.size(), 3u);
  const std::int64_t expected[3][6] = {{0, 4, 0, 2, 0, 2}, {4, 2, 2, 1, 2, 0}, {6, 2, 3, 1, 2, 1}};
  for (std::size_t g = 0; g < 3; ++g) {
    EXPECT_EQ(slices[g].first, expected[g][0]);
    EXPECT_EQ(slices[g].count, expected[g][1]);
    EXPECT_EQ(slices[g].first_kv, expected[g][2]);
    EXPECT_EQ(slices[g].kv_count, expected[g][3]);
    EXPECT_EQ(slices[g].first_key, expected[g][4]);
    EXPECT_EQ(slices[g].key_count, expected[g][5]);
  }
}

TEST(Layer, GroupsThatShareAKeyHeadAreRefused) {
  const auto spec = AttentionSpec::parse("3*local(window=2)+5*full");
  EXPECT_EQ(head_slices(spec, 8, 8).size(), 2u);
  EXPECT_THROW(head_slices(spec, 8, 4), Error);
  EXPECT_THROW(head_slices(spec, 8, 3), Error);
  EXPECT_THROW(head_slices(spec, 8, 0), Error);
}

// Values of the formula in the header, computed independently.
TEST(Layer, SeedsAreThoseOfCheckpoints) {
  EXPECT_EQ(group_seed(0, 0, 0), 0xa706dd2f4d197e6full);
  EXPECT_EQ(group_seed(1, 0, 0), 0x5e41ab087439611eull);
  EXPECT_EQ(group_seed(1, 1, 0), 0x778b1aa9c29bc868ull);
  EXPECT_EQ(group_seed(1, 0, 1), 0xf18d6ce93d6cf1eeull);
  EXPECT_EQ(group_seed(7, 3, 1), 0x3b43325c33913dc4ull);
  EXPECT_EQ(group_seed(12345678901234567890ull, 7, 3), 0x39f88c7ecc7fd3b3ull);
  EXPECT_NE(group_seed(1, 0, 1), group_seed(1, 1, 0));
  EXPECT_NE(group_seed(1, 0, 0), group_seed(2, 0, 0));
}

}  // namespace
}  // namespace coterie
