// SPDX-License-Identifier: MIT
// The centroids of routing: spherical k-means, moving average, commitment loss.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "cases/buffers.h"
#include "coterie/attention.h"
#include "coterie/routing.h"
#include "coterie/runtime.h"
#include "ref/ref.h"
#include "tests/support/definitions.h"
#include "tests/support/expect.h"
#include "tests/support/tensors.h"
#include "tests/support/tolerance.h"

namespace coterie {
namespace {

using test::follows_rule;
using test::ints;
using test::labels_below;
using test::nearest_rows;
using test::normalised;
using test::normals;
using test::padded;

class CentroidsTest : public ::testing::TestWithParam<CpuIsa> {
 protected:
  void SetUp() override { force_cpu_isa(GetParam()); }
  void TearDown() override { force_cpu_isa(supported_cpu_isas().back()); }
};

INSTANTIATE_TEST_SUITE_P(Isas, CentroidsTest, ::testing::ValuesIn(supported_cpu_isas()),
                         [](const auto& isa) { return cpu_isa_name(isa.param); });

// Largest difference, relative to the rounding of float sums of `terms` numbers of about 1.
double in_roundings(const std::vector<double>& a, const std::vector<double>& b, double terms) {
  double largest = 0;
  EXPECT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) largest = std::max(largest, std::abs(a[i] - b[i]));
  return largest / (terms * test::ulp(DType::f32, 1.0));
}

TEST_P(CentroidsTest, SphericalKMeansStartsFromNormalisedRowsAndTakesNormalisedMeans) {
  const std::int64_t clusters = 5, dim = 16;
  const HostTensor x = normals(DType::f32, {2, 2, 30, dim}, 8);
  const HostTensor lengths = ints({30, 22});
  HostTensor before(DType::f32, {2, clusters, dim}), after(DType::f32, {2, clusters, dim});
  for (std::int64_t h = 0; h < 2; ++h) {
    spherical_kmeans({.iterations = 0, .seed = 2}, x, padded(lengths), before);
    std::vector<double> rows;
    for (std::int64_t b = 0; b < 2; ++b) {
      const auto used = static_cast<std::int64_t>(read_values(lengths)[b]);
      const std::vector<double> some =
          read_values(x.view().narrowed(0, b, 1).narrowed(1, h, 1).narrowed(2, 0, used));
      rows.insert(rows.end(), some.begin(), some.end());
    }
    rows = normalised(rows, dim);
    std::set<std::size_t> starts;
    for (std::int64_t c = 0; c < clusters; ++c) {
      const std::vector<double> centroid =
          read_values(before.view().narrowed(0, h, 1).narrowed(1, c, 1));
      for (std::size_t i = 0; i < rows.size(); i += dim) {
        const std::vector<double> row(rows.begin() + i, rows.begin() + i + dim);
        if (in_roundings(row, centroid, dim) < 1) starts.insert(i / dim);
      }
    }
    EXPECT_EQ(starts.size(), static_cast<std::size_t>(clusters))
        << "centroids should start at distinct rows of the batch";
    for (std::int64_t iterations : {0, 3}) {
      spherical_kmeans({.iterations = iterations, .seed = 2}, x, padded(lengths), before);
      spherical_kmeans({.iterations = iterations + 1, .seed = 2}, x, padded(lengths), after);
      const std::vector<double> old = read_values(before.view().narrowed(0, h, 1));
      const std::vector<double> labels = nearest_rows(rows, old, {}, dim);
      for (std::int64_t c = 0; c < clusters; ++c) {
        std::vector<double> mean(dim);
        double members = 0;
        for (std::size_t i = 0; i < labels.size(); ++i) {
          if (labels[i] != static_cast<double>(c)) continue;
          ++members;
          for (std::int64_t d = 0; d < dim; ++d) mean[d] += rows[i * dim + d];
        }
        for (double& value : mean) value /= members;
        const std::vector<double> expected =
            members > 0 ? normalised(mean, dim)
                        : std::vector<double>(old.begin() + c * dim, old.begin() + (c + 1) * dim);
        EXPECT_LT(in_roundings(read_values(after.view().narrowed(0, h, 1).narrowed(1, c, 1)),
                               expected, 4 * (dim + members)),
                  1.0);
      }
    }
  }
}

// Nine of ten tokens are alike: with random rows most centroids would start there.
TEST_P(CentroidsTest, SphericalKMeansFindsRareKindsOfTokens) {
  const std::int64_t kinds = 6, dim = 16, tokens = 600;
  const HostTensor kind = normals(DType::f32, {1, 1, kinds, dim}, 4);
  const std::vector<double> rows = read_values(kind);
  std::vector<double> values;
  for (std::int64_t i = 0; i < tokens; ++i) {
    const std::int64_t row = i % 10 == 0 ? 1 + i / 10 % (kinds - 1) : 0;
    values.insert(values.end(), rows.begin() + row * dim, rows.begin() + (row + 1) * dim);
  }
  const HostTensor x = test::tensor_of(DType::f32, {1, 1, tokens, dim}, values);
  HostTensor centroids(DType::f32, {1, kinds, dim});
  spherical_kmeans({.seed = 3}, x, {}, centroids);
  const std::vector<double> labels =
      nearest_rows(normalised(rows, dim), read_values(centroids), {}, dim);
  EXPECT_EQ(std::set<double>(labels.begin(), labels.end()).size(), static_cast<std::size_t>(kinds));
}

// What a step with one batch does.
void update(double decay, const TensorView& x, const Sequences& sequences, const TensorView& labels,
            const CentroidState& state) {
  const std::int64_t heads = state.counts.size(0), clusters = state.counts.size(1);
  const HostTensor members(DType::f64, {heads, clusters});
  const HostTensor sums(DType::f64, {heads, clusters, x.size(3)});
  add_centroid_statistics(x, sequences, labels, {members, sums});
  move_centroids(decay, {members, sums}, state);
}

struct Ema {
  HostTensor x = normals(DType::f32, {2, 4, 25, 8}, 9);
  HostTensor lengths = ints({25, 13});
  HostTensor labels = labels_below(5, {2, 4, 25}, 10);  // of 6 clusters: the last has no members
  HostTensor centroids = normals(DType::f32, {2, 6, 8}, 11);
  HostTensor counts = test::tensor_of(DType::f32, {2, 6}, std::vector<double>(12, 1.0));
  HostTensor sums = centroids;
  CentroidState state;

