// SPDX-License-Identifier: MIT
// Near keys on the GPU (src/cuda/clustered/near.h): which heads subtract their far keys and which
// add them, and the results of data for which subtraction would cancel.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "cases/cases.h"
#include "cases/problem.h"
#include "coterie/passes.h"
#include "coterie/runtime.h"
#include "ops/parts.h"
#include "tests/gpu/device_run.h"
#include "tests/support/tensors.h"

namespace coterie {
namespace {

using cases::Problem;
using gpu_test::DeviceRun;
using gpu_test::DeviceTensor;

// Which heads add.
std::vector<double> adding_heads(const DeviceRun& run) {
  return read_values(run.saved.back().download());
}

TEST(NearGpuTest, HeadsWithoutCancellationSubtract) {
  if (!cuda_available()) GTEST_SKIP() << "no GPU";
  for (const char* spec : {"clustered(clusters=40,near=16)", "i-clustered(clusters=40,near=32)"})
    for (const char* shape : {"B1 H4 N2000 D64 bf16", "B2 H4:2 N1500 D64 bf16 mixture",
                              "B1 H2 N1000 D128 f16", "B1 H2 N700 D64"}) {
      SCOPED_TRACE(std::string(spec) + " " + shape);
      DeviceRun run(cases::make_problem(cases::make_case("near", spec, shape), 1));
      run.forward();
      for (const double head : adding_heads(run)) EXPECT_EQ(head, 0.0);
    }
}

// Keys that get almost all of the weight of a mean, in one of three heads: tokens 0 and 200 form a
// cluster, and token 0 itself has small logits there.
struct Dominating {
  std::int64_t first, count;
  std::vector<double> top;  // the cluster's top keys, if the mechanism has any
  double adds;              // whether the head adds its far keys
};

void expect_rows_with(const Dominating& keys, const char* spec, const char* type, double size) {
  SCOPED_TRACE(std::string(spec) + " " + (*type ? type : "f32") + ", logits of " +
               std::to_string(size));
  constexpr std::int64_t kTokens = 512, kDim = 64, kHead = 1;
  Problem problem = cases::make_problem(
      cases::make_case("near", spec, ("B1 H3 N512 D64 " + std::string(type)).c_str()), 8);
  problem.inputs.scale = 1.0;
  const auto change = [&](const TensorView& view, const auto& value) {
    std::vector<double> values = read_values(view);
    for (std::int64_t at = 0; at < kTokens * kDim; ++at)
      values[kHead * kTokens * kDim + at] = value(at / kDim, at % kDim, at);
    write_values(view, values);
  };
  change(problem.inputs.k, [&](auto j, auto d, auto at) {
    if (d == 0) return j >= keys.first && j < keys.first + keys.count ? 1.0 : 0.0;
    return 0.05 * std::sin(static_cast<double>(3 * at + 1));
  });
  change(problem.inputs.q, [&](auto i, auto d, auto at) {
    if (d == 0) return i == 200 ? 2.0 * size : 0.0;
    return i == 0 || i == 200 ? 0.1 * std::cos(static_cast<double>(at)) : 0.0;
  });
  DeviceRun run(problem);
  run.forward();
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  run.fetch_saved();
  std::vector<double> labels = read_values(run.host.result.saved[0]);
  for (std::int64_t i = 0; i < kTokens; ++i)
    labels[kHead * kTokens + i] = i == 0 || i == 200 ? 0.0 : 1.0;
  write_values(run.host.result.saved[0], labels);
  Groups groups;
  groups.order = run.host.result.saved[1];
  groups.offsets = run.host.result.saved[2];
  group_by_cluster(run.host.result.saved[0], problem.inputs.q_sequences, groups);
  if (run.host.selection_count > 3) {
    std::vector<double> top = read_values(run.host.result.saved[3]);
    std::vector<double> own = keys.top;
    own.insert(own.end(), {40, 41, 42});  // of the other cluster
    std::copy(own.begin(), own.end(), top.begin() + kHead * 6);
    write_values(run.host.result.saved[3], top);
  }
  for (std::size_t i = 0; i < run.host.selection_count; ++i) {
    run.saved[i] = DeviceTensor(run.host.result.saved[i]);
    run.result.saved[i] = run.saved[i].view();
  }
  attention_attend(run.mechanism, run.inputs, run.result, run.workspace);
  run.backward();
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_EQ(adding_heads(run)[kHead], keys.adds);
  gpu_test::expect_rows(problem, run);
}

// The data of InvariantsTest.NearKeysThatDominateAMeanDoNotCancel: the near keys of token 0.
TEST(NearGpuTest, KeysThatDominateAMeanDoNotCancel) {
  if (!cuda_available()) GTEST_SKIP() << "no GPU";
  for (const char* spec :
       {"clustered(clusters=2,near=16)", "i-clustered(clusters=2,topk=3,near=16)"})
    for (const char* type : {"bf16", "f16", ""})
      for (const double size : {7.0, 14.0, 40.0, 120.0})  // 7: 99.9 % of the mean's weight
        expect_rows_with({0, 32, {210, 220, 230}, 1.0}, spec, type, size);
}

// As in trained models: what the mean attends to most are its top keys, which are no part of its
// sums. So there is nothing to cancel, and the head need not be computed again.
TEST(NearGpuTest, TopKeysThatDominateAMeanAreNotInItsSums) {
  if (!cuda_available()) GTEST_SKIP() << "no GPU";
  for (const char* type : {"bf16", "f16", ""})
    for (const double size : {7.0, 14.0, 40.0, 120.0}) {
      expect_rows_with({300, 3, {300, 301, 302}, 0.0}, "i-clustered(clusters=2,topk=3,near=16)",
                       type, size);
      expect_rows_with({14, 3, {14, 15, 16}, 0.0}, "i-clustered(clusters=2,topk=3,near=16)", type,
                       size);  // near token 0
    }
}

}  // namespace
}  // namespace coterie
