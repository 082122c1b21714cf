// SPDX-License-Identifier: MIT
// Tensors that span more than 2^31 elements, and tensors of more than 2^31 elements. Skipped if the
// GPU has too little memory.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "cases/cases.h"
#include "cases/problem.h"
#include "coterie/runtime.h"
#include "tests/gpu/device_run.h"
#include "tests/gpu/watchdog.h"

namespace coterie {
namespace {

using cases::Case;
using cases::Problem;
using gpu_test::DeviceRun;

bool has_memory(std::int64_t bytes) {
  std::size_t left = 0, all = 0;
  return cudaMemGetInfo(&left, &all) == cudaSuccess &&
         left > static_cast<std::size_t>(bytes) + (std::size_t{2} << 30);
}

// Places views of one shape in a common allocation, with the given strides and kApart elements
// between their starts.
class Spread {
 public:
  // More than 600 rows of 128 elements; 8 views end at or below 2^20.
  static constexpr std::int64_t kApart = 1 << 17;

  Spread(std::int64_t extent, int views)
      : memory_((extent + kApart * views) * dtype_bytes(DType::bf16)) {}

  TensorView place(const TensorView& dense, const std::int64_t (&strides)[3]) {
    TensorView view = dense;
    view.data = static_cast<char*>(memory_.data()) + next_++ * kApart * dtype_bytes(dense.dtype);
    for (int dim = 0; dim < 3; ++dim) view.strides[dim] = strides[dim];
    return view;
  }
  bool intact() const { return memory_.intact(); }

