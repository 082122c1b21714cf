// SPDX-License-Identifier: MIT
// Calls without queries, keys or batch entries on a GPU: all outputs are written, as on the CPU
// (tests/ops/empty_test.cc).
#include <gtest/gtest.h>

#include <cmath>

#include "coterie/runtime.h"
#include "tests/gpu/device_run.h"
#include "tests/gpu/watchdog.h"
#include "tests/support/empty.h"

namespace coterie {
namespace {

using gpu_test::DeviceRun;
using gpu_test::DeviceTensor;

// As torch passes them: tensors without elements have a null pointer.
void forget_empty_memory(DeviceRun& run) {
  AttentionInputs& inputs = run.inputs;
  for (TensorView* view : {&inputs.q, &inputs.k, &inputs.v, &inputs.gate})
    if (view->count() == 0) view->data = nullptr;
  AttentionGradients& gradients = run.gradients;
  for (TensorView* view : {&run.result.out, &gradients.dq, &gradients.dk, &gradients.dv,
                           &gradients.dcentroids, &gradients.dgate, &gradients.dlogit_scale})
    if (view->count() == 0) view->data = nullptr;
  for (TensorView& view : run.result.saved)
    if (view.count() == 0) view.data = nullptr;
  if (run.workspace.bytes == 0) run.workspace.data = nullptr;
}

class EmptyGpuTest : public ::testing::TestWithParam<test::EmptyCase> {
 protected:
  void SetUp() override {
    if (!cuda_available()) GTEST_SKIP() << "no GPU";
  }
};

TEST_P(EmptyGpuTest, WritesEverything) {
  const gpu_test::Watchdog watchdog;
  const cases::Problem problem = test::empty_problem(GetParam());
  DeviceRun run(problem), other(problem);
  for (const DeviceTensor& tensor : other.saved) tensor.memory().poison(0x55);
  for (DeviceRun* each : {&run, &other}) {
    forget_empty_memory(*each);
    each->forward();
    each->backward();
  }
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  for (const DeviceTensor* tensor :
       {&run.out, &run.dq, &run.dk, &run.dv, &run.dcentroids, &run.dgate, &run.dlogit_scale}) {
    if (tensor->view().count() == 0) continue;
    for (double value : read_values(tensor->download())) ASSERT_EQ(value, 0);
  }
  const auto layout = attention_saved(run.mechanism, run.inputs).tensors;
  for (std::size_t i = 0; i < layout.size(); ++i) {
    EXPECT_TRUE(run.saved[i].bytes() == other.saved[i].bytes()) << layout[i].name;
    if (layout[i].name.find("lse") == std::string::npos) continue;
    for (double value : read_values(run.saved[i].download()))
      ASSERT_EQ(value, -INFINITY) << layout[i].name;
  }
  for (const DeviceTensor& tensor : run.saved) EXPECT_TRUE(tensor.memory().intact());
  EXPECT_TRUE(run.memory.intact());
}

INSTANTIATE_TEST_SUITE_P(Cases, EmptyGpuTest, ::testing::ValuesIn(test::empty_cases()),
                         [](const auto& test) { return test.param.problem.name; });

}  // namespace
}  // namespace coterie
