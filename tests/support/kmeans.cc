// SPDX-License-Identifier: MIT
#include "tests/support/kmeans.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <ostream>
#include <set>

#include "coterie/random.h"

namespace coterie::test {

namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

std::vector<double> make_rows(const KMeansCase& c) {
  std::vector<double> values;
  for (std::int64_t p = 0; p < c.problems; ++p) {
    const RandomStream stream{7, RandomUse::data, static_cast<std::uint32_t>(p)};
    for (std::int64_t n = 0; n < c.rows; ++n) {
      const auto group = static_cast<std::int64_t>(random_below(
          stream, static_cast<std::uint64_t>(n), static_cast<std::uint32_t>(c.clusters)));
      for (std::int64_t d = 0; d < c.width; ++d) {
        const auto at = static_cast<std::uint64_t>(1000000 + n * c.width + d);
        const auto centre = static_cast<std::uint64_t>(100 + group * c.width + d);
        double value =
            3 * random_normal(stream, centre) + (c.equal ? 0 : random_normal(stream, at));
        if (c.integers) value = std::round(value);
        values.push_back(value + (c.offset ? 100 : 0));
      }
      if (c.spoilt && n % 5 == 1)
        values[values.size() - 1 - static_cast<std::size_t>(n % c.width)] =
            n % 2 ? kNan : std::numeric_limits<double>::infinity();
    }
  }
  return values;
}

}  // namespace

void PrintTo(const KMeansCase& c, std::ostream* out) { *out << c.name; }

KMeansOutcome::KMeansOutcome(const KMeansCase& c)
    : x(c.dtype, {c.problems, c.rows, c.width}),
      centroids(accumulator_dtype(c.dtype), {c.problems, c.clusters, c.width}),
      labels(DType::i32, {c.problems, c.rows}),
      counts(DType::i32, {c.problems, c.clusters}) {
  write_values(x, make_rows(c));
}

std::vector<KMeansCase> kmeans_cases(bool cpu) {
  std::vector<KMeansCase> all;
  const auto add = [&](KMeansCase c) { all.push_back(std::move(c)); };
  const auto random = KMeansStart::random, plus = KMeansStart::plus_plus;
  add({"few", DType::f32, 2, 50, 3, 4, {4, random, false, 1}});
  add({"integers",
       DType::f32,
       3,
       200,
       8,
       9,
       {5, random, false, 2},
       true,
       false,
       false,
       false,
       true});
  add({"integers_drawn",
       DType::f32,
       2,
       3000,
       5,
       12,
       {1, plus, false, 3},
       true,
       false,
       false,
       false,
       true});
  add({"filled", DType::f32, 2, 90, 4, 60, {3, random, true, 4}, true, false, false, false, true});
  add({"bf16", DType::bf16, 2, 700, 64, 20, {5, random, false, 5}});
  add({"f16_drawn", DType::f16, 2, 700, 33, 20, {3, plus, true, 6}});
  add({"wide", DType::bf16, 1, 900, 128, 70, {4, random, false, 7}});
  add({"wide_f32", DType::f32, 2, 500, 128, 33, {4, plus, false, 8}});
  add({"offset", DType::f32, 2, 600, 16, 12, {4, random, false, 9}, false, true});
  add({"offset_bf16", DType::bf16, 1, 600, 48, 12, {4, random, false, 10}, true, true});
  add({"spoilt", DType::f32, 2, 300, 7, 6, {4, random, false, 11}, true, false, true, false, true});
  add({"spoilt_filled", DType::bf16, 2, 300, 16, 40, {2, plus, true, 12}, false, false, true});
  add({"equal_rows", DType::f32, 2, 120, 6, 30, {3, plus, false, 13}, true, false, false, true});
  add({"equal_rows_filled",
       DType::f32,
       1,
       120,
       6,
       30,
       {3, random, true, 14},
       true,
       false,
       false,
       true});
  add({"few_rows",
       DType::f32,
       2,
       5,
       4,
       12,
       {2, random, false, 15},
       true,
       false,
       false,
       false,
       true});
  add({"few_rows_filled", DType::bf16, 2, 5, 4, 12, {2, plus, true, 16}, true});
  add({"one_row", DType::f32, 1, 1, 3, 2, {1, random, true, 17}, true, false, false, false, true});
  add({"no_rows", DType::f32, 2, 0, 3, 4, {2, plus, true, 18}, true, false, false, false, true});
  add({"no_problems", DType::f32, 0, 9, 3, 4, {2, random, false, 19}});
  add({"one_cluster", DType::bf16, 2, 333, 24, 1, {2, random, false, 20}});
  add({"no_iterations",
       DType::f32,
       2,
       200,
       8,
       9,
       {0, random, false, 21},
       true,
       false,
       false,
       false,
       true});
  if (cpu)
    add({"f64", DType::f64, 2, 300, 9, 11, {5, plus, true, 22}, true, false, false, false, true});
  if (!cpu) {
    add({"many", DType::bf16, 3, 20000, 64, 256, {3, random, false, 23}});
    add({"many_wide", DType::bf16, 2, 9000, 128, 1024, {2, random, false, 24}});
    add({"many_wide_f16", DType::f16, 1, 5000, 128, 2500, {1, random, true, 25}});
    add({"many_wide_spoilt",
         DType::bf16,
         2,
         4000,
         128,
         900,
         {2, random, false, 27},
         false,
         false,
         true});
    add({"many_wide_equal",
         DType::f16,
         1,
         3000,
         128,
         1500,
         {2, random, false, 28},
         true,
         false,
         false,
         true});
    add({"many_f32", DType::f32, 1, 6000, 96, 700, {2, random, false, 26}});
  }
  return all;
}

