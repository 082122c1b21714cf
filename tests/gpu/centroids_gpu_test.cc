// SPDX-License-Identifier: MIT
// The centroids of routing on the GPU against the CPU's. The GPU sums rows in a different order:
// the bounds are a few units in the last place of sums of D and of N terms.
#include <gtest/gtest.h>

#include <cmath>

#include "coterie/random.h"
#include "coterie/routing.h"
#include "coterie/runtime.h"
#include "tests/gpu/device_tensor.h"

namespace coterie {
namespace {

using gpu_test::DeviceMemory;
using gpu_test::DeviceTensor;

constexpr std::int64_t kBatch = 3, kHeads = 4, kOwners = 2, kTokens = 301, kClusters = 7;

HostTensor numbers(DType dtype, std::vector<std::int64_t> sizes, std::uint32_t number) {
  HostTensor tensor(dtype, std::move(sizes));
  const RandomStream stream{7, RandomUse::data, number};
  fill(tensor, [&](std::int64_t i) {
    return 4 * random_unit(stream.at(static_cast<std::uint64_t>(i)).word[0]) - 1;
  });
  return tensor;
}

// Tokens with labels (none in cluster 3) and the state of the centroids.
struct CentroidProblem {
  HostTensor x, labels, lengths, centroids, counts, sums;

