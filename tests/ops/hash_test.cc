// SPDX-License-Identifier: MIT

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "coterie/runtime.h"
#include "ops/parts.h"
#include "ref/ref.h"
#include "tests/support/tensors.h"
#include "tests/support/tolerance.h"

namespace coterie {
namespace {

using test::error_of;
using test::integers;
using test::ints;
using test::normals;
using test::rounded;

std::vector<std::uint64_t> codes_in(const HostTensor& codes) {
  const auto* data = codes.data<std::uint64_t>();
  return {data, data + codes.view().count()};
}

TEST(IsotropicPlanesTest, AreNormalNumbersOfBf16) {
  const HostTensor planes(DType::f32, {1, 1, 63, 64}), thresholds(DType::f32, {1, 1, 63});
  isotropic_planes(7, true, planes, thresholds);
  const std::vector<double> values = read_values(planes);
  EXPECT_EQ(values, rounded(DType::bf16, values));
  double square = 0;
  for (double value : values) square += value * value / static_cast<double>(values.size());
  EXPECT_NEAR(square, 1.0, 5 * std::sqrt(2.0 / static_cast<double>(values.size())));
  HostTensor expected_planes(DType::f32, {1, 1, 63, 64}), expected(DType::f32, {1, 1, 63});
  ref::isotropic_planes<double>(7, true, expected_planes, expected);
  EXPECT_EQ(values, read_values(expected_planes));
  EXPECT_EQ(read_values(thresholds), read_values(expected));
}

TEST(IsotropicPlanesTest, WithoutBiasThresholdsAreZeroAndPlanesTheSame) {
  const HostTensor planes(DType::f32, {1, 1, 5, 8}), thresholds(DType::f32, {1, 1, 5});
  const HostTensor biased(DType::f32, {1, 1, 5, 8});
  isotropic_planes(3, true, biased, thresholds);
  EXPECT_NE(read_values(thresholds), std::vector<double>(5, 0.0));
  isotropic_planes(3, false, planes, thresholds);
  EXPECT_EQ(read_values(thresholds), std::vector<double>(5, 0.0));
  EXPECT_EQ(read_values(planes), read_values(biased));
}

// Inputs of key-aware planes: two items, grouped heads, small integers so that sums are exact.
struct KeyPlanes {
  HostTensor q = integers(DType::f32, {2, 4, 9, 8}, 1);
  HostTensor k = integers(DType::f32, {2, 2, 11, 8}, 2);
  HostTensor q_lengths = ints({8, 4}), k_lengths = ints({11, 5});
  HostTensor planes = HostTensor(DType::f32, {2, 2, 20, 8});
  HostTensor thresholds = HostTensor(DType::f32, {2, 4, 20});
  AttentionInputs inputs;