void expect_clustering(const KMeansCase& c, const KMeansOutcome& got) {
  const std::vector<double> x = read_values(got.x), centroids = read_values(got.centroids),
                            labels = read_values(got.labels), counts = read_values(got.counts);
  const auto at = [&](const std::vector<double>& values, std::int64_t row, std::int64_t d) {
    return values[static_cast<std::size_t>(row * c.width + d)];
  };
  for (std::int64_t p = 0; p < c.problems; ++p) {
    std::vector<double> members(static_cast<std::size_t>(c.clusters));
    std::int64_t finite_rows = 0;
    for (std::int64_t n = 0; n < c.rows; ++n) {
      const std::int64_t row = p * c.rows + n;
      bool finite = true;
      double largest = 0;
      for (std::int64_t d = 0; d < c.width; ++d) {
        finite = finite && std::isfinite(at(x, row, d));
        largest = std::max(largest, std::abs(at(x, row, d)));
      }
      const double label = labels[static_cast<std::size_t>(row)];
      if (!finite) {
        EXPECT_EQ(label, -1) << "row " << n;
        continue;
      }
      ++finite_rows;
      ASSERT_TRUE(label >= 0 && label < static_cast<double>(c.clusters)) << "row " << n;
      ++members[static_cast<std::size_t>(label)];
      // Resolution of scores: 2^-17 of |x|_inf |m|_1 (nearest.cuh), and of rounded centroids.
      const auto distance = [&](std::int64_t k) {
        double sum = 0;
        for (std::int64_t d = 0; d < c.width; ++d)
          sum += std::pow(at(x, row, d) - at(centroids, p * c.clusters + k, d), 2);
        return sum;
      };
      double least = std::numeric_limits<double>::infinity(), spread = 0;
      for (std::int64_t k = 0; k < c.clusters; ++k) {
        least = std::min(least, distance(k));
        double norm = 0;
        for (std::int64_t d = 0; d < c.width; ++d)
          norm += std::abs(at(centroids, p * c.clusters + k, d) - at(centroids, p * c.clusters, d));
        spread = std::max(spread, norm);
      }
      const double own = distance(static_cast<std::int64_t>(label));
      const double rounding = dtype_bytes(c.dtype) == 2 ? 1.0 / 64 : 1.0 / 4096;
      const double slack =
          rounding * std::sqrt(own) * spread / std::sqrt(static_cast<double>(c.width)) +
          largest * spread / 8192 + 1e-5;
      if (!c.params.fill_empty) {
        EXPECT_LE(own, least + slack) << "problem " << p << " row " << n;
      }
    }
    std::int64_t empty = 0;
    for (std::int64_t k = 0; k < c.clusters; ++k) {
      EXPECT_EQ(counts[static_cast<std::size_t>(p * c.clusters + k)],
                members[static_cast<std::size_t>(k)]);
      empty += members[static_cast<std::size_t>(k)] == 0;
      for (std::int64_t d = 0; d < c.width; ++d)
        EXPECT_TRUE(std::isfinite(at(centroids, p * c.clusters + k, d)));
    }
    if (c.params.fill_empty) {
      EXPECT_EQ(empty, std::max<std::int64_t>(c.clusters - finite_rows, 0));
    }
  }
}

void expect_equal(const KMeansOutcome& got, const KMeansOutcome& want) {
  EXPECT_EQ(read_values(got.labels), read_values(want.labels));
  EXPECT_EQ(read_values(got.counts), read_values(want.counts));
  const std::vector<double> a = read_values(got.centroids), b = read_values(want.centroids);
  for (std::size_t i = 0; i < a.size(); ++i) ASSERT_NEAR(a[i], b[i], 1e-5) << i;
}

}  // namespace coterie::test
