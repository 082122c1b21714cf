// SPDX-License-Identifier: MIT
#include "coterie/tensor.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "coterie/error.h"

namespace coterie {
namespace {

// One element of a type, written and read as doubles.
double round_trip(DType dtype, double value) {
  const HostTensor tensor(dtype, {1});
  write_values(tensor, {value});
  return read_values(tensor).at(0);
}

std::uint16_t bits_of(DType dtype, double value) {
  HostTensor tensor(dtype, {1});
  write_values(tensor, {value});
  return *tensor.data<std::uint16_t>();
}

TEST(TensorViewTest, ContiguousStridesAreProductsOfSizes) {
  float data[24];
  const TensorView view = TensorView::contiguous(data, DType::f32, {2, 3, 4});
  EXPECT_EQ(view.rank, 3);
  EXPECT_EQ(view.stride(0), 12);
  EXPECT_EQ(view.stride(1), 4);
  EXPECT_EQ(view.stride(2), 1);
  EXPECT_EQ(view.count(), 24);
  EXPECT_TRUE(view.is_contiguous());
  EXPECT_EQ(describe(view), "f32 (2, 3, 4)");
}

TEST(TensorViewTest, AnAbsentViewHasNoElements) {
  const TensorView view;
  EXPECT_FALSE(view.present());
  EXPECT_EQ(view.count(), 0);
}

TEST(TensorViewTest, TransposedAndNarrowedViewsSeeTheSameMemory) {
  const HostTensor tensor(DType::f32, {2, 3, 4});
  fill(tensor, [](std::int64_t i) { return static_cast<double>(i); });
  const TensorView transposed = tensor.view().transposed(1, 2);
  EXPECT_EQ(transposed.size(1), 4);
  EXPECT_FALSE(transposed.is_contiguous());
  EXPECT_EQ(read_values(transposed.narrowed(0, 1, 1).narrowed(1, 2, 1)),
            (std::vector<double>{14, 18, 22}));
  EXPECT_EQ(read_values(tensor.view().narrowed(1, 1, 2).narrowed(2, 3, 1)),
            (std::vector<double>{7, 11, 19, 23}));
}

TEST(TensorViewTest, ADimensionOfOneMayHaveAnyStride) {
  float data[4] = {};
  TensorView view = TensorView::contiguous(data, DType::f32, {1, 4});
  view.strides[0] = 99;
  EXPECT_TRUE(view.is_contiguous());
  view.strides[1] = 2;
  EXPECT_FALSE(view.is_contiguous());
}

TEST(TensorViewTest, NarrowingBeyondTheSizeIsRefused) {
  const HostTensor tensor(DType::f32, {2, 3});
  EXPECT_THROW(tensor.view().narrowed(1, 2, 2), Error);
  EXPECT_THROW(tensor.view().narrowed(2, 0, 1), Error);
  EXPECT_THROW(tensor.view().narrowed(0, -1, 1), Error);
}

TEST(TensorViewTest, FillWritesThroughStrides) {
  const HostTensor tensor(DType::i32, {2, 3});
  fill(tensor.view().transposed(0, 1), [](std::int64_t i) { return static_cast<double>(i); });
  EXPECT_EQ(read_values(tensor), (std::vector<double>{0, 2, 4, 1, 3, 5}));
}

TEST(TensorViewTest, StrideZeroRepeatsARow) {
  const HostTensor tensor(DType::f64, {1, 3});
  write_values(tensor, {1, 2, 3});
  TensorView view = tensor;
  view.sizes[0] = 2;
  view.strides[0] = 0;
  EXPECT_EQ(read_values(view), (std::vector<double>{1, 2, 3, 1, 2, 3}));
}

TEST(TensorViewTest, WritingTheWrongNumberOfValuesIsRefused) {
  const HostTensor tensor(DType::f32, {3});
  EXPECT_THROW(write_values(tensor, {1, 2}), Error);
}

TEST(HostTensorTest, StartsWithZerosAndCopiesItsElements) {
  HostTensor tensor(DType::f64, {5});
  EXPECT_EQ(read_values(tensor), std::vector<double>(5, 0.0));
  write_values(tensor, {1, 2, 3, 4, 5});
  const HostTensor copy = tensor;
  tensor.data<double>()[0] = 9;
  EXPECT_EQ(copy.data<double>()[0], 1);
  HostTensor assigned;
  assigned = copy;
  EXPECT_NE(assigned.view().data, copy.view().data);
  EXPECT_EQ(read_values(assigned), read_values(copy));
}

TEST(HostTensorTest, MovingKeepsTheMemoryWhereItIs) {
  HostTensor tensor(DType::f32, {7});
  const void* data = tensor.view().data;
  const HostTensor moved = std::move(tensor);
  EXPECT_EQ(moved.view().data, data);
}

TEST(HostTensorTest, MayBeEmpty) {
  const HostTensor tensor(DType::f32, {0, 4});
  EXPECT_EQ(tensor.view().count(), 0);
  EXPECT_TRUE(read_values(tensor).empty());
}

TEST(DTypeTest, KnowsSizesNamesAndAccumulators) {
  EXPECT_EQ(dtype_bytes(DType::f32), 4);
  EXPECT_EQ(dtype_bytes(DType::f64), 8);
  EXPECT_EQ(dtype_bytes(DType::bf16), 2);
  EXPECT_EQ(dtype_bytes(DType::f16), 2);
  EXPECT_EQ(dtype_bytes(DType::i32), 4);
  EXPECT_EQ(dtype_bytes(DType::u64), 8);
  EXPECT_EQ(dtype_bytes(DType::u8), 1);
  EXPECT_STREQ(dtype_name(DType::bf16), "bf16");
  EXPECT_TRUE(is_floating(DType::f16));
  EXPECT_FALSE(is_floating(DType::i32));
  EXPECT_EQ(accumulator_dtype(DType::f64), DType::f64);
  EXPECT_EQ(accumulator_dtype(DType::bf16), DType::f32);
}

class HalfTest : public ::testing::TestWithParam<DType> {
 protected:
  int digits() const { return GetParam() == DType::bf16 ? 8 : 11; }
};

TEST_P(HalfTest, AllPatternsSurviveARoundTrip) {
  HostTensor all(GetParam(), {65536});
  for (int i = 0; i < 65536; ++i) all.data<std::uint16_t>()[i] = static_cast<std::uint16_t>(i);
  const std::vector<double> values = read_values(all);
  HostTensor again(GetParam(), {65536});
  write_values(again, values);
  for (int i = 0; i < 65536; ++i) {
    const std::uint16_t bits = again.data<std::uint16_t>()[i];
    if (std::isnan(values[i])) {
      EXPECT_TRUE(std::isnan(round_trip(GetParam(), values[i]))) << i;
    } else {
      ASSERT_EQ(bits, i) << values[i];
    }
  }
}

TEST_P(HalfTest, PatternsAreTheNumbersOfTheFormat) {
  const int exponent_bits = 16 - digits();
  const int bias = (1 << (exponent_bits - 1)) - 1;
  HostTensor one(GetParam(), {1});
  for (int i = 0; i < 0x8000; ++i) {
    const int exponent = i >> (digits() - 1), fraction = i & ((1 << (digits() - 1)) - 1);
    if (exponent == (1 << exponent_bits) - 1) continue;
    const double expected = exponent == 0 ? std::ldexp(fraction, 1 - bias - digits() + 1)
                                          : std::ldexp(fraction + (1 << (digits() - 1)),
                                                       exponent - bias - digits() + 1);
    *one.data<std::uint16_t>() = static_cast<std::uint16_t>(i);
    ASSERT_EQ(read_values(one).at(0), expected) << i;
  }
}

TEST_P(HalfTest, WritingRoundsToNearestEven) {
  const double unit = std::ldexp(1.0, 1 - digits());       // above 1
  EXPECT_EQ(round_trip(GetParam(), 1 + 0.5 * unit), 1.0);  // a tie rounds to even
  EXPECT_EQ(round_trip(GetParam(), 1 + 1.5 * unit), 1 + 2 * unit);
  EXPECT_EQ(round_trip(GetParam(), 1 + 0.49 * unit), 1.0);
  EXPECT_EQ(round_trip(GetParam(), 1 + 0.51 * unit), 1 + unit);
  EXPECT_EQ(round_trip(GetParam(), -(1 + 1.5 * unit)), -(1 + 2 * unit));
  EXPECT_EQ(round_trip(GetParam(), 2 - 0.25 * unit), 2.0);  // carries into the exponent
}

TEST_P(HalfTest, ANumberJustBesideATieIsNotATie) {
  const double unit = std::ldexp(1.0, 1 - digits());
  const double little = std::ldexp(1.0, -40);  // lost if the number is converted to float first
  EXPECT_EQ(round_trip(GetParam(), 1 + 0.5 * unit + little), 1 + unit);
  EXPECT_EQ(round_trip(GetParam(), 1 + 1.5 * unit - little), 1 + unit);
}

TEST_P(HalfTest, LargeNumbersBecomeInfiniteAndSmallOnesZero) {
  const double inf = std::numeric_limits<double>::infinity();
  EXPECT_EQ(round_trip(GetParam(), 1e39), inf);
  EXPECT_EQ(round_trip(GetParam(), -1e39), -inf);
  EXPECT_EQ(round_trip(GetParam(), inf), inf);
  EXPECT_EQ(round_trip(GetParam(), 1e-60), 0.0);
  EXPECT_EQ(bits_of(GetParam(), -0.0), 0x8000);
  EXPECT_TRUE(std::isnan(round_trip(GetParam(), std::nan(""))));
}

TEST(HalfRangeTest, F16OverflowsAboveItsLargestNumber) {
  const double inf = std::numeric_limits<double>::infinity();
  EXPECT_EQ(round_trip(DType::f16, 65504), 65504);
  EXPECT_EQ(round_trip(DType::f16, 65519.9), 65504);
  EXPECT_EQ(round_trip(DType::f16, 65520), inf);
  const double least = std::ldexp(1.0, -24);
  EXPECT_EQ(round_trip(DType::f16, least), least);
  EXPECT_EQ(round_trip(DType::f16, 0.5 * least), 0.0);
  EXPECT_EQ(round_trip(DType::f16, 0.75 * least), least);
}

INSTANTIATE_TEST_SUITE_P(Types, HalfTest, ::testing::Values(DType::bf16, DType::f16),
                         [](const auto& dtype) { return dtype_name(dtype.param); });

}  // namespace
}  // namespace coterie
