// SPDX-License-Identifier: MIT
// Attention on the GPU through the public interface, over the shared cases: outputs and gradients
// against the specification for the selection that the GPU made, equal bits in repeated runs and in
// a CUDA graph. The bounds on relative Frobenius errors are the gates of the benchmark protocol:
// weights and score gradients are rounded to the input type for the tensor cores.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "cases/cases.h"
#include "cases/problem.h"
#include "core/check.h"
#include "coterie/runtime.h"
#include "tests/gpu/device_tensor.h"
#include "tests/support/expect.h"

namespace coterie {
namespace {

using cases::Case;
using cases::Problem;
using gpu_test::DeviceMemory;
using gpu_test::DeviceTensor;

bool on_gpu(const Case& c) {
  const Problem problem = cases::make_problem(c, 1);
  const Mechanism mechanism = resolve(problem.mechanism, problem.inputs.causal);
  const auto* improved = std::get_if<ImprovedClusteredParams>(&mechanism);
  const bool clustered = std::holds_alternative<ClusteredParams>(mechanism) ||
                         (improved && improved->causal == Causality::none);
  const bool few_keys = !improved || std::min(improved->topk, c.S) <= 128;
  return clustered && few_keys && c.Dk == c.Dv && c.Dk <= 128 && c.dtype != DType::f64;
}

std::vector<Case> gpu_cases() {
  std::vector<Case> chosen;
  for (const Case& c : cases::all())
    if (on_gpu(c)) chosen.push_back(c);
  return chosen;
}

// A problem in device memory, and what a pass over it writes there.
struct DeviceRun {
  AttentionInputs inputs;
  AttentionResult result;
  AttentionGradients gradients;
  std::vector<DeviceTensor> kept;
  std::size_t selection_count = 0;
  DeviceTensor out, grad_out, dq, dk, dv;
  DeviceMemory memory;
  Workspace workspace;
  Mechanism mechanism;

  explicit DeviceRun(const Problem& problem) : mechanism(problem.mechanism) {
    inputs = problem.inputs;
    for (TensorView* view : {&inputs.q, &inputs.k, &inputs.v, &inputs.q_sequences.lengths,
                             &inputs.q_sequences.cu_seqlens, &inputs.k_sequences.lengths,
                             &inputs.k_sequences.cu_seqlens}) {
      if (!view->present()) continue;
      kept.emplace_back(*view);
      *view = kept.back().view();
    }
    const SavedLayout layout = attention_saved(mechanism, inputs);
    selection_count = layout.selection_count;
    for (const TensorLayout& tensor : layout.tensors) {
      kept.emplace_back(tensor);
      result.saved.push_back(kept.back().view());
    }
    const auto like = [](const TensorView& view) {
      return DeviceTensor(TensorLayout{"", view.dtype, {view.sizes, view.sizes + view.rank}});
    };
    grad_out = DeviceTensor(problem.grad_out);
    out = like(problem.grad_out);
    dq = like(inputs.q);
    dk = like(inputs.k);
    dv = like(inputs.v);
    result.out = out.view();
    gradients.dq = dq.view();
    gradients.dk = dk.view();
    gradients.dv = dv.view();
    memory = DeviceMemory(attention_workspace_bytes(mechanism, inputs));
    workspace = {memory.data(), memory.bytes(), nullptr};
  }

  void forward() { attention_forward(mechanism, inputs, result, workspace); }
  void backward() {
    attention_backward(mechanism, inputs, result, grad_out.view(), gradients, workspace);
  }
  std::vector<std::uint8_t> bits() const {
    std::vector<std::uint8_t> all;
    for (const DeviceTensor* tensor : {&out, &dq, &dk, &dv}) {
      const std::vector<std::uint8_t> bytes = tensor->bytes();
      all.insert(all.end(), bytes.begin(), bytes.end());
    }
    return all;
  }
};

// Relative Frobenius error that rounding to the type allows, forward and backward.
double bound(DType dtype, bool backward) {
  switch (dtype) {
    case DType::bf16:
      return backward ? 1e-2 : 3e-3;
    case DType::f16:
      return backward ? 2e-3 : 5e-4;
    default:
      return backward ? 3e-5 : 1e-5;
  }
}

void expect_near(const char* name, const DeviceTensor& actual, const test::Expected& expected,
                 bool backward) {
  const DType dtype = actual.view().dtype;
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
  std::vector<HostTensor> saved;
  std::vector<TensorView> views;
  for (const TensorView& tensor : run.result.saved) {
    for (const DeviceTensor& kept : run.kept)
      if (kept.view().data == tensor.data) saved.push_back(kept.download());
    views.push_back(saved.back());
  }
  expect_near("out", run.out, test::expected_out(problem, views), false);
  const test::ExpectedGradients expected = test::expected_gradients(problem, views);
  expect_near("dq", run.dq, expected.dq, true);
  expect_near("dk", run.dk, expected.dk, true);
  expect_near("dv", run.dv, expected.dv, true);
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
  Case c = gpu_cases().front();
  c.spec = "full";
  try {
    DeviceRun run(cases::make_problem(c, 1));
    FAIL() << "was not refused";
  } catch (const Error& error) {
    EXPECT_EQ(std::string(error.what()).rfind("[full] expected tensors on the cpu", 0), 0u)
        << error.what();
  }
}

}  // namespace
}  // namespace coterie