 private:
  gpu_test::DeviceMemory memory_;
  std::int64_t next_ = 0;
};

// Copies rows within device memory between views of any strides.
void copy_rows(const TensorView& to, const TensorView& from) {
  const auto bytes = static_cast<std::size_t>(dtype_bytes(to.dtype));
  const auto at = [&](const TensorView& view, std::int64_t b, std::int64_t h) {
    return static_cast<char*>(view.data) + (b * view.stride(0) + h * view.stride(1)) * bytes;
  };
  for (std::int64_t b = 0; b < to.size(0); ++b)
    for (std::int64_t h = 0; h < to.size(1); ++h)
      COTERIE_CUDA(cudaMemcpy2D(at(to, b, h), to.stride(2) * bytes, at(from, b, h),
                                from.stride(2) * bytes, to.size(3) * bytes, to.size(2),
                                cudaMemcpyDeviceToDevice));
}

struct SpreadCase {
  Case problem;
  std::int64_t strides[3];  // of batch entries, heads and rows, in elements
};

std::vector<SpreadCase> spread_cases() {
  struct Line {
    const char *name, *spec, *shape;
  };
  const Line lines[] = {
      {"full", "full", "causal"},
      {"full_wide", "full", "D128"},
      {"local", "local(window=200)", "causal"},
      {"strided", "strided(stride=7)", ""},
      {"oracle_top", "oracle-top(topk=8)", "causal"},
      {"clustered", "clustered(clusters=12)", "mixture"},
      {"clustered_hamming", "clustered(clusters=12,clustering=hamming)", "mixture"},
      {"improved", "i-clustered(clusters=12,topk=16)", "mixture"},
      {"improved_causal", "i-clustered(clusters=12,topk=16,causal=reference)", "causal mixture"},
      {"lsh", "lsh(rounds=2,chunk=32,buckets=8)", "mixture"},
      {"routing_strict", "routing(clusters=8,window=64)", "causal mixture"},
      {"routing_paper", "routing(clusters=8,window=80,causal=paper)", "causal mixture"},
      {"routing_balanced", "routing(clusters=8,membership=balanced)", "mixture"},
      {"cast", "cast(clusters=8,size=80)", ""},
      {"cast_single", "cast(clusters=8,size=80,mode=single)", ""},
  };
  constexpr std::int64_t kFar = (std::int64_t{1} << 31) + (1 << 20), kRow = 1 << 22;
  struct Strides {
    const char* name;
    std::int64_t strides[3];
  };
  // N = 600: the last row of `rows` starts 2.5e9 elements after the first.
  const Strides all[] = {{"batches", {kFar, 1 << 20, 1 << 7}},
                         {"heads", {1 << 20, kFar, 1 << 7}},
                         {"rows", {1 << 21, 1 << 20, kRow}}};
  std::vector<SpreadCase> found;
  for (const Line& line : lines)
    for (const Strides& far : all)
      found.push_back({cases::make_case(std::string(line.name) + "_far_" + far.name, line.spec,
                                        std::string("B2 H2 N600 D64 bf16 ") + line.shape),
                       {far.strides[0], far.strides[1], far.strides[2]}});
  return found;
}

class SpreadGpuTest : public ::testing::TestWithParam<SpreadCase> {};

// Dense rows and rows far apart give the same numbers. Other tests compare dense rows with the CPU
// (attention_gpu_test.cc, long_gpu_test.cc).
TEST_P(SpreadGpuTest, FarRowsGiveTheNumbersOfNearOnes) {
  if (!cuda_available()) GTEST_SKIP() << "no GPU";
  const SpreadCase& c = GetParam();
  const std::int64_t extent = c.strides[0] + c.strides[1] + 600 * c.strides[2];
  if (!has_memory(2 * extent)) GTEST_SKIP() << "too little memory";
  const gpu_test::Watchdog watchdog;
  const Problem problem = cases::make_problem(c.problem, 1);
  DeviceRun near(problem), far(problem);
  near.forward();
  near.backward();
  Spread spread(extent, 8);
  AttentionGradients& gradients = far.gradients;
  TensorView grad_out = far.grad_out.view();
  for (TensorView* view : std::initializer_list<TensorView*>{
           &far.inputs.q, &far.inputs.k, &far.inputs.v, &grad_out, &far.result.out, &gradients.dq,
           &gradients.dk, &gradients.dv}) {
    if (!view->present()) continue;
    const TensorView dense = *view;
    *view = spread.place(dense, c.strides);
    copy_rows(*view, dense);
  }
  ASSERT_EQ(attention_workspace_bytes(far.mechanism, far.inputs), far.workspace.bytes);
  far.forward();
  attention_backward(far.mechanism, far.inputs, far.result, grad_out, gradients, far.workspace);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  const auto expect_same = [](const char* name, const TensorView& spread_rows,
                              const gpu_test::DeviceTensor& gathered,
                              const gpu_test::DeviceTensor& expected) {
    if (!expected.view().present()) return;
    copy_rows(gathered.view(), spread_rows);
    const std::vector<double> got = read_values(gathered.download());
    const std::vector<double> want = read_values(expected.download());
    std::size_t different = 0;
    for (std::size_t i = 0; i < got.size(); ++i) different += !(got[i] == want[i]);
    EXPECT_EQ(different, 0u) << name << ", of " << got.size();
  };
  expect_same("out", far.result.out, far.out, near.out);
  expect_same("dq", gradients.dq, far.dq, near.dq);
  expect_same("dk", gradients.dk, far.dk, near.dk);
  expect_same("dv", gradients.dv, far.dv, near.dv);
  EXPECT_TRUE(spread.intact());
}

INSTANTIATE_TEST_SUITE_P(Cases, SpreadGpuTest, ::testing::ValuesIn(spread_cases()),
                         [](const auto& test) { return test.param.problem.name; });

// Fills `to` with repetitions of the `period` elements of `from`.
__global__ void repeat_kernel(const std::uint16_t* from, std::int64_t period, std::uint16_t* to,
                              std::int64_t count) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += step)
    to[i] = from[i % period];
}

class CountGpuTest : public ::testing::TestWithParam<Case> {};

