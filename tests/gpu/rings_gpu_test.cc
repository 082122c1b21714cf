// SPDX-License-Identifier: MIT
// Strict routing in pieces, such as single tokens, on the GPU against its parallel pass there: both
// select the same clusters, so that outputs differ by rounding alone.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "coterie/attention.h"
#include "coterie/random.h"
#include "coterie/routing.h"
#include "coterie/runtime.h"
#include "coterie/spec.h"
#include "tests/gpu/device_tensor.h"

namespace coterie {
namespace {

using gpu_test::DeviceMemory;
using gpu_test::DeviceTensor;

constexpr std::int64_t B = 2, H = 4, Hkv = 2, N = 150;

DeviceTensor numbers(DType dtype, std::vector<std::int64_t> sizes, std::uint32_t number) {
  const HostTensor tensor(dtype, std::move(sizes));
  const RandomStream stream{11, RandomUse::data, number};
  fill(tensor, [&](std::int64_t i) {
    return 4 * random_unit(stream.at(static_cast<std::uint64_t>(i)).word[0]) - 2;
  });
  return DeviceTensor(tensor.view());
}

void expect_parallel(const std::string& spec, DType dtype, std::int64_t Dk, std::int64_t Dv,
                     std::int64_t piece = 1) {
  const auto params = std::get<RoutingParams>(AttentionSpec::parse(spec).groups[0].mechanism);
  const DeviceTensor q = numbers(dtype, {B, H, N, Dk}, 1), k = numbers(dtype, {B, Hkv, N, Dk}, 2);
  const DeviceTensor v = numbers(dtype, {B, Hkv, N, Dv}, 3);
  const DeviceTensor centroids = numbers(DType::f32, {Hkv, params.clusters, Dk}, 4);
  const DeviceTensor scale = numbers(DType::f32, {H}, 5);
  const auto inputs_of = [&](std::int64_t first, std::int64_t count) {
    AttentionInputs inputs;
    inputs.q = q.view().narrowed(2, first, count);
    if (!params.shared()) inputs.k = k.view().narrowed(2, first, count);
    inputs.v = v.view().narrowed(2, first, count);
    inputs.centroids = centroids.view();
    inputs.logit_scale = scale.view();
    inputs.causal = true;
    return inputs;
  };
  const AttentionInputs all = inputs_of(0, N);
  const DeviceTensor parallel(TensorLayout{"out", dtype, {B, H, N, Dv}});
  const DeviceTensor stepped(TensorLayout{"out", dtype, {B, H, N, Dv}});
  std::vector<DeviceTensor> saved;
  AttentionResult result{parallel.view(), {}};
  for (const TensorLayout& layout : attention_saved(params, all).tensors) {
    saved.emplace_back(layout);
    result.saved.push_back(saved.back().view());
  }
  const DeviceMemory scratch(attention_workspace_bytes(params, all));
  attention_forward(params, all, result, {scratch.data(), scratch.bytes(), nullptr});
  const std::int64_t heads = params.shared() ? H : Hkv, slots = params.clusters * params.window;
  const HostTensor zero_k(DType::f32, {B, heads, slots, Dk}),
      zero_v(DType::f32, {B, heads, slots, Dv}), zeros(DType::i64, {B, heads, params.clusters});
  const DeviceTensor ring_k(zero_k.view()), ring_v(zero_v.view()), counts(zeros.view());
  for (std::int64_t n = 0; n < N; n += piece) {
    const std::int64_t count = std::min(piece, N - n);
    const AttentionInputs inputs = inputs_of(n, count);
    const DeviceMemory memory(routing_step_workspace_bytes(params, inputs));
    routing_step(params, inputs, {ring_k.view(), ring_v.view(), counts.view()},
                 stepped.view().narrowed(2, n, count), {memory.data(), memory.bytes(), nullptr});
  }
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  const std::vector<double> e = read_values(parallel.download()),
                            a = read_values(stepped.download());
  const double bound = dtype == DType::f32 ? 1e-3 : dtype == DType::bf16 ? 1.0 / 32 : 1.0 / 256;
  for (std::size_t i = 0; i < e.size(); ++i)
    ASSERT_NEAR(a[i], e[i], bound * (1 + std::abs(e[i])))
        << spec << " " << dtype_name(dtype) << " position "
        << static_cast<std::int64_t>(i) / Dv % N;
  double total = 0;
  for (const double count : read_values(counts.download())) total += count;
  EXPECT_EQ(total, static_cast<double>(B * heads * N));
  EXPECT_TRUE(ring_k.memory().intact() && ring_v.memory().intact() && counts.memory().intact());
}

TEST(RingsGpuTest, StepsAreTheParallelPass) {
  if (!cuda_available()) GTEST_SKIP() << "no GPU";
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16})
    for (const char* self : {"keep", "demote"})
      for (const char* rest : {"", ",share_qk=true", ",queries_in=2", ",include_self=true",
                               ",queries_in=2,include_self=true"})
        for (const auto& [Dk, Dv] : {std::pair{64, 64}, std::pair{40, 40}, std::pair{128, 128}})
          expect_parallel(std::string("routing(clusters=5,window=9,self=") + self + rest + ")",
                          dtype, Dk, Dv);
}

TEST(RingsGpuTest, PiecesAreTheParallelPass) {
  if (!cuda_available()) GTEST_SKIP() << "no GPU";
  for (const std::int64_t piece : {N, std::int64_t{64}, std::int64_t{7}})
    for (const char* self : {"keep", "demote"})
      for (const char* rest : {"", ",share_qk=true", ",queries_in=2", ",include_self=true",
                               ",queries_in=2,include_self=true"})
        for (const DType dtype : {DType::f32, DType::bf16})
          expect_parallel(std::string("routing(clusters=5,window=9,self=") + self + rest + ")",
                          dtype, 64, 64, piece);
}

TEST(RingsGpuTest, TakesManyClusters) {
  if (!cuda_available()) GTEST_SKIP() << "no GPU";
  expect_parallel("routing(clusters=70,window=3,queries_in=40)", DType::f32, 64, 64);
}

}  // namespace
}  // namespace coterie
