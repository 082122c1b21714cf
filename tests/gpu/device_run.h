// SPDX-License-Identifier: MIT
// Attention on the GPU through the public interface: a problem in device memory, and the tolerances
// of its results.
#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "cases/cases.h"
#include "cases/problem.h"
#include "coterie/attention.h"
#include "tests/gpu/device_tensor.h"
#include "tests/support/row_bounds.h"

namespace coterie::gpu_test {

// A problem in device memory, and what a pass over it writes there. `host` has the same tensors in
// host memory.
struct DeviceRun {
  AttentionInputs inputs;
  AttentionResult result;
  AttentionGradients gradients;
  std::vector<DeviceTensor> kept, saved;
  DeviceTensor out, grad_out, dq, dk, dv, dcentroids, dgate, dlogit_scale;
  DeviceMemory memory;
  Workspace workspace;
  Mechanism mechanism;
  cases::Pass host;

  explicit DeviceRun(const cases::Problem& problem)
      : mechanism(problem.mechanism), host(cases::prepare(problem)) {
    inputs = problem.inputs;
    for (TensorView* view : {&inputs.q, &inputs.k, &inputs.v, &inputs.q_sequences.lengths,
                             &inputs.q_sequences.cu_seqlens, &inputs.k_sequences.lengths,
                             &inputs.k_sequences.cu_seqlens, &inputs.mask, &inputs.centroids,
                             &inputs.gate, &inputs.logit_scale}) {
      if (!view->present()) continue;
      kept.emplace_back(*view);
      *view = kept.back().view();
    }
    for (const TensorLayout& tensor : attention_saved(mechanism, inputs).tensors) {
      saved.emplace_back(tensor);
      result.saved.push_back(saved.back().view());
    }
    grad_out = DeviceTensor(problem.grad_out);
    // Poisoned like the host tensors.
    const auto place = [](const TensorView& like, DeviceTensor& tensor) {
      if (like.present()) tensor = DeviceTensor(like);
      return tensor.view();
    };
    result.out = place(host.result.out, out);
    gradients.dq = place(host.gradients.dq, dq);
    gradients.dk = place(host.gradients.dk, dk);
    gradients.dv = place(host.gradients.dv, dv);
    gradients.dcentroids = place(host.gradients.dcentroids, dcentroids);
    gradients.dgate = place(host.gradients.dgate, dgate);
    gradients.dlogit_scale = place(host.gradients.dlogit_scale, dlogit_scale);
    memory = DeviceMemory(attention_workspace_bytes(mechanism, inputs));
    workspace = {memory.data(), memory.bytes(), nullptr};
  }

  void forward() { attention_forward(mechanism, inputs, result, workspace); }
  void backward() {
    attention_backward(mechanism, inputs, result, grad_out.view(), gradients, workspace);
  }
  // Copies the saved tensors to the host, which may have fewer.
  void fetch_saved() {
    for (std::size_t i = 0; i < host.result.saved.size(); ++i)
      saved[i].copy_to(host.result.saved[i]);
  }
  // Copies the saved tensors and all results.
  void fetch() {
    fetch_saved();
    out.copy_to(host.result.out);
    dq.copy_to(host.gradients.dq);
    dk.copy_to(host.gradients.dk);
    dv.copy_to(host.gradients.dv);
    dcentroids.copy_to(host.gradients.dcentroids);
    dgate.copy_to(host.gradients.dgate);
    dlogit_scale.copy_to(host.gradients.dlogit_scale);
  }
  // Whether nothing was written past the end of a tensor.
  bool intact() const {
    bool all = memory.intact();
    for (const DeviceTensor& tensor : saved) all = all && tensor.memory().intact();
    for (const DeviceTensor* tensor : {&out, &dq, &dk, &dv, &dcentroids, &dgate, &dlogit_scale})
      if (tensor->view().present()) all = all && tensor->memory().intact();
    return all;
  }
  std::vector<std::uint8_t> bits() const {
    std::vector<std::uint8_t> all;
    for (const DeviceTensor* tensor : {&out, &dq, &dk, &dv, &dcentroids, &dgate, &dlogit_scale}) {
      if (!tensor->view().present()) continue;
      const std::vector<std::uint8_t> bytes = tensor->bytes();
      all.insert(all.end(), bytes.begin(), bytes.end());
    }
    return all;
  }
};

// The values of a problem that make_problem made with this seed, in fp32.
inline cases::Problem in_fp32(const cases::Case& c, const cases::Problem& problem,
                              std::uint64_t seed) {
  cases::Case wide = c;
  wide.dtype = DType::f32;
  cases::Problem copy = cases::make_problem(wide, seed);
  copy.mechanism = problem.mechanism;
  const auto same = [](const TensorView& from, const TensorView& to) {
    if (from.present()) write_values(to, read_values(from));
  };
  same(problem.inputs.q, copy.inputs.q);
  same(problem.inputs.k, copy.inputs.k);
  same(problem.inputs.v, copy.inputs.v);
  same(problem.inputs.centroids, copy.inputs.centroids);
  same(problem.inputs.gate, copy.inputs.gate);
  same(problem.inputs.logit_scale, copy.inputs.logit_scale);
  same(problem.grad_out, copy.grad_out);
  return copy;
}

// In the Frobenius norm, relative to what is expected, whose norm is taken to be `least` at least.
inline void expect_near(const char* name, const DeviceTensor& actual, const TensorView& expected,
                        double bound, double least = 0) {
  if (!expected.present()) return;
  const std::vector<double> got = read_values(actual.download()), want = read_values(expected);
  double error = 0, norm = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    error += std::pow(got[i] - want[i], 2);
    norm += std::pow(want[i], 2);
  }
  EXPECT_LE(std::sqrt(error), bound * std::max(std::sqrt(norm), least)) << name;
  EXPECT_GT(norm + least, 0) << name;
}

// No row of the results has a larger error than its own terms allow. The norm of the whole tensor
// would not do: one wrong row among 65,536 is 0.4 % of it.
inline void expect_rows(const cases::Problem& problem, DeviceRun& run) {
  run.fetch();
  const auto count = static_cast<std::ptrdiff_t>(run.host.selection_count);
  const test::RowRule rule(problem,
                           {run.host.result.saved.begin(), run.host.result.saved.begin() + count});
  for (const test::RowFinding& finding : rule.check(run.host.result.out, run.host.gradients))
    ADD_FAILURE() << test::describe(finding);
}

// Relative Frobenius error allowed for rounding to the type, forward and backward: the error gates
// of the benchmark protocol. Weights and score gradients are rounded to the input type for the
// tensor cores.
inline double bound(DType dtype, bool backward) {
  switch (dtype) {
    case DType::bf16:
      return backward ? 1e-2 : 3e-3;
    case DType::f16:
      return backward ? 2e-3 : 5e-4;
    default:
      return backward ? 3e-5 : 1e-5;
  }
}

}  // namespace coterie::gpu_test