// B H N D = 2^31 + 2^24. All heads are copies of one head, so all outputs and gradients must agree
// with the CPU's for that head.
TEST_P(CountGpuTest, EveryHeadFollowsTheCpu) {
  if (!cuda_available()) GTEST_SKIP() << "no GPU";
  constexpr std::int64_t kB = 3, kH = 43, kN = 1 << 18, kD = 64;
  constexpr std::int64_t kHead = kN * kD, kCount = kB * kH * kHead;
  static_assert(kCount > std::int64_t{1} << 31, "more than 32 bits count");
  if (!has_memory(8 * 2 * kCount)) GTEST_SKIP() << "too little memory";
  const gpu_test::Watchdog watchdog(std::chrono::seconds(120));
  Case one = GetParam();
  one.B = one.H = one.Hkv = 1;
  one.N = one.S = kN;
  const Problem problem = cases::make_problem(one, 1);
  cases::Pass host = cases::run_forward(problem);
  cases::run_backward(problem, host);

  const auto repeated = [&](const TensorView& head) {
    const gpu_test::DeviceTensor source(head);
    gpu_test::DeviceTensor all(TensorLayout{"", DType::bf16, {kB, kH, kN, kD}});
    repeat_kernel<<<4096, 256>>>(static_cast<const std::uint16_t*>(source.view().data), kHead,
                                 static_cast<std::uint16_t*>(all.view().data), kCount);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    return all;
  };
  const auto fresh = [] {
    return gpu_test::DeviceTensor(TensorLayout{"", DType::bf16, {kB, kH, kN, kD}});
  };
  const gpu_test::DeviceTensor q = repeated(problem.inputs.q), k = repeated(problem.inputs.k),
                               v = repeated(problem.inputs.v), g = repeated(problem.grad_out);
  const gpu_test::DeviceTensor out = fresh(), dq = fresh(), dk = fresh(), dv = fresh();
  AttentionInputs inputs = problem.inputs;
  inputs.q = q.view();
  inputs.k = k.view();
  inputs.v = v.view();
  std::vector<gpu_test::DeviceTensor> saved;
  AttentionResult result{out.view(), {}};
  for (const TensorLayout& layout : attention_saved(problem.mechanism, inputs).tensors) {
    saved.emplace_back(layout);
    result.saved.push_back(saved.back().view());
  }
  const gpu_test::DeviceMemory memory(attention_workspace_bytes(problem.mechanism, inputs));
  const Workspace workspace{memory.data(), memory.bytes(), nullptr};
  attention_forward(problem.mechanism, inputs, result, workspace);
  AttentionGradients gradients;
  gradients.dq = dq.view();
  gradients.dk = dk.view();
  gradients.dv = dv.view();
  attention_backward(problem.mechanism, inputs, result, g.view(), gradients, workspace);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);

  const auto expect_near = [&](const char* name, const TensorView& all, const TensorView& expected,
                               bool backward) {
    const std::vector<double> want = read_values(expected);
    double norm = 0;
    for (double value : want) norm += value * value;
    HostTensor head(DType::bf16, {1, 1, kN, kD});
    for (std::int64_t number : {std::int64_t{0}, kB * kH / 2, kB * kH - 1}) {
      COTERIE_CUDA(cudaMemcpy(head.data<std::uint16_t>(),
                              static_cast<const std::uint16_t*>(all.data) + number * kHead,
                              2 * kHead, cudaMemcpyDeviceToHost));
      const std::vector<double> got = read_values(head);
      double error = 0;
      for (std::size_t i = 0; i < got.size(); ++i) error += std::pow(got[i] - want[i], 2);
      EXPECT_LE(std::sqrt(error), gpu_test::bound(DType::bf16, backward) * std::sqrt(norm))
          << name << ", head " << number;
    }
  };
  expect_near("out", result.out, host.result.out, false);
  expect_near("dq", gradients.dq, host.gradients.dq, true);
  expect_near("dk", gradients.dk, host.gradients.dk, true);
  expect_near("dv", gradients.dv, host.gradients.dv, true);
}

INSTANTIATE_TEST_SUITE_P(
    Cases, CountGpuTest,
    ::testing::Values(cases::make_case("local", "local(window=64)", "D64 causal bf16"),
                      cases::make_case("local_window_kernel", "local(window=200)",
                                       "D64 causal bf16"),
                      cases::make_case("strided", "strided(stride=4096)", "D64 causal bf16")),
    [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace coterie