  KeyPlanes() {
    inputs.q = q;
    inputs.k = inputs.v = k;
    inputs.q_sequences.lengths = q_lengths;
    inputs.k_sequences.lengths = k_lengths;
    inputs.seed = 5;
  }
  void run() { key_difference_planes(inputs, planes, thresholds); }
};

TEST(KeyDifferencePlanesTest, FollowTheSpecification) {
  KeyPlanes p;
  p.run();
  HostTensor planes(DType::f32, {2, 2, 20, 8}), thresholds(DType::f32, {2, 4, 20});
  ref::key_difference_planes<double>(p.inputs, planes, thresholds);
  EXPECT_EQ(read_values(p.planes), read_values(planes));
  EXPECT_EQ(read_values(p.thresholds), read_values(thresholds));  // lengths 8 and 4: exact means
}

TEST(KeyDifferencePlanesTest, DoNotSeeAConstantAddedToAllKeys) {
  KeyPlanes p;
  p.run();
  const std::vector<double> before = read_values(p.planes);
  std::vector<double> moved = read_values(p.k);
  for (std::size_t i = 0; i < moved.size(); ++i) moved[i] += static_cast<double>(i % 8) * 16;
  write_values(p.k, moved);
  p.run();
  EXPECT_EQ(read_values(p.planes), before);
}

TEST(KeyDifferencePlanesTest, DoNotSeePadding) {
  KeyPlanes p;
  p.run();
  const std::vector<double> planes = read_values(p.planes), thresholds = read_values(p.thresholds);
  fill(p.k.view().narrowed(0, 1, 1).narrowed(2, 5, 6), [](std::int64_t) { return std::nan(""); });
  fill(p.q.view().narrowed(0, 1, 1).narrowed(2, 4, 5), [](std::int64_t) { return std::nan(""); });
  p.run();
  EXPECT_EQ(read_values(p.planes), planes);
  EXPECT_EQ(read_values(p.thresholds), thresholds);
}

TEST(KeyDifferencePlanesTest, AreZeroForAnItemWithoutKeysOrQueries) {
  KeyPlanes p;
  write_values(p.k_lengths, {0, 5});
  write_values(p.q_lengths, {8, 0});
  p.run();
  for (double value : read_values(p.planes.view().narrowed(0, 0, 1))) EXPECT_EQ(value, 0.0);
  for (double value : read_values(p.thresholds)) EXPECT_EQ(value, 0.0);
}

class HashCodesTest : public ::testing::TestWithParam<CpuIsa> {
 protected:
  void SetUp() override { force_cpu_isa(GetParam()); }
  void TearDown() override { force_cpu_isa(supported_cpu_isas().back()); }
};

// bit r = [plane_r . x > threshold_r], with numbers whose products are exact.
TEST_P(HashCodesTest, AreTheSidesOfThePlanes) {
  for (DType dtype : {DType::f32, DType::f64, DType::bf16, DType::f16}) {
    for (std::int64_t dim : {1, 8, 13, 64, 129}) {
      for (std::int64_t bits : {1, 7, 32, 63}) {
        const HostTensor x = integers(dtype, {2, 2, 33, dim}, 3);
        const HostTensor planes = integers(DType::f32, {1, 1, bits, dim}, 4);
        const HostTensor thresholds = integers(DType::f32, {1, 1, bits}, 5);
        HostTensor codes(DType::u64, {2, 2, 33});
        hash_codes(x, {}, planes, thresholds, codes);
        const std::vector<double> rows = read_values(x), p = read_values(planes),
                                  t = read_values(thresholds);
        const std::vector<std::uint64_t> actual = codes_in(codes);
        for (std::size_t i = 0; i < actual.size(); ++i) {
          std::uint64_t expected = 0;
          for (std::int64_t r = 0; r < bits; ++r) {
            double dot = 0;
            for (std::int64_t d = 0; d < dim; ++d) dot += rows[i * dim + d] * p[r * dim + d];
            if (dot > t[r]) expected |= std::uint64_t{1} << r;
          }
          ASSERT_EQ(actual[i], expected) << dtype_name(dtype) << " " << dim << " " << bits;
        }
      }
    }
  }
}

TEST_P(HashCodesTest, MayHavePlanesPerItemAndHead) {
  const HostTensor x = integers(DType::f32, {3, 4, 10, 8}, 6);
  const HostTensor planes = integers(DType::f32, {3, 2, 12, 8}, 7);
  const HostTensor thresholds = integers(DType::f32, {3, 4, 12}, 8);
  HostTensor codes(DType::u64, {3, 4, 10}), expected(DType::u64, {3, 4, 10});
  hash_codes(x, {}, planes, thresholds, codes);
  ref::hash_codes<double>(x, {}, planes, thresholds, expected);
  EXPECT_EQ(codes_in(codes), codes_in(expected));
  // And by hand: head 3 of item 2 uses the planes of head 1.
  const HostTensor alone(DType::f32, {1, 1, 10, 8});
  write_values(alone, read_values(x.view().narrowed(0, 2, 1).narrowed(1, 3, 1)));
  HostTensor last(DType::u64, {1, 1, 10});
  hash_codes(alone, {}, planes.view().narrowed(0, 2, 1).narrowed(1, 1, 1),
             thresholds.view().narrowed(0, 2, 1).narrowed(1, 3, 1), last);
  const std::vector<std::uint64_t> all = codes_in(codes);
  EXPECT_EQ(codes_in(last), std::vector<std::uint64_t>(all.end() - 10, all.end()));
}

TEST_P(HashCodesTest, AreZeroInPaddingAndForNaN) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  HostTensor x = normals(DType::f32, {2, 1, 6, 8}, 9);
  fill(x.view().narrowed(2, 1, 1), [=](std::int64_t) { return nan; });
  const HostTensor planes = normals(DType::f32, {1, 1, 63, 8}, 10);
  const HostTensor thresholds =
      test::tensor_of(DType::f32, {1, 1, 63}, std::vector<double>(63, -9));
  const HostTensor lengths = ints({6, 3});
  HostTensor codes(DType::u64, {2, 1, 6});
  std::fill_n(codes.data<std::uint64_t>(), 12, 0x7777777777777777u);
  hash_codes(x, test::padded(lengths), planes, thresholds, codes);
  const std::vector<std::uint64_t> values = codes_in(codes);
  EXPECT_NE(values[0], 0u);
  EXPECT_EQ(values[1], 0u);
  EXPECT_EQ(values[7], 0u);
  for (std::size_t i = 9; i < 12; ++i) EXPECT_EQ(values[i], 0u) << i;
}

TEST_P(HashCodesTest, OfPackedItemsAreThoseOfTheItems) {
  const HostTensor x = integers(DType::bf16, {1, 2, 20, 8}, 11);
  const HostTensor planes = integers(DType::f32, {3, 1, 15, 8}, 12);
  const HostTensor thresholds = integers(DType::f32, {3, 2, 15}, 13);
  const HostTensor cu_seqlens = ints({0, 7, 7, 18});
  HostTensor codes(DType::u64, {1, 2, 20}), expected(DType::u64, {1, 2, 20});
  hash_codes(x, test::packed(cu_seqlens), planes, thresholds, codes);
  ref::hash_codes<double>(x, test::packed(cu_seqlens), planes, thresholds, expected);
  EXPECT_EQ(codes_in(codes), codes_in(expected));
}

TEST_P(HashCodesTest, SeeStrides) {
  const HostTensor x = integers(DType::f32, {2, 9, 3, 8}, 14);
  const HostTensor planes = integers(DType::f32, {1, 1, 15, 8}, 15);
  const HostTensor thresholds = integers(DType::f32, {1, 1, 15}, 16);
  const TensorView transposed = x.view().transposed(1, 2);
  HostTensor dense(DType::f32, {2, 3, 9, 8});
  write_values(dense, read_values(transposed));
  HostTensor codes(DType::u64, {2, 3, 9}), expected(DType::u64, {2, 3, 9});
  hash_codes(transposed, {}, planes, thresholds, codes);
  hash_codes(dense, {}, planes, thresholds, expected);
  EXPECT_EQ(codes_in(codes), codes_in(expected));
}

INSTANTIATE_TEST_SUITE_P(Isas, HashCodesTest, ::testing::ValuesIn(supported_cpu_isas()),
                         [](const auto& isa) { return cpu_isa_name(isa.param); });

TEST(HashRefusalTest, SixtyFourBitsAreTooMany) {
  const HostTensor planes(DType::f32, {1, 1, 64, 8}), thresholds(DType::f32, {1, 1, 64});
  const HostTensor x(DType::f32, {1, 1, 4, 8}), codes(DType::u64, {1, 1, 4});
  EXPECT_NE(error_of([&] { isotropic_planes(1, true, planes, thresholds); }).find("63"),
            std::string::npos);
  EXPECT_NE(error_of([&] { hash_codes(x, {}, planes, thresholds, codes); }).find("63"),
            std::string::npos);
}

TEST(HashRefusalTest, ShapesMustFit) {
  const HostTensor planes(DType::f32, {1, 1, 6, 8}), thresholds(DType::f32, {1, 1, 6});
  const HostTensor x(DType::f32, {1, 1, 4, 8}), codes(DType::u64, {1, 1, 4});
  const HostTensor narrow(DType::f32, {1, 1, 4, 7}), few(DType::f32, {1, 1, 5});
  const HostTensor wrong_type(DType::i64, {1, 1, 4}), wrong_size(DType::u64, {1, 1, 3});
  for (const std::string& message :
       {error_of([&] { hash_codes(narrow, {}, planes, thresholds, codes); }),
        error_of([&] { hash_codes(x, {}, planes, few, codes); }),
        error_of([&] { hash_codes(x, {}, planes, thresholds, wrong_type); }),
        error_of([&] { hash_codes(x, {}, planes, thresholds, wrong_size); })}) {
    EXPECT_TRUE(message.starts_with("[hash_codes] ")) << message;
  }
}

}  // namespace
}  // namespace coterie
