// SPDX-License-Identifier: MIT
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "coterie/attend.h"
#include "tests/support/tensors.h"
#include "tests/support/tolerance.h"

namespace coterie {
namespace {

using test::error_of;
using test::follows_rule;

constexpr double kInf = std::numeric_limits<double>::infinity();

struct Merged {
  std::vector<double> out, lse;
};

// out = sum_p exp(lse_p - lse) parts_p with lse = log sum_p exp(lse_p), in T.
template <class T>
Merged merge(const std::vector<double>& parts, const std::vector<double>& part_lse, std::size_t P,
             std::size_t R, std::size_t Dv) {
  Merged merged;
  for (std::size_t r = 0; r < R; ++r) {
    T largest = -std::numeric_limits<T>::infinity(), total = 0;
    for (std::size_t p = 0; p < P; ++p) largest = std::max(largest, T(part_lse[p * R + r]));
    std::vector<T> row(Dv);
    for (std::size_t p = 0; p < P && largest > -std::numeric_limits<T>::infinity(); ++p) {
      const T weight = std::exp(T(part_lse[p * R + r]) - largest);
      total += weight;
      for (std::size_t d = 0; d < Dv; ++d) row[d] += weight * T(parts[(p * R + r) * Dv + d]);
    }
    merged.lse.push_back(total > 0 ? largest + std::log(total) : -kInf);
    for (T value : row) merged.out.push_back(total > 0 ? value / total : 0);
  }
  return merged;
}

void check(DType dtype, std::int64_t P, std::int64_t R, std::int64_t Dv) {
  const HostTensor parts = test::normals(dtype, {P, R, Dv}, 1);
  HostTensor part_lse = test::normals(dtype, {P, R}, 2);
  std::vector<double> lse_values = read_values(part_lse);
  for (std::size_t i = 0; i < lse_values.size(); ++i) {
    lse_values[i] = i % 5 == 3 ? -kInf : 10 * lse_values[i];
  }
  if (R > 1) {
    for (std::int64_t p = 0; p < P; ++p)
      lse_values[p * R + 1] = -kInf;  // a row whose parts are all empty
  }
  write_values(part_lse, lse_values);
  const HostTensor out(dtype, {R, Dv}), lse(dtype, {R});
  merge_partials(parts, part_lse, out, lse);
  const std::vector<double> values = read_values(parts);
  const Merged exact = merge<double>(values, read_values(part_lse), P, R, Dv);
  const Merged naive = merge<float>(values, read_values(part_lse), P, R, Dv);
  double magnitude = 0;
  for (double value : values) magnitude = std::max(magnitude, std::abs(value));
  EXPECT_TRUE(follows_rule("out", out, {exact.out, naive.out, magnitude}));
  EXPECT_TRUE(follows_rule("lse", lse, {exact.lse, naive.lse, 0}));
}

TEST(MergeTest, WeighsPartsByTheirMass) {
  for (DType dtype : {DType::f32, DType::f64}) {
    for (std::int64_t parts : {1, 2, 7}) {
      check(dtype, parts, 33, 24);
      check(dtype, parts, 1, 1);
    }
  }
}

TEST(MergeTest, OnePartIsItself) {
  const HostTensor parts = test::normals(DType::f32, {1, 5, 8}, 3),
                   part_lse = test::normals(DType::f32, {1, 5}, 4);
  const HostTensor out(DType::f32, {5, 8}), lse(DType::f32, {5});
  merge_partials(parts, part_lse, out, lse);
  EXPECT_EQ(read_values(out), read_values(parts));
  EXPECT_EQ(read_values(lse), read_values(part_lse));
}

TEST(MergeTest, AnEmptyPartHasNoSayWhateverItHolds) {
  const HostTensor parts = test::tensor_of(DType::f32, {2, 2, 1}, {3, NAN, NAN, NAN});
  const HostTensor part_lse = test::tensor_of(DType::f32, {2, 2}, {1, -kInf, -kInf, -kInf});
  const HostTensor out(DType::f32, {2, 1}), lse(DType::f32, {2});
  merge_partials(parts, part_lse, out, lse);
  EXPECT_EQ(read_values(out), (std::vector<double>{3, 0}));
  EXPECT_EQ(read_values(lse), (std::vector<double>{1, -kInf}));
}

TEST(MergeTest, LargeMassesDoNotOverflow) {
  const HostTensor parts = test::tensor_of(DType::f32, {2, 1, 1}, {2, 4});
  const HostTensor part_lse = test::tensor_of(DType::f32, {2, 1}, {1000, 1000});
  const HostTensor out(DType::f32, {1, 1}), lse(DType::f32, {1});
  merge_partials(parts, part_lse, out, lse);
  EXPECT_EQ(read_values(out)[0], 3);
  EXPECT_NEAR(read_values(lse)[0], 1000 + std::log(2), test::ulp(DType::f32, 1000));
}

TEST(MergeTest, ShapesAndTypesMustFit) {
  const HostTensor parts(DType::f32, {2, 5, 8}), part_lse(DType::f32, {2, 5});
  const HostTensor out(DType::f32, {5, 8}), lse(DType::f32, {5});
  const HostTensor few(DType::f32, {2, 4}), narrow(DType::f32, {5, 7}), doubles(DType::f64, {5});
  const HostTensor half(DType::bf16, {2, 5, 8}), half_out(DType::bf16, {5, 8});
  for (const std::string& message :
       {error_of([&] { merge_partials(parts, few, out, lse); }),
        error_of([&] { merge_partials(parts, part_lse, narrow, lse); }),
        error_of([&] { merge_partials(parts, part_lse, out, doubles); }),
        error_of([&] { merge_partials(half, part_lse, half_out, lse); }),
        error_of([&] { merge_partials({}, part_lse, out, lse); })}) {
    EXPECT_TRUE(message.starts_with("[merge_partials] ")) << message;
  }
}

}  // namespace
}  // namespace coterie
