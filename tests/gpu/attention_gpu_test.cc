// SPDX-License-Identifier: MIT
// Attention on the GPU through the public interface, over the shared cases: outputs and gradients
// against the specification for the selection that the GPU made, equal bits in repeated runs and in
// a CUDA graph.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "cases/cases.h"
#include "cases/problem.h"
#include "core/check.h"
#include "coterie/runtime.h"
#include "coterie/spec.h"
#include "tests/gpu/device_run.h"
#include "tests/support/expect.h"
#include "tests/support/tensors.h"

namespace coterie {
namespace {

using cases::Case;
using cases::Problem;
using gpu_test::bound;
using gpu_test::DeviceRun;
using gpu_test::DeviceTensor;

// Whether the CUDA kernels support the case; other cases are refused.
bool on_gpu(const Case& c) {
  const Mechanism mechanism = cases::make_problem(c, 1).mechanism;
  std::int64_t topk = 0, near = 0;
  if (const auto* clustered = std::get_if<ClusteredParams>(&mechanism)) near = clustered->near;
  if (const auto* improved = std::get_if<ImprovedClusteredParams>(&mechanism)) {
    topk = improved->topk;
    near = improved->near;
  }
  if (const auto* oracle = std::get_if<OracleTopParams>(&mechanism)) topk = oracle->topk;
  return std::min(topk, c.S) <= 128 && near % 16 == 0 && c.Dk == c.Dv && c.Dk <= 128 &&
         c.dtype != DType::f64;
}

std::vector<Case> gpu_cases() {
  std::vector<Case> chosen;
  for (const Case& c : cases::all())
    if (on_gpu(c)) chosen.push_back(c);
  return chosen;
}

// `dtype` is the type of the inputs, which may differ from the tensor's.
void expect_near(const char* name, DType dtype, const DeviceTensor& actual,
                 const test::Expected& expected, bool backward) {
  if (!actual.view().present()) return;
  const std::vector<double> values = read_values(actual.download());
  double error = 0, norm = 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    error += std::pow(values[i] - expected.exact[i], 2);
    norm += std::pow(expected.exact[i], 2);
  }
  // Gradients that cancel to almost nothing are judged by the size of their terms.
  const double terms = expected.magnitude * std::sqrt(static_cast<double>(values.size())) / 256;
  const double scale = std::max(std::sqrt(norm), terms);
  EXPECT_LE(std::sqrt(error), bound(dtype, backward) * scale)
      << name << ", norm " << std::sqrt(norm);
  EXPECT_FALSE(std::isnan(error)) << name;
}

// Clusters of queries are compared with the specification in cluster_gpu_test, stage by stage.
bool clusters_queries(const Mechanism& mechanism) {
  return std::holds_alternative<ClusteredParams>(mechanism) ||
         std::holds_alternative<ImprovedClusteredParams>(mechanism);
}

class AttentionGpuTest : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    if (!cuda_available()) GTEST_SKIP() << "no GPU";
  }
};

TEST_P(AttentionGpuTest, FollowsTheSpecification) {
  const Problem problem = cases::make_problem(GetParam(), 1);
  DeviceRun run(problem);
  run.forward();
  run.backward();
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  run.fetch_saved();
  if (!clusters_queries(problem.mechanism)) test::expect_selection(problem, run.host);
  if (HasFailure()) return;  // with a wrong selection the outputs say nothing
  const std::vector<TensorView>& saved = run.host.result.saved;
  const DType dtype = GetParam().dtype;
  expect_near("out", dtype, run.out, test::expected_out(problem, saved), false);
  const test::ExpectedGradients expected = test::expected_gradients(problem, saved);
  expect_near("dq", dtype, run.dq, expected.dq, true);
  expect_near("dk", dtype, run.dk, expected.dk, true);
  expect_near("dv", dtype, run.dv, expected.dv, true);
  expect_near("dcentroids", dtype, run.dcentroids, expected.dcentroids, true);
  expect_near("dgate", dtype, run.dgate, expected.dgate, true);
  expect_near("dlogit_scale", dtype, run.dlogit_scale, expected.dlogit_scale, true);
  gpu_test::expect_rows(problem, run);
}

TEST_P(AttentionGpuTest, RepeatsItsBits) {
  const Problem problem = cases::make_problem(GetParam(), 2);
  DeviceRun first(problem);
  first.forward();
  first.backward();
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  const std::vector<std::uint8_t> expected = first.bits();
  for (int repeat = 0; repeat < 5; ++repeat) {
    DeviceRun again(problem);
    again.forward();
    again.backward();
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    ASSERT_EQ(again.bits(), expected);
  }
}