  Ema() { state = {.centroids = centroids, .counts = counts, .sums = sums}; }
};

TEST_P(CentroidsTest, MovingAverageFollowsItsFormula) {
  Ema ema;
  const double decay = 0.9, eps = 1e-5;
  const std::vector<double> old = read_values(ema.centroids);
  update(decay, ema.x, padded(ema.lengths), ema.labels, ema.state);
  const std::vector<double> labels = read_values(ema.labels), length = read_values(ema.lengths);
  const std::vector<double> rows = normalised(read_values(ema.x), 8);
  std::vector<double> counts(12), sums(12 * 8);
  for (std::int64_t b = 0; b < 2; ++b)
    for (std::int64_t h = 0; h < 4; ++h)
      for (std::int64_t i = 0; i < static_cast<std::int64_t>(length[b]); ++i) {
        const std::int64_t row = (b * 4 + h) * 25 + i;
        const std::int64_t cell = h / 2 * 6 + static_cast<std::int64_t>(labels[row]);
        counts[cell] += 1;
        for (std::int64_t d = 0; d < 8; ++d) sums[cell * 8 + d] += rows[row * 8 + d];
      }
  std::vector<double> expected_counts(12), expected_sums(12 * 8), expected(12 * 8);
  for (std::int64_t h = 0; h < 2; ++h) {
    double total = 0;
    for (std::int64_t c = h * 6; c < h * 6 + 6; ++c) {
      expected_counts[c] = decay * 1.0 + (1 - decay) * counts[c];
      total += expected_counts[c];
    }
    for (std::int64_t c = h * 6; c < h * 6 + 6; ++c) {
      const double smoothed = (expected_counts[c] + eps) / (total + 6 * eps) * total;
      for (std::int64_t d = c * 8; d < c * 8 + 8; ++d) {
        expected_sums[d] = decay * old[d] + (1 - decay) * sums[d];
        expected[d] = counts[c] > 0 ? expected_sums[d] / smoothed : old[d];
      }
    }
  }
  const double terms = 2 * 2 * 25 + 8;  // at most all tokens in one cluster, plus a row's mean
  EXPECT_LT(in_roundings(read_values(ema.counts), expected_counts, terms), 1.0);
  EXPECT_LT(in_roundings(read_values(ema.sums), expected_sums, terms), 1.0);
  EXPECT_LT(in_roundings(read_values(ema.centroids), expected, terms), 1.0);
  std::vector<double> kept(old.begin() + 40, old.begin() + 48);  // cluster 5 of both heads
  kept.insert(kept.end(), old.begin() + 88, old.end());
  EXPECT_EQ(read_values(ema.centroids.view().narrowed(1, 5, 1)), kept);
}

TEST_P(CentroidsTest, MovingAverageDoesNotSeePadding) {
  Ema clean, spoilt;
  fill(spoilt.x.view().narrowed(0, 1, 1).narrowed(2, 13, 12),
       [](std::int64_t) { return std::nan(""); });
  fill(spoilt.labels.view().narrowed(0, 1, 1).narrowed(2, 13, 12),
       [](std::int64_t) { return -1.0; });
  update(0.5, clean.x, padded(clean.lengths), clean.labels, clean.state);
  update(0.5, spoilt.x, padded(spoilt.lengths), spoilt.labels, spoilt.state);
  EXPECT_EQ(read_values(clean.centroids), read_values(spoilt.centroids));
  EXPECT_EQ(read_values(clean.counts), read_values(spoilt.counts));
}

TEST_P(CentroidsTest, CommitmentLossAndItsGradientFollowTheSpecification) {
  for (DType dtype : {DType::f32, DType::f64, DType::bf16}) {
    const DType accumulator = accumulator_dtype(dtype);
    HostTensor x = normals(dtype, {2, 4, 25, 8}, 12);
    const HostTensor lengths = ints({25, 13}), labels = labels_below(6, {2, 4, 25}, 13);
    const HostTensor centroids = normals(accumulator, {2, 6, 8}, 14);
    fill(x.view().narrowed(0, 1, 1).narrowed(2, 13, 12), [](std::int64_t) { return std::nan(""); });
    const HostTensor loss(accumulator, {1});
    commitment_loss(x, padded(lengths), centroids, labels, loss);
    const double exact = ref::commitment_loss<double>(x, padded(lengths), centroids, labels);
    const double naive = ref::commitment_loss<float>(x, padded(lengths), centroids, labels);
    EXPECT_TRUE(
        follows_rule("loss", loss, {.exact = {exact}, .naive = {naive}, .magnitude = exact}));

    const HostTensor dx = normals(dtype, {2, 4, 25, 8}, 15);
    HostTensor exact_dx(DType::f64, {2, 4, 25, 8}), naive_dx(DType::f32, {2, 4, 25, 8});
    write_values(exact_dx, read_values(dx));
    write_values(naive_dx, read_values(dx));
    const HostTensor scale = test::tensor_of(accumulator, {1}, {1.5});
    commitment_loss_backward(x, padded(lengths), centroids, labels, 200.0, dx, {}, scale);
    ref::commitment_loss_backward<double>(x, padded(lengths), centroids, labels, 300.0, exact_dx);
    ref::commitment_loss_backward<float>(x, padded(lengths), centroids, labels, 300.0, naive_dx);
    EXPECT_TRUE(follows_rule(
        "dx", dx,
        {.exact = read_values(exact_dx), .naive = read_values(naive_dx), .magnitude = 4.0}));
  }
}

TEST(CommitmentLossTest, IsTheMeanSquareOfTheDistances) {
  const HostTensor x = normals(DType::f64, {1, 1, 4, 8}, 1), lengths = ints({3});
  const HostTensor centroids = normals(DType::f64, {1, 2, 8}, 2);
  const HostTensor labels = test::tensor_of(DType::i32, {1, 1, 4}, {1, 0, 1, -1});
  const HostTensor loss(DType::f64, {1});
  commitment_loss(x, padded(lengths), centroids, labels, loss);
  const std::vector<double> rows = normalised(read_values(x), 8), mu = read_values(centroids);
  double expected = 0;
  for (int i = 0; i < 3; ++i)
    for (int d = 0; d < 8; ++d) {
      expected += std::pow(rows[i * 8 + d] - mu[(i == 1 ? 0 : 8) + d], 2) / 24;
    }
  EXPECT_NEAR(read_values(loss)[0], expected, 24 * test::ulp(DType::f64, expected));
}

TEST(CommitmentLossTest, WithoutTokensIsZero) {
  const HostTensor x(DType::f32, {1, 1, 4, 8}), lengths = ints({0}),
                                                centroids(DType::f32, {1, 2, 8});
  const HostTensor labels(DType::i32, {1, 1, 4}), dx(DType::f32, {1, 1, 4, 8});
  const HostTensor loss = test::tensor_of(DType::f32, {1}, {5});
  commitment_loss(x, padded(lengths), centroids, labels, loss);
  EXPECT_EQ(read_values(loss)[0], 0.0);
  commitment_loss_backward(x, padded(lengths), centroids, labels, 1.0, dx);
  EXPECT_EQ(read_values(dx), std::vector<double>(32, 0.0));
}

// Statistics of rows (B, H, N, D), zeros at first.
struct Statistics {
  HostTensor members, sums;

