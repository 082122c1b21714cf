// SPDX-License-Identifier: MIT
// k-means of rows on the GPU, against the specification and against what every clustering fulfils.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include "coterie/runtime.h"
#include "tests/gpu/device_tensor.h"
#include "tests/support/kmeans.h"

namespace coterie {
namespace {

using gpu_test::DeviceMemory;
using gpu_test::DeviceTensor;
using test::KMeansCase;
using test::KMeansOutcome;

KMeansOutcome run(const KMeansCase& c) {
  KMeansOutcome outcome(c);
  const DeviceTensor x(outcome.x.view()), centroids(outcome.centroids.view()),
      labels(outcome.labels.view()), counts(outcome.counts.view());
  const DeviceMemory memory(kmeans_workspace_bytes(c.params, x.view(), c.clusters));
  kmeans(c.params, x.view(), {centroids.view(), labels.view(), counts.view()},
         {memory.data(), memory.bytes(), nullptr});
  COTERIE_CUDA(cudaDeviceSynchronize());
  EXPECT_TRUE(memory.intact() && labels.memory().intact() && centroids.memory().intact());
  centroids.copy_to(outcome.centroids.view());
  labels.copy_to(outcome.labels.view());
  counts.copy_to(outcome.counts.view());
  return outcome;
}

class KMeansGpuTest : public ::testing::TestWithParam<KMeansCase> {};

TEST_P(KMeansGpuTest, FollowsTheSpecification) {
  if (!cuda_available()) GTEST_SKIP() << "no GPU";
  const KMeansCase& c = GetParam();
  const KMeansOutcome got = run(c);
  test::expect_clustering(c, got);
  if (!c.exact) return;
  KMeansOutcome want(c);
  ref::kmeans<double>(c.params, want.x, want.result());
  test::expect_equal(got, want);
}

TEST_P(KMeansGpuTest, RepeatsItsBits) {
  if (!cuda_available()) GTEST_SKIP() << "no GPU";
  const KMeansOutcome one = run(GetParam()), two = run(GetParam());
  EXPECT_EQ(read_values(one.labels), read_values(two.labels));
  EXPECT_EQ(read_values(one.centroids), read_values(two.centroids));
}

INSTANTIATE_TEST_SUITE_P(Cases, KMeansGpuTest, ::testing::ValuesIn(test::kmeans_cases(false)),
                         [](const auto& test) { return test.param.name; });

// Nothing waits for the device: a call can be captured.
TEST(KMeansGpu, RunsInAGraph) {
  if (!cuda_available()) GTEST_SKIP() << "no GPU";
  KMeansCase c{"graph", DType::bf16, 4, 3000, 64, 50, {3, KMeansStart::plus_plus, true, 1}};
  const KMeansOutcome want = run(c);
  KMeansOutcome got(c);
  const DeviceTensor x(got.x.view()), centroids(got.centroids.view()), labels(got.labels.view()),
      counts(got.counts.view());
  const DeviceMemory memory(kmeans_workspace_bytes(c.params, x.view(), c.clusters));
  cudaStream_t stream = nullptr;
  COTERIE_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  COTERIE_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  kmeans(c.params, x.view(), {centroids.view(), labels.view(), counts.view()},
         {memory.data(), memory.bytes(), stream});
  cudaGraph_t graph = nullptr;
  COTERIE_CUDA(cudaStreamEndCapture(stream, &graph));
  cudaGraphExec_t executable = nullptr;
  COTERIE_CUDA(cudaGraphInstantiate(&executable, graph, 0));
  COTERIE_CUDA(cudaGraphLaunch(executable, stream));
  COTERIE_CUDA(cudaStreamSynchronize(stream));
  centroids.copy_to(got.centroids.view());
  EXPECT_EQ(read_values(got.centroids), read_values(want.centroids));
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

}  // namespace
}  // namespace coterie
