// SPDX-License-Identifier: MIT
#include "train/checkpoint.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "coterie/error.h"
#include "formats/checksum.h"
#include "formats/files.h"
#include "tests/support/tensors.h"
#include "tests/train/temporary_folder.h"

namespace coterie::train {
namespace {

namespace fs = std::filesystem;

void expect_equal(const NamedTensors& a, const NamedTensors& b) {
  ASSERT_EQ(a.size(), b.size());
  for (const auto& [name, tensor] : a) {
    ASSERT_TRUE(b.contains(name)) << name;
    EXPECT_EQ(tensor.scalar_type(), b.at(name).scalar_type()) << name;
    EXPECT_TRUE(tensor.equal(b.at(name))) << name;
  }
}

Checkpoint checkpoint_at(std::int64_t step) {
  Checkpoint checkpoint;
  checkpoint.model["weight"] = at::full({3, 2}, static_cast<double>(step) / 3.0);
  checkpoint.model["centroids"] = at::arange(4, at::kDouble);
  checkpoint.optimizer["weight.m"] = at::ones({3, 2}, at::kBFloat16);
  checkpoint.config = "task = \"copy\"\n";
  checkpoint.state = {.step = step,
                      .evaluations_without_improvement = 2,
                      .best = 0.1 + static_cast<double>(step),
                      .best_step = step / 2,
                      .seconds = 1.0 / 3.0};
  return checkpoint;
}

using test::error_of;

void cut_in_half(const std::string& path) {
  const std::string whole = read_file(path);
  write_file(path, std::string_view(whole).substr(0, whole.size() / 2));
}

void flip_last_byte(const std::string& path) {
  std::string whole = read_file(path);
  whole.back() = static_cast<char>(whole.back() ^ 1);
  write_file(path, whole);
}

// Two linear layers; a tied one has the first's weight under a second name.
struct Pair : ::torch::nn::Module {
  explicit Pair(bool tied) {
    first = register_module("first", ::torch::nn::Linear(3, 3));
    second = register_module("second", ::torch::nn::Linear(3, 3));
    if (tied) register_parameter("output", first->weight);
    register_buffer("count", at::zeros({2}, at::kLong));
  }
  ::torch::nn::Linear first = nullptr, second = nullptr;
};

TEST(NamedTensors, EveryTypeSurvivesTheFormat) {
  NamedTensors tensors;
  for (const at::ScalarType type : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf, at::kLong,
                                    at::kInt, at::kShort, at::kChar, at::kByte, at::kBool}) {
    tensors[c10::toString(type)] = at::arange(6).view({2, 3}).to(type);
  }
  tensors["scalar"] = at::tensor(3.5);
  tensors["empty"] = at::zeros({0, 3});
  expect_equal(from_safetensors(to_safetensors(tensors)), tensors);
}

TEST(NamedTensors, StridedTensorsAreStoredInTheOrderOfTheirShape) {
  const NamedTensors tensors = {{"t", at::arange(6).view({2, 3}).t()}};
  expect_equal(from_safetensors(to_safetensors(tensors)), tensors);
}

TEST(NamedTensors, TypesWithoutANameAreRefused) {
  EXPECT_THROW(to_safetensors({{"c", at::zeros({1}, at::kComplexFloat)}}), Error);
  SafeTensors stored;
  stored.tensors["q"] = {.dtype = "F8_E4M3", .shape = {1}, .bytes = {0}};
  EXPECT_THROW(from_safetensors(stored), Error);
}

TEST(NamedTensors, SharedTensorsOccurOnce) {
  EXPECT_EQ(module_tensors(Pair(false)).size(), 5u);
  const NamedTensors tied = module_tensors(Pair(true));
  EXPECT_EQ(tied.size(), 5u);
  EXPECT_NE(tied.contains("first.weight"), tied.contains("output"));
}

TEST(NamedTensors, AModuleTakesAnothersTensors) {
  Pair from(true), to(true);
  from.first->weight.data().fill_(0.25);
  const NamedTensors stored = from_safetensors(to_safetensors(module_tensors(from)));
  load_module(to, stored, "a test");
  expect_equal(module_tensors(to), module_tensors(from));
  EXPECT_TRUE(to.first->weight.equal(from.first->weight));
  EXPECT_TRUE(to.first->weight.requires_grad());
}

TEST(NamedTensors, TensorsOfAnotherModelAreNamedAndNothingChanges) {
  Pair module(false);
  NamedTensors others = from_safetensors(to_safetensors(module_tensors(module)));
  const NamedTensors before = from_safetensors(to_safetensors(module_tensors(module)));
  others["first.bias"] = at::ones({3});
  others.erase("count");
  others["third.weight"] = at::ones({1});
  others["second.weight"] = at::ones({3, 4});
  const std::string error = error_of([&] { load_module(module, others, "the file"); });
  EXPECT_EQ(error,
            "[checkpoint] the tensors in the file do not match this model: count is missing; "
            "second.weight has shape (3, 4), expected (3, 3); third.weight is not in the model");
  expect_equal(module_tensors(module), before);
}

TEST(Checkpoint, WhatIsSavedIsLoaded) {
  const TemporaryFolder folder;
  const Checkpoints run(folder.path("run"));
  EXPECT_TRUE(run.steps().empty());
  const Checkpoint saved = checkpoint_at(200);
  run.save(saved, false);
  EXPECT_EQ(run.path(200), folder.path("run") + "/checkpoints/step-00000200");
  const Checkpoint loaded = load_checkpoint(run.path(200));
  expect_equal(loaded.model, saved.model);
  expect_equal(loaded.optimizer, saved.optimizer);
  EXPECT_EQ(loaded.config, saved.config);
  EXPECT_EQ(loaded.state.step, 200);
  EXPECT_EQ(loaded.state.evaluations_without_improvement, 2);
  EXPECT_EQ(loaded.state.best, saved.state.best);
  EXPECT_EQ(loaded.state.best_step, 100);
  EXPECT_EQ(loaded.state.seconds, saved.state.seconds);
}

TEST(Checkpoint, ARunWithoutABestValueStaysWithoutOne) {
  const TemporaryFolder folder;
  const Checkpoints run(folder.path());
  Checkpoint saved = checkpoint_at(1);
  saved.state.best.reset();
  run.save(saved, false);
  EXPECT_FALSE(load_checkpoint(run.path(1)).state.best.has_value());
  EXPECT_FALSE(run.best().has_value());
}

TEST(Checkpoint, TheLastOnesAndTheBestAreKept) {
  const TemporaryFolder folder;
  const Checkpoints run(folder.path());
  for (const std::int64_t step : {10, 20, 30, 40}) run.save(checkpoint_at(step), step == 10);
  fs::create_directory(run.path(50) + std::string(kPartial) + "123");
  EXPECT_EQ(run.steps(), (std::vector<std::int64_t>{10, 20, 30, 40}));
  run.prune(2);
  EXPECT_EQ(run.steps(), (std::vector<std::int64_t>{10, 30, 40}));
  EXPECT_EQ(run.best(), 10);
  EXPECT_FALSE(fs::exists(run.path(50) + std::string(kPartial) + "123"));
  run.save(checkpoint_at(50), true);
  run.prune(1);
  EXPECT_EQ(run.steps(), (std::vector<std::int64_t>{50}));
  run.prune(5);
  EXPECT_EQ(run.steps(), (std::vector<std::int64_t>{50}));
}

TEST(Checkpoint, WhatARunWentBackBehindIsSetAside) {
  const TemporaryFolder folder;
  const Checkpoints run(folder.path());
  for (const std::int64_t step : {10, 20, 30}) run.save(checkpoint_at(step), step == 30);
  cut_in_half(run.path(30) + "/model.safetensors");
  const TrainState state = load_checkpoint(run.path(20)).state;  // its best step is 10
  for (int time = 0; time < 2; ++time) {
    run.set_aside_after(state);
    EXPECT_EQ(run.steps(), (std::vector<std::int64_t>{10, 20}));
    EXPECT_EQ(run.best(), 10);
    EXPECT_TRUE(fs::exists(run.path(30) + ".damaged"));
    run.save(checkpoint_at(25), false);
    run.prune(1);
    EXPECT_EQ(run.steps(), (std::vector<std::int64_t>{10, 25}));
    run.save(checkpoint_at(20), false);
    run.save(checkpoint_at(30), true);  // then again, with a damaged checkpoint already set aside
  }
}

TEST(Checkpoint, TheSameStepCanBeSavedAgain) {
  const TemporaryFolder folder;
  const Checkpoints run(folder.path());
  run.save(checkpoint_at(10), false);
  cut_in_half(run.path(10) + "/model.safetensors");
  run.save(checkpoint_at(10), false);
  expect_equal(load_checkpoint(run.path(10)).model, checkpoint_at(10).model);
}

TEST(Checkpoint, DamageIsFoundAndTheFileIsNamed) {
  const TemporaryFolder folder;
  const Checkpoints run(folder.path());
  for (const char* const name :
       {"model.safetensors", "optimizer.safetensors", "state.json", "config.toml"}) {
    run.save(checkpoint_at(10), false);
    const std::string file = run.path(10) + "/" + name;
    fs::remove(file);
    EXPECT_EQ(error_of([&] { load_checkpoint(run.path(10)); }),
              "[files] cannot read " + file + ": No such file or directory");
  }
  for (const char* const name : {"model.safetensors", "optimizer.safetensors", "state.json"}) {
    run.save(checkpoint_at(10), false);
    const std::string file = run.path(10) + "/" + name;
    cut_in_half(file);
    const std::string error = error_of([&] { load_checkpoint(run.path(10)); });
    EXPECT_NE(error.find(file), std::string::npos) << error;
  }
  for (const char* const name : {"model.safetensors", "optimizer.safetensors"}) {
    run.save(checkpoint_at(10), false);
    const std::string file = run.path(10) + "/" + name;
    flip_last_byte(file);
    const std::string error = error_of([&] { load_checkpoint(run.path(10)); });
    EXPECT_NE(error.find(file + " is damaged: expected checksum"), std::string::npos) << error;
  }
}

// Versions before XXH3 wrote 16 digits of another checksum.
TEST(Checkpoint, ChecksumsOfAnotherKindAreRefused) {
  const TemporaryFolder folder;
  const Checkpoints run(folder.path());
  for (const char* const name : {"model.safetensors", "optimizer.safetensors"}) {
    run.save(checkpoint_at(10), false);
    const std::string file = run.path(10) + "/" + name, state_file = run.path(10) + "/state.json";
    nlohmann::json state = nlohmann::json::parse(read_file(state_file));
    EXPECT_EQ(state["checksums"][name], file_checksum(file));
    state["checksums"][name] = "cbf29ce484222325";
    write_file(state_file, state.dump());
    EXPECT_EQ(error_of([&] { load_checkpoint(run.path(10)); }),
              "[checkpoint] " + file +
                  ": state.json has checksum \"cbf29ce484222325\", which does not start with xxh3: "
                  "(an older version wrote this checkpoint; train again)");
  }
}

TEST(Checkpoint, APersonMayNameTheRunOrTheCheckpoint) {
  const TemporaryFolder folder;
  const Checkpoints run(folder.path());
  for (const std::int64_t step : {10, 20, 30}) run.save(checkpoint_at(step), step == 20);
  std::string warning;
  EXPECT_EQ(find_checkpoint(folder.path(), false, &warning), run.path(30));
  EXPECT_EQ(find_checkpoint(folder.path(), true, &warning), run.path(20));
  EXPECT_EQ(find_checkpoint(run.path(10), true, &warning), run.path(10));
  EXPECT_EQ(warning, "");
}

TEST(Checkpoint, ADamagedOneGivesWayToTheOneBefore) {
  const TemporaryFolder folder;
  const Checkpoints run(folder.path());
  for (const std::int64_t step : {10, 20, 30}) run.save(checkpoint_at(step), false);
  cut_in_half(run.path(30) + "/model.safetensors");
  fs::remove(run.path(20) + "/state.json");
  std::string warning;
  EXPECT_EQ(find_checkpoint(folder.path(), false, &warning), run.path(10));
  EXPECT_NE(warning.find(run.path(30) + "/model.safetensors"), std::string::npos) << warning;
  EXPECT_NE(warning.find("using " + run.path(10) + " instead"), std::string::npos) << warning;
  fs::remove(run.path(10) + "/state.json");
  const std::string error = error_of([&] { find_checkpoint(folder.path(), false, &warning); });
  EXPECT_NE(error.find(run.path(30) + "/model.safetensors"), std::string::npos) << error;
}

TEST(Checkpoint, NoCheckpointIsAnError) {
  const TemporaryFolder folder;
  EXPECT_NE(error_of([&] {
              find_checkpoint(folder.path(), false, nullptr);
            }).find("[checkpoint] expected a checkpoint or a run's folder with checkpoints; got"),
            std::string::npos);
  EXPECT_NE(error_of([&] {
              find_checkpoint(folder.path("missing"), false, nullptr);
            }).find("which does not exist"),
            std::string::npos);
}

}  // namespace
}  // namespace coterie::train
