// SPDX-License-Identifier: MIT
// Routing's centroids: k-means on normalised rows, the moving average, the commitment loss.
#include <gtest/gtest.h>

#include "coterie/random.h"
#include "tests/ref/support.h"

namespace coterie::ref {
namespace {

HostTensor normal_tensor(std::vector<std::int64_t> sizes, std::uint32_t stream) {
  HostTensor tensor(DType::f64, std::move(sizes));
  fill(tensor, [=](std::int64_t i) {
    return random_normal({.seed = 11, .use = RandomUse::data, .problem = stream},
                         static_cast<std::uint64_t>(i));
  });
  return tensor;
}

// A batch of two items with four heads, the second item padded; centroids for two heads.
struct Tokens {
  HostTensor x = normal_tensor({2, 4, 6, 5}, 0), centroids = normal_tensor({2, 3, 5}, 1);
  HostTensor labels{DType::i32, {2, 4, 6}}, lengths{DType::i32, {2}};

  Tokens() {
    write_values(lengths, {6, 4});
    fill(x.view().narrowed(0, 1, 1).narrowed(2, 4, 2), [](std::int64_t) { return NAN; });
    TensorView shared = centroids.view();  // (1, 2, 3, 5)
    shared = TensorView::contiguous(shared.data, shared.dtype, {1, 2, 3, 5});
    nearest_centroid<double>(x, sequences(), shared, {}, labels);
  }
  Sequences sequences() const { return {.lengths = lengths, .cu_seqlens = {}}; }
};

std::vector<double> normalised(std::vector<double> row) {
  double mean = 0.0, variance = 0.0;
  const auto dim = static_cast<double>(row.size());
  for (double value : row) mean += value / dim;
  for (double value : row) variance += (value - mean) * (value - mean) / dim;
  for (double& value : row) value = (value - mean) / std::sqrt(variance + 1e-6);
  return row;
}

// Row `token` of x, normalised.
std::vector<double> row_of(const HostTensor& x, std::int64_t token) {
  const double* row = x.data<double>() + token * 5;
  return normalised({row, row + 5});
}

TEST(CentroidsTest, CommitmentLossIsTheMeanSquareOverValidElements) {
  const Tokens t;
  const std::vector<int> labels = indices_of(t.labels);
  double sum = 0.0;
  for (std::int64_t token = 0; token < 48; ++token) {
    if (labels[token] < 0) continue;
    const std::vector<double> row = row_of(t.x, token);
    const std::int64_t head = token / 6 % 4 / 2;
    for (int d = 0; d < 5; ++d)
      sum += std::pow(row[d] - t.centroids.data<double>()[(head * 3 + labels[token]) * 5 + d], 2);
  }
  EXPECT_NEAR(commitment_loss<double>(t.x, t.sequences(), t.centroids, t.labels),
              sum / (4 * 10 * 5), kExact);
}

// Bounds as in gradient_test.cc: two step sizes bound the truncation error, 64 u / h the rounding.
TEST(CentroidsTest, CommitmentGradientAgreesWithFiniteDifferences) {
  Tokens t;
  const HostTensor dx(DType::f64, {2, 4, 6, 5});
  fill(dx, [](std::int64_t) { return 2.0; });
  commitment_loss_backward<double>(t.x, t.sequences(), t.centroids, t.labels, 3.0, dx);
  auto* x = t.x.data<double>();
  const auto central = [&](std::int64_t i, double h) {
    const double at = x[i];
    x[i] = at + h;
    const double above = commitment_loss<double>(t.x, t.sequences(), t.centroids, t.labels);
    x[i] = at - h;
    const double below = commitment_loss<double>(t.x, t.sequences(), t.centroids, t.labels);
    x[i] = at;
    return 3.0 * (above - below) / (2 * h);
  };
  for (std::int64_t i = 0; i < 240; ++i) {
    const double gradient = dx.data<double>()[i] - 2.0;  // it is added to the previous content
    if (std::isnan(x[i])) {
      EXPECT_EQ(gradient, 0.0);
      continue;
    }
    const double h = 1.0 / 1024;
    const double d1 = central(i, h), d2 = central(i, 2 * h), d4 = central(i, 4 * h);
    const double fine = (4 * d1 - d2) / 3, coarse = (4 * d2 - d4) / 3;
    const double rounding = 3.0 * 1.5 * 64 * std::ldexp(1.0, -53) / h;
    EXPECT_NEAR(gradient, fine, std::abs(coarse - fine) + rounding) << i;
  }
}

TEST(CentroidsTest, MovingAverageFollowsItsFormulas) {
  Tokens t;
  HostTensor counts(DType::f64, {2, 3}), sums = t.centroids;
  fill(counts, [](std::int64_t) { return 1.0; });
  for (int token = 0; token < 24; ++token)  // no token in cluster 2 of head 0
    if (token / 6 < 2 && t.labels.data<std::int32_t>()[token] == 2)
      t.labels.data<std::int32_t>()[token] = 0;
  for (int token = 24; token < 36; ++token)
    if (t.labels.data<std::int32_t>()[token] == 2) t.labels.data<std::int32_t>()[token] = 1;
  const std::vector<double> before = read_values(t.centroids);
  const std::vector<int> labels = indices_of(t.labels);
  const double decay = 0.75;
  std::vector<double> expected_counts(6, decay), members(6, 0.0), expected_sums = before;
  for (double& value : expected_sums) value *= decay;
  for (std::int64_t token = 0; token < 48; ++token) {
    if (labels[token] < 0) continue;
    const std::int64_t cluster = token / 6 % 4 / 2 * 3 + labels[token];
    const std::vector<double> row = row_of(t.x, token);
    expected_counts[cluster] += 1 - decay;
    members[cluster] += 1;
    for (int d = 0; d < 5; ++d) expected_sums[cluster * 5 + d] += (1 - decay) * row[d];
  }
  ASSERT_EQ(members[2], 0.0);
  const HostTensor step_members(DType::f64, {2, 3}), step_sums(DType::f64, {2, 3, 5});
  const CentroidStatistics statistics{.members = step_members, .sums = step_sums};
  add_centroid_statistics<double>(t.x, t.sequences(), t.labels, statistics);
  move_centroids<double>(decay, statistics,
                         {.centroids = t.centroids, .counts = counts, .sums = sums});
  EXPECT_LT(largest_difference(read_values(counts), expected_counts), kExact);
  EXPECT_LT(largest_difference(read_values(sums), expected_sums), kExact);
  const std::vector<double> after = read_values(t.centroids);
  for (std::int64_t cluster = 0; cluster < 6; ++cluster) {
    const double* own = &expected_counts[cluster / 3 * 3];
    const double total = own[0] + own[1] + own[2];
    const double smoothed = (expected_counts[cluster] + 1e-5) / (total + 3e-5) * total;
    for (int d = 0; d < 5; ++d) {
      const std::int64_t e = cluster * 5 + d;
      EXPECT_NEAR(after[e], members[cluster] == 0 ? before[e] : expected_sums[e] / smoothed,
                  kExact);
    }
  }
}

TEST(CentroidsTest, SphericalKMeansReachesNormalisedMeans) {
  const HostTensor x = normal_tensor({2, 2, 20, 5}, 3), centroids(DType::f64, {2, 4, 5});
  spherical_kmeans<double>({.iterations = 50, .seed = 2}, x, {}, centroids);
  const HostTensor labels(DType::i32, {2, 2, 20}), rows = x;
  for (std::int64_t token = 0; token < 80; ++token) {
    const std::vector<double> row = row_of(x, token);
    std::copy(row.begin(), row.end(), static_cast<double*>(rows.view().data) + token * 5);
  }
  const TensorView shared = TensorView::contiguous(centroids.view().data, DType::f64, {1, 2, 4, 5});
  nearest_centroid<double>(rows, {}, shared, {}, labels);
  const std::vector<int> label = indices_of(labels);
  for (std::int64_t head = 0; head < 2; ++head)  // a fixed point of the iteration
    for (int c = 0; c < 4; ++c) {
      std::vector<double> mean(5, 0.0);
      double count = 0.0;
      for (std::int64_t token = 0; token < 80; ++token) {
        if (token / 20 % 2 != head || label[token] != c) continue;
        count += 1;
        for (int d = 0; d < 5; ++d) mean[d] += rows.data<double>()[token * 5 + d];
      }
      ASSERT_GT(count, 0.0);
      for (double& value : mean) value /= count;
      const double* found = centroids.data<double>() + (head * 4 + c) * 5;
      EXPECT_LT(largest_difference(normalised(mean), {found, found + 5}), kExact);
    }
}

}  // namespace
}  // namespace coterie::ref
