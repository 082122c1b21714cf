// SPDX-License-Identifier: MIT
// Centroids of routing against their formulas in torch operations.
#include "coterie/torch/centroids.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>

namespace coterie::torch_api {
namespace {

using ::torch::autograd::grad;

CentroidState doubles(const CentroidState& state) {
  return {state.centroids.to(at::kDouble), state.counts.to(at::kDouble),
          state.sums.to(at::kDouble)};
}

// Two batch entries of two heads, the second with padding.
struct Rows {
  at::Tensor x = at::randn({2, 2, 15, 6}, at::kDouble);
  at::Tensor lengths = at::tensor({15, 9}, at::kInt);
  at::Tensor valid = (at::arange(15) < lengths.unsqueeze(1)).view({2, 1, 15, 1});
  CentroidState state = doubles(make_centroids(2, 4, 6, 3));
};

TEST(NormalisedRows, HaveMeanZeroAndVarianceOne) {
  const at::Tensor x = normalised_rows(at::randn({3, 2, 5, 64}).to(at::kBFloat16) * 7 + 3);
  EXPECT_EQ(x.scalar_type(), at::kFloat);
  EXPECT_LT(x.mean(-1).abs().max().item<float>(), 1e-5f);
  EXPECT_LT((x.square().mean(-1) - 1).abs().max().item<float>(), 1e-5f);
  EXPECT_TRUE(at::equal(normalised_rows(at::ones({1, 1, 1, 4})), at::zeros({1, 1, 1, 4})));
}

TEST(MakeCentroids, StartsFromAConsistentPairAndRepeats) {
  const CentroidState a = make_centroids(2, 3, 8, 5), b = make_centroids(2, 3, 8, 5);
  EXPECT_TRUE(at::equal(a.centroids, b.centroids));
  EXPECT_FALSE(at::equal(a.centroids, make_centroids(2, 3, 8, 6).centroids));
  EXPECT_TRUE(at::equal(a.sums, a.centroids));
  EXPECT_TRUE(at::equal(a.counts, at::ones({2, 3})));
  EXPECT_NE(a.sums.data_ptr(), a.centroids.data_ptr());
}

TEST(NearestCentroids, HaveTheLargestInnerProduct) {
  const Rows rows;
  const at::Tensor scores = at::matmul(normalised_rows(rows.x), rows.state.centroids.mT());
  const at::Tensor expected =
      at::where(rows.valid.squeeze(3), scores.argmax(-1), at::tensor(-1, at::kLong));
  EXPECT_TRUE(at::equal(nearest_centroids(rows.x, rows.state.centroids, rows.lengths),
                        expected.to(at::kInt)));
}

TEST(CommitmentLoss, IsTheMeanSquareOverValidElements) {
  const Rows rows;
  const at::Tensor x = rows.x.clone().requires_grad_();
  const at::Tensor labels = nearest_centroids(x, rows.state.centroids, rows.lengths);
  const at::Tensor index = labels.clamp_min(0).to(at::kLong).unsqueeze(3).expand({2, 2, 15, 6});
  const at::Tensor own = rows.state.centroids.expand({2, 2, 4, 6}).gather(2, index);
  const at::Tensor expected =
      ((at::layer_norm(x, {6}, {}, {}, 1e-6) - own).square() * rows.valid).sum() /
      (2 * (15 + 9) * 6);
  const at::Tensor loss = commitment_loss(x, rows.state.centroids, labels, rows.lengths);
  EXPECT_NEAR(loss.item<double>(), expected.item<double>(), 1e-13);
  const auto ours = grad({loss * 3}, {x}), theirs = grad({expected * 3}, {x});
  EXPECT_TRUE(at::allclose(ours[0], theirs[0], 1e-9, 1e-13));
  EXPECT_TRUE(at::equal(ours[0] * ~rows.valid, at::zeros_like(x)));
}

void update(double decay, const at::Tensor& x, const at::Tensor& labels, const at::Tensor& lengths,
            const CentroidState& state) {
  CentroidStatistics statistics;
  add_statistics(x, labels, lengths, state, statistics);
  move_centroids(decay, statistics, state);
}

TEST(MoveCentroids, MovesCountsSumsAndCentroidsWithMembers) {
  const Rows rows;
  constexpr double kDecay = 0.9, kSmoothing = 1e-5;
  at::Tensor labels = nearest_centroids(rows.x, rows.state.centroids, rows.lengths);
  labels = at::where(labels == 3, at::tensor(0, at::kInt), labels);  // cluster 3 loses its members
  const at::Tensor members =
      (labels.unsqueeze(3) == at::arange(4, at::kInt)).to(at::kDouble);  // (B, H, N, C)
  const at::Tensor counts =
      kDecay * rows.state.counts + (1 - kDecay) * members.sum(at::IntArrayRef({0, 2}));
  const at::Tensor sums = kDecay * rows.state.sums +
                          (1 - kDecay) * at::matmul(members.mT(), normalised_rows(rows.x)).sum(0);
  const at::Tensor total = counts.sum(1, true);
  const at::Tensor smoothed = (counts + kSmoothing) / (total + 4 * kSmoothing) * total;
  const at::Tensor empty = members.sum(at::IntArrayRef({0, 2})) == 0;
  const at::Tensor centroids =
      at::where(empty.unsqueeze(2), rows.state.centroids, sums / smoothed.unsqueeze(2));
  update(kDecay, rows.x, labels, rows.lengths, rows.state);
  EXPECT_TRUE(at::allclose(rows.state.counts, counts, 1e-12, 1e-12));
  EXPECT_TRUE(at::allclose(rows.state.centroids, centroids, 1e-12, 1e-12));
  EXPECT_TRUE(empty.select(1, 3).all().item<bool>());
}

// With a weight of 1 the gradient is subnormal in f16, and much of it underflows to 0.
TEST(CommitmentLoss, ScalesItsGradientBeforeItIsRounded) {
  const at::Tensor half = at::randn({4, 8, 1024, 64}).to(at::kHalf);
  const at::Tensor centroids = at::randn({8, 4, 64});
  const at::Tensor labels = at::randint(0, 4, {4, 8, 1024}, at::kInt);
  const auto gradient = [&](const at::Tensor& rows) {
    const at::Tensor x = rows.clone().requires_grad_();
    (commitment_loss(x, centroids, labels, {}) * std::exp2(18)).backward();
    return x.grad().to(at::kFloat);
  };
  const at::Tensor exact = gradient(half.to(at::kFloat));
  EXPECT_LT(exact.abs().max().item<float>() / std::exp2(18), std::exp2(-14));
  // Rounded once: half the distance to the next number, which is 2^-24 among subnormal numbers.
  const at::Tensor bound = (exact.abs() * std::exp2(-11)).clamp_min(std::exp2(-25));
  EXPECT_TRUE(((gradient(half) - exact).abs() <= bound).all().item<bool>());
}

TEST(MoveCentroids, IsSeenByAutograd) {
  const Rows rows;
  const at::Tensor x = rows.x.clone().requires_grad_();
  const at::Tensor labels = nearest_centroids(x, rows.state.centroids, rows.lengths);
  const at::Tensor loss = commitment_loss(x, rows.state.centroids, labels, rows.lengths);
  update(0.5, x, labels, rows.lengths, rows.state);
  EXPECT_THROW(loss.backward(), c10::Error);  // its centroids were changed
}

TEST(InitialiseCentroids, GivesNormalisedMeansAndFreshCounts) {
  const Rows rows;
  rows.state.counts.fill_(7);
  initialise_centroids(rows.state, rows.x, rows.lengths, 1);
  EXPECT_TRUE(
      at::allclose(normalised_rows(rows.state.centroids), rows.state.centroids, 1e-4, 1e-4));
  EXPECT_TRUE(at::equal(rows.state.counts, at::ones({2, 4}, at::kDouble)));
  EXPECT_TRUE(at::equal(rows.state.sums, rows.state.centroids));
  const CentroidState again = doubles(make_centroids(2, 4, 6, 8));
  initialise_centroids(again, rows.x, rows.lengths, 1);
  EXPECT_TRUE(at::equal(again.centroids, rows.state.centroids));
}

}  // namespace
}  // namespace coterie::torch_api
