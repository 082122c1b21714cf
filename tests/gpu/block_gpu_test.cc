// SPDX-License-Identifier: MIT
// Residual sums with norms and GELU with biases on the GPU against the CPU's.
#include "coterie/block.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "coterie/random.h"
#include "coterie/runtime.h"
#include "tests/gpu/device_tensor.h"

namespace coterie {
namespace {

using gpu_test::DeviceMemory;
using gpu_test::DeviceTensor;

HostTensor numbers(DType dtype, std::vector<std::int64_t> sizes, std::uint32_t number) {
  HostTensor tensor(dtype, std::move(sizes));
  const RandomStream stream{7, RandomUse::data, number};
  fill(tensor, [&](std::int64_t i) {
    return 4 * random_unit(stream.at(static_cast<std::uint64_t>(i)).word[0]) - 2;
  });
  return tensor;
}

// Both add in f32 in another order; 16-bit results may round the other way.
double unit_of(DType dtype) {
  if (dtype == DType::f32) return 1e-5;
  return dtype == DType::bf16 ? 0x1p-7 : 0x1p-10;
}

void expect_near(const HostTensor& expected, const HostTensor& got, const char* name) {
  const std::vector<double> e = read_values(expected), g = read_values(got);
  double largest = 1;
  for (const double value : e) largest = std::max(largest, std::abs(value));
  for (std::size_t i = 0; i < e.size(); ++i)
    ASSERT_NEAR(g[i], e[i], unit_of(expected.view().dtype) * largest) << name << " element " << i;
}

// The same tensor on both devices.
struct Pair {
  HostTensor host;
  DeviceTensor device;
  explicit Pair(HostTensor values) : host(std::move(values)), device(host.view()) {}
  void expect_equal(const char* name) const { expect_near(host, device.download(), name); }
};

TEST(BlockGpuTest, AddsAndNormalisesAsTheCpuDoes) {
  if (!cuda_available()) GTEST_SKIP() << "no GPU";
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16})
    for (const std::int64_t R : {1, 70, 5000})
      for (const std::int64_t E : {4, 132, 512, 1000}) {
        SCOPED_TRACE(std::string(dtype_name(dtype)) + " " + std::to_string(R) + " x " +
                     std::to_string(E));
        const Pair x(numbers(DType::f32, {R, E}, 1)), branch(numbers(dtype, {R, E}, 2));
        const Pair branch_bias(numbers(DType::f32, {E}, 3)), gain(numbers(DType::f32, {E}, 4));
        const Pair bias(numbers(DType::f32, {E}, 5)), grad_y(numbers(DType::f32, {R, E}, 6));
        const Pair grad_out(numbers(dtype, {R, E}, 7));
        const Pair y(HostTensor(DType::f32, {R, E})), out(HostTensor(dtype, {R, E}));
        const Pair mean(HostTensor(DType::f32, {R})), scale(HostTensor(DType::f32, {R}));
        const Pair dx(HostTensor(DType::f32, {R, E})), dbranch(HostTensor(dtype, {R, E}));
        const Pair dbranch_bias(HostTensor(DType::f32, {E})), dgain(HostTensor(DType::f32, {E}));
        const Pair dbias(HostTensor(DType::f32, {E}));
        const auto run = [&](auto at, const Workspace& workspace) {
          add_norm({at(x), at(branch), at(branch_bias), at(gain), at(bias), 1e-5},
                   {at(y), at(out), at(mean), at(scale)}, workspace);
          add_norm_backward({at(y), at(mean), at(scale), at(gain), at(grad_y), at(grad_out)},
                            {at(dx), at(dbranch), at(dbranch_bias), at(dgain), at(dbias)},
                            workspace);
        };
        const std::int64_t bytes = add_norm_workspace_bytes(x.host.view());
        std::vector<char> memory(static_cast<std::size_t>(bytes));
        run([](const Pair& pair) { return pair.host.view(); }, {memory.data(), bytes, nullptr});
        const DeviceMemory scratch(bytes);
        run([](const Pair& pair) { return pair.device.view(); }, {scratch.data(), bytes, nullptr});
        ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
        EXPECT_TRUE(scratch.intact());
        y.expect_equal("y");
        out.expect_equal("out");
        mean.expect_equal("mean");
        scale.expect_equal("scale");
        dx.expect_equal("dx");
        dbranch.expect_equal("dbranch");
        dbranch_bias.expect_equal("dbranch_bias");
        dgain.expect_equal("dgain");
        dbias.expect_equal("dbias");
      }
}

TEST(BlockGpuTest, GeluEqualsTheCpus) {
  if (!cuda_available()) GTEST_SKIP() << "no GPU";
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16})
    for (const std::int64_t R : {1, 70, 5000})
      for (const std::int64_t F : {4, 260, 2048}) {
        SCOPED_TRACE(std::string(dtype_name(dtype)) + " " + std::to_string(R) + " x " +
                     std::to_string(F));
        const Pair x(numbers(dtype, {R, F}, 1)), bias(numbers(DType::f32, {F}, 2));
        const Pair grad_out(numbers(dtype, {R, F}, 3)), out(HostTensor(dtype, {R, F}));
        const Pair dx(HostTensor(dtype, {R, F})), dbias(HostTensor(DType::f32, {F}));
        const Pair sums(HostTensor(DType::f32, {F}));
        const auto run = [&](auto at, const Workspace& workspace) {
          bias_gelu(at(x), at(bias), at(out), workspace);
          bias_gelu_backward(at(x), at(bias), at(grad_out), at(dx), at(dbias), workspace);
          sum_rows(at(grad_out), at(sums), workspace);
        };
        const std::int64_t bytes = bias_gelu_workspace_bytes(x.host.view());
        std::vector<char> memory(static_cast<std::size_t>(bytes));
        run([](const Pair& pair) { return pair.host.view(); }, {memory.data(), bytes, nullptr});
        const DeviceMemory scratch(bytes);
        run([](const Pair& pair) { return pair.device.view(); }, {scratch.data(), bytes, nullptr});
        ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
        EXPECT_TRUE(scratch.intact());
        out.expect_equal("out");
        dx.expect_equal("dx");
        dbias.expect_equal("dbias");
        sums.expect_equal("sums");
      }
}

}  // namespace
}  // namespace coterie
