// SPDX-License-Identifier: MIT

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "coterie/runtime.h"
#include "ops/parts.h"
#include "tests/support/tensors.h"

namespace coterie {
namespace {

using test::error_of;
using test::integers;
using test::ints;

// The best tokens of one row: better score first, then lower index; NaN last. Ascending, then -1.
std::vector<double> best(const std::vector<double>& scores, std::int64_t count) {
  std::vector<double> order(scores.size());
  std::iota(order.begin(), order.end(), 0.0);
  const auto rank = [&](double i) {
    const double score = scores[static_cast<std::size_t>(i)];
    return std::isnan(score) ? -std::numeric_limits<double>::infinity() : score;
  };
  std::stable_sort(order.begin(), order.end(),
                   [&](double a, double b) { return rank(a) > rank(b); });
  if (static_cast<std::int64_t>(order.size()) > count) order.resize(count);
  std::sort(order.begin(), order.end());
  order.resize(count, -1.0);
  return order;
}

// Scores of a row against rows [begin, end) of one head.
std::vector<double> scores(const TensorView& row, const TensorView& tokens) {
  const std::vector<double> r = read_values(row), x = read_values(tokens);
  std::vector<double> result;
  for (std::size_t first = 0; first < x.size(); first += r.size()) {
    double sum = 0;
    for (std::size_t d = 0; d < r.size(); ++d) sum += r[d] * x[first + d];
    result.push_back(sum);
  }
  return result;
}

class SelectTopTest : public ::testing::TestWithParam<CpuIsa> {
 protected:
  void SetUp() override { force_cpu_isa(GetParam()); }
  void TearDown() override { force_cpu_isa(supported_cpu_isas().back()); }
};

TEST_P(SelectTopTest, TakesTheBestTokensAndTheLowerIndexOfEqualOnes) {
  for (DType dtype : {DType::f32, DType::f64, DType::bf16, DType::f16}) {
    for (std::int64_t dim : {1, 8, 33}) {
      for (std::int64_t count : {1, 5, 64, 130}) {
        const HostTensor x = integers(dtype, {2, 2, 113, dim}, 1);
        const HostTensor rows = integers(accumulator_dtype(dtype), {2, 2, 7, dim}, 2);
        const HostTensor indices(DType::i32, {2, 2, 7, count});
        select_top(rows, x, {}, indices);
        for (std::int64_t b = 0; b < 2; ++b)
          for (std::int64_t h = 0; h < 2; ++h)
            for (std::int64_t r = 0; r < 7; ++r) {
              const auto at = [&](const TensorView& t) {
                return t.narrowed(0, b, 1).narrowed(1, h, 1);
              };
              ASSERT_EQ(read_values(at(indices).narrowed(2, r, 1)),
                        best(scores(at(rows).narrowed(2, r, 1), at(x)), count))
                  << dtype_name(dtype) << " " << dim << " " << count;
            }
      }
    }
  }
}

TEST_P(SelectTopTest, MoreRowHeadsThanTokenHeadsAndTheReverse) {
  const HostTensor four = integers(DType::f32, {1, 4, 6, 8}, 3);
  const HostTensor two = integers(DType::f32, {1, 2, 6, 8}, 4);
  const HostTensor down(DType::i32, {1, 4, 6, 3}), up(DType::i32, {1, 4, 6, 3});
  select_top(four, two, {}, down);
  select_top(two, four, {}, up);
  for (std::int64_t h = 0; h < 4; ++h)
    for (std::int64_t r = 0; r < 6; ++r) {
      const TensorView large = four.view().narrowed(1, h, 1),
                       small = two.view().narrowed(1, h / 2, 1);
      EXPECT_EQ(read_values(down.view().narrowed(1, h, 1).narrowed(2, r, 1)),
                best(scores(large.narrowed(2, r, 1), small), 3));
      EXPECT_EQ(read_values(up.view().narrowed(1, h, 1).narrowed(2, r, 1)),
                best(scores(small.narrowed(2, r, 1), large), 3));
    }
}

TEST_P(SelectTopTest, PaddingIsNeverTakenAndRowsMayServeAllItems) {
  HostTensor x = integers(DType::f32, {3, 1, 9, 8}, 5);
  fill(x.view().narrowed(0, 1, 1).narrowed(2, 4, 5), [](std::int64_t) { return 1e6; });
  const HostTensor rows = integers(DType::f32, {1, 1, 4, 8}, 6);
  const HostTensor lengths = ints({9, 4, 0}), indices(DType::i32, {3, 1, 4, 6});
  select_top(rows, x, test::padded(lengths), indices);
  const std::vector<double> length = read_values(lengths);
  for (std::int64_t b = 0; b < 3; ++b)
    for (std::int64_t r = 0; r < 4; ++r) {
      const TensorView valid =
          x.view().narrowed(0, b, 1).narrowed(2, 0, static_cast<std::int64_t>(length[b]));
      EXPECT_EQ(read_values(indices.view().narrowed(0, b, 1).narrowed(2, r, 1)),
                best(scores(rows.view().narrowed(2, r, 1), valid), 6));
    }
}

TEST_P(SelectTopTest, PackedItemsCountFromTheirStart) {
  const HostTensor x = integers(DType::f32, {1, 1, 30, 8}, 7);
  const HostTensor rows = integers(DType::f32, {3, 1, 4, 8}, 8);
  const HostTensor cu_seqlens = ints({0, 11, 11, 28}), indices(DType::i32, {3, 1, 4, 5});
  select_top(rows, x, test::packed(cu_seqlens), indices);
  const std::vector<double> cu = read_values(cu_seqlens);
  for (std::int64_t t = 0; t < 3; ++t)
    for (std::int64_t r = 0; r < 4; ++r) {
      const auto begin = static_cast<std::int64_t>(cu[t]);
      const TensorView item =
          x.view().narrowed(2, begin, static_cast<std::int64_t>(cu[t + 1]) - begin);
      EXPECT_EQ(read_values(indices.view().narrowed(0, t, 1).narrowed(2, r, 1)),
                best(scores(rows.view().narrowed(0, t, 1).narrowed(2, r, 1), item), 5));
    }
}

TEST_P(SelectTopTest, NaNRanksLast) {
  HostTensor x = integers(DType::f32, {1, 1, 6, 2}, 9);
  fill(x.view().narrowed(2, 0, 2), [](std::int64_t) { return std::nan(""); });
  const HostTensor rows = test::tensor_of(DType::f32, {1, 1, 1, 2}, {1, 1});
  const HostTensor indices(DType::i32, {1, 1, 1, 4});
  select_top(rows, x, {}, indices);
  EXPECT_EQ(read_values(indices), (std::vector<double>{2, 3, 4, 5}));
  const HostTensor many(DType::i32, {1, 1, 1, 5});
  select_top(rows, x, {}, many);
  EXPECT_EQ(read_values(many), (std::vector<double>{0, 2, 3, 4, 5}));
}

INSTANTIATE_TEST_SUITE_P(Isas, SelectTopTest, ::testing::ValuesIn(supported_cpu_isas()),
                         [](const auto& isa) { return cpu_isa_name(isa.param); });

TEST(SelectTopRefusalTest, ShapesAndTypesMustFit) {
  const HostTensor x(DType::bf16, {2, 3, 9, 8}), rows(DType::f32, {2, 3, 4, 8});
  const HostTensor indices(DType::i32, {2, 3, 4, 5});
  const HostTensor half_rows(DType::bf16, {2, 3, 4, 8}), narrow(DType::f32, {2, 3, 4, 7});
  const HostTensor two_heads(DType::f32, {2, 2, 4, 8}), few(DType::i32, {2, 3, 3, 5});
  const HostTensor wide(DType::i64, {2, 3, 4, 5}), items(DType::f32, {3, 3, 4, 8});
  const auto refused = [&](const TensorView& r, const TensorView& i) {
    const std::string message = error_of([&] { select_top(r, x, {}, i); });
    EXPECT_TRUE(message.starts_with("[select_top] ")) << message;
  };
  refused(half_rows, indices);
  refused(narrow, indices);
  refused(two_heads, indices);
  refused(items, indices);
  refused(rows, few);
  refused(rows, wide);
  refused({}, indices);
}

}  // namespace
}  // namespace coterie