  CentroidProblem(DType dtype, std::int64_t dim)
      : x(numbers(dtype, {kBatch, kHeads, kTokens, dim}, 1)),
        labels(DType::i32, {kBatch, kHeads, kTokens}),
        lengths(DType::i32, {kBatch}),
        centroids(numbers(DType::f32, {kOwners, kClusters, dim}, 2)),
        counts(numbers(DType::f32, {kOwners, kClusters}, 3)),
        sums(numbers(DType::f32, {kOwners, kClusters, dim}, 4)) {
    fill(labels, [](std::int64_t i) { return static_cast<double>(i % 5 == 3 ? 6 : i % 5); });
    write_values(lengths, {kTokens, 0, 130});
    std::vector<double> positive = read_values(counts);
    for (double& count : positive) count += 2;
    write_values(counts, positive);
  }
  Sequences sequences() const { return {lengths, {}}; }
  CentroidState state() const { return {centroids, counts, sums}; }
};

struct CentroidCase {
  DType dtype;
  std::int64_t dim;
};

class CentroidsGpuTest : public ::testing::TestWithParam<CentroidCase> {
 protected:
  void SetUp() override {
    if (!cuda_available()) GTEST_SKIP() << "no GPU";
  }
  const CentroidProblem problem{GetParam().dtype, GetParam().dim};
  const bool narrow = GetParam().dtype != DType::f32;
};

void expect_near(const TensorView& actual, const TensorView& expected, double bound) {
  const std::vector<double> a = read_values(actual), e = read_values(expected);
  ASSERT_EQ(a.size(), e.size());
  for (std::size_t i = 0; i < a.size(); ++i)
    ASSERT_NEAR(a[i], e[i], bound * (1 + std::abs(e[i]))) << "element " << i;
}

TEST_P(CentroidsGpuTest, MoveAsOnTheCpu) {
  const DeviceTensor x(problem.x.view()), labels(problem.labels.view()),
      lengths(problem.lengths.view()), centroids(problem.centroids.view()),
      counts(problem.counts.view()), sums(problem.sums.view());
  const HostTensor members(DType::f64, {kOwners, kClusters});
  const HostTensor added(DType::f64, {kOwners, kClusters, GetParam().dim});
  const DeviceTensor gpu_members(members.view()), gpu_added(added.view());
  const CentroidStatistics statistics{gpu_members.view(), gpu_added.view()};
  const DeviceMemory memory(centroid_statistics_workspace_bytes(x.view(), statistics));
  for (int pass = 0; pass < 2; ++pass) {  // statistics of several passes add up
    add_centroid_statistics(x.view(), {lengths.view(), {}}, labels.view(), statistics,
                            {memory.data(), memory.bytes(), nullptr});
    add_centroid_statistics(problem.x, problem.sequences(), problem.labels, {members, added});
  }
  move_centroids(0.9, {gpu_members.view(), gpu_added.view()},
                 {centroids.view(), counts.view(), sums.view()});
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  move_centroids(0.9, {members, added}, problem.state());
  EXPECT_EQ(read_values(gpu_members.download()), read_values(members));
  expect_near(gpu_added.download(), added, 1e-4);
  expect_near(counts.download(), problem.counts, 1e-6);
  expect_near(sums.download(), problem.sums, 1e-5);
  expect_near(centroids.download(), problem.centroids, 1e-5);
}

// Several parts of more than one piece, most tokens in one cluster, packed sequences.
TEST_P(CentroidsGpuTest, HaveTheStatisticsOfManyTokens) {
  constexpr std::int64_t kMany = 9000, kFew = 600;  // clusters of which a head has few parts
  const HostTensor x = numbers(GetParam().dtype, {1, kHeads, kMany, GetParam().dim}, 6);
  HostTensor labels(DType::i32, {1, kHeads, kMany}), starts(DType::i32, {4});
  fill(labels, [](std::int64_t i) { return static_cast<double>(i % 7 == 0 ? i % kFew : 2); });
  write_values(starts, {0, 1, 5000, 8000});  // the rest is in no sequence
  const DeviceTensor gpu_x(x.view()), gpu_labels(labels.view()), gpu_starts(starts.view());
  const HostTensor members(DType::f64, {kOwners, kFew});
  const HostTensor sums(DType::f64, {kOwners, kFew, GetParam().dim});
  const DeviceTensor gpu_members(members.view()), gpu_sums(sums.view());
  const CentroidStatistics statistics{gpu_members.view(), gpu_sums.view()};
  const DeviceMemory memory(centroid_statistics_workspace_bytes(gpu_x.view(), statistics));
  add_centroid_statistics(gpu_x.view(), {{}, gpu_starts.view()}, gpu_labels.view(), statistics,
                          {memory.data(), memory.bytes(), nullptr});
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  add_centroid_statistics(x, {{}, starts}, labels, {members, sums});
  EXPECT_EQ(read_values(gpu_members.download()), read_values(members));
  expect_near(gpu_sums.download(), sums, 1e-4);
}

TEST_P(CentroidsGpuTest, RowsAreNormalisedAsOnTheCpu) {
  const DeviceTensor x(problem.x.view());
  const HostTensor expected(DType::f32, {kBatch, kHeads, kTokens, GetParam().dim});
  const DeviceTensor out(expected.view());
  normalise_rows(x.view(), out.view());
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  normalise_rows(problem.x, expected);
  expect_near(out.download(), expected, 1e-5);
}

// Rows whose two best scores are close may go to either; others have the CPU's cluster.
TEST_P(CentroidsGpuTest, HaveTheLabelsOfTheCpu) {
  const DeviceTensor x(problem.x.view()), lengths(problem.lengths.view()),
      centroids(problem.centroids.view()), labels(problem.labels.view());
  const Sequences on_gpu{lengths.view(), {}};
  const DeviceMemory memory(routing_labels_workspace_bytes(x.view(), on_gpu, centroids.view()));
  routing_labels(x.view(), on_gpu, centroids.view(), labels.view(),
                 {memory.data(), memory.bytes(), nullptr});
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  const HostTensor expected(DType::i32, {kBatch, kHeads, kTokens});
  const HostTensor scratch(DType::u8, {routing_labels_workspace_bytes(
                                          problem.x, problem.sequences(), problem.centroids)});
  routing_labels(problem.x, problem.sequences(), problem.centroids, expected,
                 {scratch.view().data, scratch.view().count(), nullptr});
  const std::vector<double> a = read_values(labels.download()), e = read_values(expected);
  int differences = 0;
  for (std::size_t i = 0; i < e.size(); ++i) {
    EXPECT_EQ(a[i] < 0, e[i] < 0) << i;
    differences += a[i] != e[i];
  }
  EXPECT_LE(differences, static_cast<int>(e.size() / 500));
}

TEST_P(CentroidsGpuTest, HaveTheCommitmentLossOfTheCpu) {
  const DeviceTensor x(problem.x.view()), labels(problem.labels.view()),
      lengths(problem.lengths.view()), centroids(problem.centroids.view()),
      loss(TensorLayout{"loss", DType::f32, {1}});
  const DeviceMemory memory(commitment_workspace_bytes(x.view()));
  commitment_loss(x.view(), {lengths.view(), {}}, centroids.view(), labels.view(), loss.view(),
                  {memory.data(), memory.bytes(), nullptr});
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  HostTensor expected(DType::f32, {1});
  commitment_loss(problem.x, problem.sequences(), problem.centroids, problem.labels, expected);
  expect_near(loss.download(), expected, 1e-5);
}

TEST_P(CentroidsGpuTest, HaveTheCommitmentGradientOfTheCpu) {
  const HostTensor before = numbers(GetParam().dtype, {kBatch, kHeads, kTokens, GetParam().dim}, 5);
  const DeviceTensor x(problem.x.view()), labels(problem.labels.view()),
      lengths(problem.lengths.view()), centroids(problem.centroids.view()), dx(before.view());
  const HostTensor scale = numbers(DType::f32, {1}, 6);
  const DeviceTensor gpu_scale(scale.view());
  commitment_loss_backward(x.view(), {lengths.view(), {}}, centroids.view(), labels.view(), 1e3,
                           dx.view(), {}, gpu_scale.view());
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  commitment_loss_backward(problem.x, problem.sequences(), problem.centroids, problem.labels, 1e3,
                           before, {}, scale);
  // Values close to the midpoint of two adjacent 16-bit numbers may round either way.
  const double ulp = GetParam().dtype == DType::bf16 ? 1.0 / 128 : 1.0 / 1024;
  expect_near(dx.download(), before, narrow ? ulp : 1e-5);
}

INSTANTIATE_TEST_SUITE_P(
    Types, CentroidsGpuTest,
    ::testing::Values(CentroidCase{DType::f32, 33}, CentroidCase{DType::f32, 64},
                      CentroidCase{DType::bf16, 64}, CentroidCase{DType::f16, 128}),
    [](const auto& test) {
      return std::string(dtype_name(test.param.dtype)) + "_" + std::to_string(test.param.dim);
    });

}  // namespace
}  // namespace coterie
