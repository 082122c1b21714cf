// SPDX-License-Identifier: MIT
// Rotations of rows against their formula.
#include "coterie/positions.h"

#include <gtest/gtest.h>

#include <cmath>

#include "coterie/runtime.h"
#include "tests/support/expect.h"
#include "tests/support/tensors.h"
#include "tests/support/tolerance.h"

namespace coterie {
namespace {

using test::normals;

class PositionsTest : public ::testing::TestWithParam<CpuIsa> {
 protected:
  void SetUp() override { force_cpu_isa(GetParam()); }
  void TearDown() override { force_cpu_isa(supported_cpu_isas().back()); }
};

INSTANTIATE_TEST_SUITE_P(Isas, PositionsTest, ::testing::ValuesIn(supported_cpu_isas()),
                         [](const auto& isa) { return cpu_isa_name(isa.param); });

// Row by row in double.
std::vector<double> rotated(const TensorView& x, const Rotation& rotation) {
  std::vector<double> rows = read_values(x);
  const std::int64_t N = x.size(2), D = x.size(3), half = D / 2;
  for (std::int64_t r = 0; r < x.count() / D; ++r)
    for (std::int64_t d = 0; d < half; ++d) {
      const double position = static_cast<double>(rotation.first + r % N);
      const double angle = (rotation.inverse ? -1 : 1) * position *
                           std::pow(rotation.base, -2.0 * static_cast<double>(d) / D);
      double &a = rows[r * D + d], &b = rows[r * D + d + half];
      const double turned = a * std::cos(angle) - b * std::sin(angle);
      b = a * std::sin(angle) + b * std::cos(angle);
      a = turned;
    }
  return rows;
}

// The rounding to the result's type, four roundings of the accumulator, and the error of angles up
// to 1040 in double, of elements up to 4.
double bound_of(DType dtype, double value) {
  const double wide = test::ulp(accumulator_dtype(dtype), 4.0);
  const double rounding = dtype == DType::bf16  ? std::exp2(-8)
                          : dtype == DType::f16 ? std::exp2(-11)
                                                : 0;
  return rounding * std::abs(value) + 4 * wide + 4 * 1040 * std::exp2(-51);
}

TEST_P(PositionsTest, RotationsFollowTheirFormula) {
  for (const DType dtype : {DType::f32, DType::f64, DType::bf16, DType::f16})
    for (const std::int64_t N : {1, 7, 33})
      for (const std::int64_t D : {2, 6, 64, 130})
        for (const bool inverse : {false, true}) {
          const Rotation rotation{1000, 100.0, inverse};
          const HostTensor x = normals(dtype, {2, 3, N, D}, 1), out(dtype, {2, 3, N, D});
          rotate_rows(x, rotation, out);
          const std::vector<double> expected = rotated(x, rotation), found = read_values(out);
          for (std::size_t i = 0; i < expected.size(); ++i)
            ASSERT_NEAR(found[i], expected[i], bound_of(dtype, expected[i]))
                << dtype_name(dtype) << " N " << N << " D " << D << " element " << i;
        }
}

// Tokens before heads in memory, more elements in a row than are turned, and in place.
TEST_P(PositionsTest, StridesAreFree) {
  const Rotation rotation{3, 10000.0, false};
  const HostTensor memory = normals(DType::f32, {2, 9, 3, 20}, 2);
  const TensorView x = memory.view().transposed(1, 2).narrowed(3, 4, 8);
  const HostTensor dense(DType::f32, {2, 3, 9, 8});
  write_values(dense, read_values(x));
  const HostTensor out(DType::f32, {2, 3, 9, 8});
  rotate_rows(dense, rotation, out);
  rotate_rows(x, rotation, x);
  EXPECT_EQ(read_values(x), read_values(out));
}

// A row's bits depend on its position alone: not on other rows, nor on the number of threads.
TEST_P(PositionsTest, ARowDependsOnItsPositionAlone) {
  const HostTensor x = normals(DType::f32, {2, 2, 40, 16}, 3), all(DType::f32, {2, 2, 40, 16});
  const HostTensor alone(DType::f32, {2, 2, 40, 16}), threaded(DType::f32, {2, 2, 40, 16});
  const int before = threads();
  set_threads(1);
  rotate_rows(x, {5, 10000.0, false}, all);
  set_threads(7);
  rotate_rows(x, {5, 10000.0, false}, threaded);
  set_threads(before);
  for (std::int64_t n = 0; n < 40; ++n)
    rotate_rows(x.view().narrowed(2, n, 1), {5 + n, 10000.0, false},
                alone.view().narrowed(2, n, 1));
  EXPECT_TRUE(test::same_bits(all, alone));
  EXPECT_TRUE(test::same_bits(all, threaded));
}

TEST(RotateRows, TakesNoRowsAndRefusesOddOnes) {
  const HostTensor none(DType::f32, {2, 3, 0, 8}), odd(DType::f32, {1, 1, 2, 7});
  rotate_rows(none, {}, none);
  EXPECT_NE(test::error_of([&] {
              rotate_rows(odd, {}, odd);
            }).find("[rotate_rows] expected rows of an even number of elements; got x"),
            std::string::npos);
  const HostTensor x(DType::f32, {1, 1, 2, 8}), half(DType::bf16, {1, 1, 2, 8});
  EXPECT_NE(test::error_of([&] { rotate_rows(x, {}, half); }).find("out of type f32"),
            std::string::npos);
  EXPECT_NE(test::error_of([&] {
              rotate_rows(x, {0, -1.0, false}, x);
            }).find("got -1"),
            std::string::npos);
}

}  // namespace
}  // namespace coterie