TEST_P(AttentionGpuTest, WritesAllOfWhatIsSaved) {
  const Problem problem = cases::make_problem(GetParam(), 4);
  DeviceRun run(problem), other(problem);
  for (const DeviceTensor& tensor : other.saved) tensor.memory().poison(0x55);
  run.forward();
  other.forward();
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  const std::vector<TensorLayout> layout = attention_saved(run.mechanism, run.inputs).tensors;
  for (std::size_t i = 0; i < layout.size(); ++i)
    EXPECT_TRUE(run.saved[i].bytes() == other.saved[i].bytes()) << layout[i].name;
}

TEST_P(AttentionGpuTest, GivesTheSameBitsInAGraph) {
  const Problem problem = cases::make_problem(GetParam(), 3);
  DeviceRun plain(problem), captured(problem);
  plain.forward();
  plain.backward();
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
  captured.workspace.stream = stream;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
  captured.forward();
  captured.backward();
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
  ASSERT_EQ(cudaGraphLaunch(executable, stream), cudaSuccess);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_EQ(captured.bits(), plain.bits());
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

INSTANTIATE_TEST_SUITE_P(Cases, AttentionGpuTest, ::testing::ValuesIn(gpu_cases()),
                         [](const auto& test) { return test.param.name; });

TEST(AttentionGpuRefusalTest, WhatHasNoKernelsSaysSo) {
  if (!cuda_available()) GTEST_SKIP() << "no GPU";
  const Problem problem = cases::make_problem(cases::make_case("wide", "full", "N16 D32:64"), 1);
  try {
    DeviceRun run(problem);
    FAIL() << "the call was not refused";
  } catch (const Error& error) {
    EXPECT_EQ(std::string(error.what()).rfind("[full] expected tensors on the cpu", 0), 0u)
        << error.what();
  }
}

// The checks read shapes only, so the tensors need no memory.
TEST(AttentionGpuRefusalTest, SizesThatKernelsCannotCountAreNamed) {
  const auto message = [](const char* spec, std::int64_t batches, std::int64_t heads,
                          std::int64_t rows, std::int64_t clusters) {
    alignas(16) unsigned char none[16];
    AttentionInputs inputs;
    inputs.q = inputs.k = inputs.v =
        TensorView::contiguous(none, DType::bf16, {batches, heads, rows, 8}, Device::cuda);
    if (clusters > 0)
      inputs.centroids =
          TensorView::contiguous(none, DType::f32, {heads, clusters, 8}, Device::cuda);
    const Mechanism mechanism = AttentionSpec::parse(spec).groups.front().mechanism;
    return test::error_of([&] { attention_saved(mechanism, inputs); });
  };
  const auto expect = [](const std::string& actual, const char* part) {
    EXPECT_NE(actual.find(part), std::string::npos) << actual;
  };
  expect(message("full", 1, 65536, 16, 0), "at most 65535 heads; got 65536");
  expect(message("full", 1, 1, 1 << 26, 0), "at most 67108863 rows of a batch entry");
  EXPECT_EQ(message("full", 100000, 16, 16, 0), "");
  expect(message("i-clustered(clusters=4)", 65536, 1, 16, 0),
         "at most 65535 batch entries; got 65536");
  const std::int64_t many = 1 << 15;
  expect(message("oracle-top(topk=1)", many, many + 1, 1, 0),
         "sequences times heads; got 1073774592");
  expect(message("i-clustered(clusters=4096)", many, 16, 16, 0),
         "lists and tiles of lists in all heads; got 2148007936");
  expect(message("lsh(rounds=2048,buckets=8192,chunk=4)", 64, 16, 16, 0),
         "lists and tiles of lists in all heads; got 17179869184");
  expect(message("lsh(rounds=2048,buckets=8192,chunk=4)", 1, 16, 16, 0),
         "elements in all rotations; got");
  const char* routing = "routing(clusters=2048,membership=top,window=1048576)";
  expect(message(routing, 1, 1, 1 << 20, 2048), "members in the lists of a head; got 2147483648");
}

// Views of one shape: dense, at an odd address, and with rows at odd distances.
TEST_P(AttentionGpuTest, NeedsAsMuchMemoryWhereverItsRowsAre) {
  const Problem problem = cases::make_problem(GetParam(), 1);
  const DeviceRun run(problem);
  const auto bytes = [&](std::int64_t shift, std::int64_t gap) {
    AttentionInputs inputs = run.inputs;
    for (TensorView* view : {&inputs.q, &inputs.k, &inputs.v}) {
      if (!view->present()) continue;
      view->data = static_cast<char*>(view->data) + shift * dtype_bytes(view->dtype);
      for (int dim = 0; dim < 3; ++dim) view->strides[dim] += gap;  // never read
    }
    return attention_workspace_bytes(run.mechanism, inputs);
  };
  EXPECT_EQ(bytes(1, 0), run.workspace.bytes);
  EXPECT_EQ(bytes(0, 1), run.workspace.bytes);
  EXPECT_EQ(bytes(1, 1), run.workspace.bytes);
}

}  // namespace
}  // namespace coterie