  Statistics(std::int64_t heads, std::int64_t clusters, std::int64_t dim)
      : members(DType::f64, {heads, clusters}), sums(DType::f64, {heads, clusters, dim}) {}
  CentroidStatistics views() const { return {members, sums}; }
};

TEST_P(CentroidsTest, StatisticsFollowTheSpecification) {
  for (DType dtype : {DType::f32, DType::f64, DType::bf16, DType::f16}) {
    const HostTensor x = normals(dtype, {2, 4, 25, 8}, 20), lengths = ints({25, 0});
    const HostTensor labels = labels_below(6, {2, 4, 25}, 21);
    const Statistics found(2, 6, 8), exact(2, 6, 8), naive(2, 6, 8);
    add_centroid_statistics(x, padded(lengths), labels, found.views());
    ref::add_centroid_statistics<double>(x, padded(lengths), labels, exact.views());
    ref::add_centroid_statistics<float>(x, padded(lengths), labels, naive.views());
    EXPECT_EQ(read_values(found.members), read_values(exact.members));
    EXPECT_LT(in_roundings(read_values(found.sums), read_values(exact.sums), 50 + 8), 1.0);
    EXPECT_LE(in_roundings(read_values(found.sums), read_values(exact.sums), 1),
              2 * in_roundings(read_values(naive.sums), read_values(exact.sums), 1) + 1);
  }
}

// However a step is cut into passes, the statistics have the same bits.
TEST_P(CentroidsTest, StatisticsOfPassesAddUp) {
  const HostTensor x = normals(DType::f32, {3, 2, 40, 8}, 22);
  const HostTensor labels = labels_below(4, {3, 2, 40}, 23);
  const Statistics whole(2, 4, 8), parts(2, 4, 8);
  add_centroid_statistics(x, {}, labels, whole.views());
  for (const auto& [first, count] : {std::pair{0, 1}, std::pair{1, 2}})
    add_centroid_statistics(x.view().narrowed(0, first, count), {},
                            labels.view().narrowed(0, first, count), parts.views());
  EXPECT_TRUE(test::same_bits(whole.members, parts.members));
  EXPECT_TRUE(test::same_bits(whole.sums, parts.sums));
}

TEST_P(CentroidsTest, LabelsAreThoseOfStrictRouting) {
  for (DType dtype : {DType::f32, DType::f64, DType::bf16}) {
    const HostTensor q = normals(dtype, {2, 4, 33, 8}, 24), k = normals(dtype, {2, 2, 33, 8}, 25);
    const HostTensor lengths = ints({33, 17});
    const HostTensor centroids = normals(accumulator_dtype(dtype), {2, 6, 8}, 26);
    AttentionInputs inputs;
    inputs.q = q;
    inputs.k = inputs.v = k;
    inputs.q_sequences = inputs.k_sequences = padded(lengths);
    inputs.centroids = centroids;
    inputs.causal = true;
    RoutingParams params;
    params.clusters = 6;
    params.window = 5;
    const cases::Buffers buffers(params, inputs);
    attention_forward(params, inputs, buffers.result(), buffers.workspace());
    for (const auto& [x, saved] : {std::pair{&q, 0u}, std::pair{&k, 1u}}) {
      const HostTensor labels(DType::i32, {2, x->view().size(1), 33});
      const HostTensor memory(DType::u8,
                              {routing_labels_workspace_bytes(*x, padded(lengths), centroids)});
      routing_labels(*x, padded(lengths), centroids, labels,
                     {memory.view().data, memory.view().count(), nullptr});
      EXPECT_EQ(read_values(labels), read_values(buffers.result().saved[saved]));
    }
  }
}

TEST_P(CentroidsTest, RowsAreNormalised) {
  for (DType dtype : {DType::f32, DType::f64, DType::bf16, DType::f16})
    for (const std::int64_t dim : {1, 7, 64}) {
      const HostTensor wide = normals(dtype, {3, 2, 5, dim + 2}, 27);
      const TensorView x = wide.view().narrowed(3, 1, dim);
      const HostTensor out(accumulator_dtype(dtype), {3, 2, 5, dim});
      normalise_rows(x, out);
      EXPECT_LT(in_roundings(read_values(out), normalised(read_values(x), dim),
                             8 + static_cast<double>(dim)),
                2.0);
    }
  const HostTensor none(DType::f32, {0, 2, 5, 4});
  normalise_rows(none, none);
}

TEST(CentroidRefusals, NameWhatIsWrong) {
  const HostTensor x(DType::f32, {1, 4, 5, 8}), labels(DType::i32, {1, 4, 5});
  const HostTensor centroids(DType::f32, {2, 3, 8}), counts(DType::f32, {2, 3});
  const Statistics right(2, 3, 8), odd_heads(3, 3, 8), narrow(2, 3, 7);
  const CentroidState state{centroids, counts, centroids};
  const auto refusal_of = [](const auto& body) { return test::error_of(body); };
  EXPECT_NE(refusal_of([&] { move_centroids(1.5, right.views(), state); }).find("got 1.5"),
            std::string::npos);
  EXPECT_NE(refusal_of([&] { move_centroids(0.5, narrow.views(), state); }).find("sums of the"),
            std::string::npos);
  EXPECT_NE(refusal_of([&] {
              move_centroids(0.5, {counts, right.sums}, state);
            }).find("members of type f64"),
            std::string::npos);
  EXPECT_NE(refusal_of([&] {
              add_centroid_statistics(x, {}, labels, odd_heads.views());
            }).find("divides the 4 heads of x; got 3"),
            std::string::npos);
  const HostTensor beyond = test::tensor_of(DType::i32, {1, 4, 5}, std::vector<double>(20, 3));
  EXPECT_NE(refusal_of([&] {
              add_centroid_statistics(x, {}, beyond, right.views());
            }).find("expected labels in [0, 3); got 3"),
            std::string::npos);
  EXPECT_NE(refusal_of([&] { normalise_rows(x, labels); }).find("[normalise_rows] expected out"),
            std::string::npos);
  EXPECT_NE(refusal_of([&] { routing_labels(x, {}, centroids, labels, {}); }).find("workspace"),
            std::string::npos);
}

}  // namespace
}  // namespace coterie
