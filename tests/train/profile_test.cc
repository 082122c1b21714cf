// SPDX-License-Identifier: MIT
#include "train/profile.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>

#include "coterie/error.h"
#include "runs.h"
#include "train/trainer.h"

namespace coterie::train {
namespace {

TEST(ProfileTest, KernelsHaveParts) {
  EXPECT_EQ(profile_part("void coterie::cuda::(anonymous namespace)::rotate_pairs<__nv_bfloat16>"),
            "rotary positions");
  EXPECT_EQ(profile_part("void coterie::cuda::forward_lists<64>"), "attention");
  EXPECT_EQ(profile_part("void coterie::cuda::(anonymous namespace)::add_norm_rows<Bf16, 4>"),
            "layer norm");
  EXPECT_EQ(profile_part("coterie::cuda::(anonymous namespace)::add_parts(PartSums, int)"),
            "centroids");
  EXPECT_EQ(profile_part("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_bias_TNT"), "matrix products");
  EXPECT_EQ(profile_part("void at::native::vectorized_elementwise_kernel<4, GeluCUDAKernelImpl>"),
            "GELU");
  EXPECT_EQ(profile_part("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel"),
            "layer norm");
  EXPECT_EQ(profile_part("Memcpy HtoD (Pinned -> Device)"), "casts and copies");
  EXPECT_EQ(profile_part("something else"), "other");
}

TEST(ProfileTest, OperationsHaveTheirOwnTime) {
  const at::Tensor a = at::ones({64, 64});
  const StepProfile profile = profile_steps(2, c10::kCPU, [&] { at::matmul(a, a); });
  const auto found = std::find_if(profile.kernels.begin(), profile.kernels.end(),
                                  [](const ProfileRow& row) { return row.name == "aten::mm"; });
  ASSERT_NE(found, profile.kernels.end());
  EXPECT_EQ(found->calls, 1);
  double sum = 0;
  for (const ProfileRow& row : profile.parts) sum += row.milliseconds;
  EXPECT_GT(found->milliseconds, 0);
  EXPECT_LE(sum, profile.milliseconds);
}

TEST(ProfileTest, AStepHasItsParts) {
  const Config config = tiny_config("copy");
  const DryRun run = dry_run(config, *make_task(config), 1, /*profile=*/true);
  std::vector<std::string> names;
  for (const ProfileRow& row : run.profile.parts) names.push_back(row.name);
  for (const char* part : {"matrix products", "optimiser", "layer norm", "GELU", "loss"}) {
    EXPECT_NE(std::find(names.begin(), names.end(), part), names.end()) << part;
  }
  EXPECT_GT(run.step_cpu_seconds, 0);
  EXPECT_EQ(run.centroid_seconds, 0);
}

TEST(ProfileTest, TheStartOfRoutingIsTimed) {
  Config config = tiny_config("recall");
  config.attention = "routing(clusters=2,window=16)";
  config.train.centroids = "data";
  EXPECT_GT(dry_run(config, *make_task(config), 1, /*profile=*/false).centroid_seconds, 0);
}

TEST(ProfileTest, ParametersAreThoseOfTheRunToStartFrom) {
  Config config = tiny_config("copy");
  config.init_from = "no/such/run";
  const auto task = make_task(config);
  EXPECT_THROW(dry_run(config, *task, 1, /*profile=*/false), Error);
}

}  // namespace
}  // namespace coterie::train
