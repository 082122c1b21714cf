// SPDX-License-Identifier: MIT
#include "train/trainer.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <fstream>
#include <functional>

#include "coterie/error.h"
#include "coterie/runtime.h"
#include "runs.h"
#include "temporary_folder.h"
#include "train/optimizer.h"

namespace coterie::train {
namespace {

std::string message_of(const std::function<void()>& act) {
  try {
    act();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

#define EXPECT_HAS(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)

// Everything that has state besides parameters: dropout, routing centroids, an optimiser.
Config stateful_config() {
  Config config = tiny_config("recall");
  config.attention = "1*local(window=8)+1*routing(clusters=3,window=8)";
  config.recall.causal = true;
  config.model.dropout = 0.1;
  config.train.truncate = 0.3;
  return config;
}

// Runs until `step`, as if a person had interrupted it there.
TrainResult run_until(const Config& config, std::int64_t step) {
  std::atomic<bool> interrupted{false};
  TrainHooks hooks;
  hooks.interrupted = &interrupted;
  hooks.progress = [&](const ProgressLine& line) { interrupted = line.step >= step; };
  return run(config, /*resume=*/false, hooks);
}

void expect_equal_models(const std::string& a, const std::string& b) {
  const NamedTensors left = load_checkpoint(a).model, right = load_checkpoint(b).model;
  ASSERT_EQ(left.size(), right.size());
  for (const auto& [name, tensor] : left) EXPECT_TRUE(at::equal(tensor, right.at(name))) << name;
}

TEST(Trainer, EqualSeedsMakeEqualRunsAndOthersDiffer) {
  const TemporaryFolder folder;
  Config config = stateful_config();
  config.out = folder.path("a");
  const TrainResult first = run(config);
  config.out = folder.path("b");
  const TrainResult second = run(config);
  EXPECT_EQ(losses(folder.path("a")), losses(folder.path("b")));
  EXPECT_EQ(losses(config.out).size(), 20u);
  expect_equal_models(first.checkpoint, second.checkpoint);
  config.out = folder.path("c");
  config.seed = 2;
  run(config);
  EXPECT_NE(losses(folder.path("a")), losses(folder.path("c")));
}

TEST(Trainer, AnInterruptedRunResumesBitByBit) {
  for (const char* optimizer : {"adamw", "adafactor"}) {
    const TemporaryFolder folder;
    Config config = stateful_config();
    config.optimizer.name = optimizer;
    config.out = folder.path("straight");
    const TrainResult straight = run(config);
    config.out = folder.path("broken");
    const TrainResult broken = run_until(config, 13);
    EXPECT_EQ(broken.reason, "interrupted");
    EXPECT_EQ(broken.state.step, 13);
    EXPECT_EQ(log_lines(config.out, "end").back().at("reason"), "interrupted");
    const TrainResult resumed = run(config, /*resume=*/true);
    EXPECT_EQ(resumed.reason, "steps");
    EXPECT_EQ(losses(folder.path("straight")), losses(config.out));
    EXPECT_EQ(resumed.evaluation->score.nats, straight.evaluation->score.nats);
    EXPECT_EQ(resumed.state.best, straight.state.best);
    EXPECT_EQ(log_lines(config.out, "end").size(), 1u);
    EXPECT_EQ(log_lines(config.out, "run").size(), 1u);
    expect_equal_models(straight.checkpoint, resumed.checkpoint);
  }
}

TEST(Trainer, ADamagedCheckpointIsSkippedWithAWarning) {
  const TemporaryFolder folder;
  Config config = stateful_config();
  config.checkpoint = {.every = 5, .keep = 3};
  config.out = folder.path("straight");
  run(config);
  config.out = folder.path("damaged");
  const TrainResult broken = run_until(config, 15);
  std::filesystem::resize_file(broken.checkpoint + "/model.safetensors", 100);
  std::vector<std::string> warnings;
  TrainHooks hooks;
  hooks.warn = [&](const std::string& line) { warnings.push_back(line); };
  const TrainResult resumed = run(config, /*resume=*/true, hooks);
  ASSERT_FALSE(warnings.empty());  // others are about the clusters of the tiny model
  EXPECT_HAS(warnings[0], "step-00000015");
  EXPECT_EQ(resumed.state.step, 20);
  EXPECT_EQ(losses(folder.path("straight")), losses(config.out));
}

// A run that resumes before damaged checkpoints keeps its new checkpoints and ends like a run that
// was never stopped: for several numbers of kept checkpoints, any damage, and if the best
// checkpoint is damaged.
TEST(Trainer, ARunBehindDamagedCheckpointsKeepsItsNewOnes) {
  using Damage = std::function<void(const std::string&)>;
  const std::vector<Damage> damages = {
      [](const std::string& path) {
        std::filesystem::resize_file(path + "/model.safetensors", 100);
      },
      [](const std::string& path) { std::filesystem::remove(path + "/state.json"); }};
  for (const std::int64_t keep : {1, 2, 3}) {
    for (const Damage& damage : damages) {
      SCOPED_TRACE(keep);
      const TemporaryFolder folder;
      Config config = stateful_config();
      config.train.eval_every = 5;
      config.checkpoint = {.every = 3, .keep = keep};
      config.out = folder.path("straight");
      const TrainResult straight = run(config);
      config.out = folder.path("damaged");
      const Checkpoints checkpoints(config.out);
      config.checkpoint.keep = 10;  // keeps checkpoints to fall back on
      run_until(config, 16);
      config.checkpoint.keep = keep;
      for (const std::int64_t step : checkpoints.steps()) {
        if (step > 7) damage(checkpoints.path(step));
      }
      // Every new checkpoint, including the first, can be found and loaded.
      std::int64_t looked = 0;
      TrainHooks hooks;
      hooks.progress = [&](const ProgressLine& line) {
        if (line.step % config.checkpoint.every != 0) return;
        std::string warning;
        EXPECT_EQ(find_checkpoint(config.out, /*best=*/false, &warning),
                  checkpoints.path(line.step));
        EXPECT_EQ(warning, "");
        EXPECT_EQ(load_checkpoint(checkpoints.path(line.step)).state.step, line.step);
        ++looked;
      };
      const TrainResult resumed = run(config, /*resume=*/true, hooks);
      EXPECT_EQ(looked, 4);  // 9, 12, 15, 18
      EXPECT_EQ(resumed.state.step, 20);
      EXPECT_EQ(checkpoints.steps(), Checkpoints(folder.path("straight")).steps());
      EXPECT_EQ(checkpoints.best(), Checkpoints(folder.path("straight")).best());
      EXPECT_EQ(losses(folder.path("straight")), losses(config.out));
      expect_equal_models(straight.checkpoint, resumed.checkpoint);
      EXPECT_TRUE(std::filesystem::exists(checkpoints.path(15) + ".damaged"));
    }
  }
}

TEST(Trainer, ResumingBeforeTheFirstCheckpointStartsAgain) {
  const TemporaryFolder folder;
  Config config = tiny_config("copy");
  config.out = folder.path("run");
  run(config);
  std::filesystem::remove_all(config.out + "/checkpoints");
  std::vector<std::string> warnings;
  TrainHooks hooks;
  hooks.warn = [&](const std::string& line) { warnings.push_back(line); };
  const TrainResult again = run(config, /*resume=*/true, hooks);
  EXPECT_EQ(again.state.step, 20);
  EXPECT_EQ(warnings.size(), 1u);
  EXPECT_EQ(losses(config.out).size(), 20u);
}

TEST(Trainer, ResumingAFinishedRunChangesNothing) {
  const TemporaryFolder folder;
  Config config = tiny_config("copy");
  config.out = folder.path("run");
  const TrainResult first = run(config);
  const std::string log = read_file(config.out + "/log.jsonl");
  const TrainResult again = run(config, /*resume=*/true);
  EXPECT_EQ(again.reason, "finished");
  EXPECT_EQ(again.state.best, first.state.best);
  EXPECT_EQ(read_file(config.out + "/log.jsonl"), log);
}

// With rows enough for torch to use all threads.
TEST(Trainer, LossesHaveTheSameBitsForAnyNumberOfThreads) {
  const TemporaryFolder folder;
  Config config = tiny_config("bytes");
  config.length = 256;
  config.model.dim = 64;
  config.attention = "1*full+1*routing(clusters=4,window=32)";
  config.train.steps = 6;
  config.train.batch = 16;
  std::vector<std::vector<double>> found;
  for (const int threads : {1, 2, 3}) {
    config.threads = threads;
    config.out = folder.path(std::to_string(threads));
    run(config);
    found.push_back(losses(config.out));
  }
  EXPECT_EQ(found[0], found[1]);
  EXPECT_EQ(found[0], found[2]);
}

TEST(Trainer, ARecordedStepHasTheLossesOfOthers) {
  if (!cuda_available()) GTEST_SKIP() << "no GPU";
  const TemporaryFolder folder;
  Config config = stateful_config();
  config.device = "cuda";
  config.model.dropout = 0.0;
  config.train.truncate = 0.0;
  config.out = folder.path("usual");
  const TrainResult usual = run(config);
  config.train.graph = true;
  config.out = folder.path("recorded");
  const TrainResult recorded = run(config);
  EXPECT_EQ(losses(folder.path("usual")), losses(folder.path("recorded")));
  expect_equal_models(usual.checkpoint, recorded.checkpoint);
}

TEST(Trainer, StepsThatCannotBeRecordedAreRefused) {
  const auto refusal = [](const char* device, const char* attention, double dropout,
                          double truncate) {
    Config config = tiny_config("copy");
    config.train.graph = true;
    config.device = device;
    config.attention = attention;
    config.model.dropout = dropout;
    config.train.truncate = truncate;
    return message_of([&] { run(config); });
  };
  EXPECT_HAS(refusal("cpu", "full", 0.0, 0.0), "--train.graph cannot be used: --device is cpu");
  if (!cuda_available()) return;
  EXPECT_HAS(refusal("cuda", "clustered(clusters=4)", 0.0, 0.0), "other random numbers");
  EXPECT_HAS(refusal("cuda", "full", 0.1, 0.0), "dropout");
  EXPECT_HAS(refusal("cuda", "full", 0.0, 0.5), "--train.truncate");
}

TEST(Trainer, AUsedFolderIsRefused) {
  const TemporaryFolder folder;
  Config config = tiny_config("copy");
  config.train.steps = 1;
  config.out = folder.path("run");
  run(config);
  EXPECT_HAS(message_of([&] { run(config); }), "continue it with --resume");
}

TEST(Trainer, NumbersThatAreNotFiniteStopTheRunAndKeepTheLastCheckpoint) {
  const TemporaryFolder folder;
  Config config = tiny_config("copy");
  config.optimizer.lr = 1e8;
  config.optimizer.clip = 0;
  config.schedule.warmup = 0;
  config.train.steps = 200;
  config.train.eval_every = 0;
  config.checkpoint.every = 1;
  config.out = folder.path("run");
  const std::string message = message_of([&] { run(config); });
  EXPECT_HAS(message, " in step ");
  EXPECT_HAS(message, "--optimizer.lr");
  const std::vector<std::int64_t> steps = Checkpoints(config.out).steps();
  ASSERT_FALSE(steps.empty());
  EXPECT_HAS(message, "the last good checkpoint is " + Checkpoints(config.out).path(steps.back()));
  for (const auto& [name, tensor] :
       load_checkpoint(Checkpoints(config.out).path(steps.back())).model) {
    EXPECT_TRUE(at::isfinite(tensor).all().item<bool>()) << name;
  }
}

TEST(Trainer, PatienceStopsARunThatDoesNotImprove) {
  Config config = tiny_config("copy");
  config.optimizer.lr = 0;
  config.train.eval_every = 1;
  config.train.patience = 2;
  const TrainResult result = run(config);
  EXPECT_EQ(result.reason, "patience");
  EXPECT_EQ(result.state.step, 3);
  EXPECT_EQ(result.state.best_step, 1);
  EXPECT_EQ(result.checkpoint, "");
}

TEST(Trainer, CheckpointsAreTheLastOnesAndTheBest) {
  const TemporaryFolder folder;
  Config config = tiny_config("copy");
  config.train.eval_every = 0;
  config.checkpoint = {.every = 4, .keep = 2};
  config.out = folder.path("run");
  const TrainResult result = run(config);
  EXPECT_EQ(Checkpoints(config.out).steps(), (std::vector<std::int64_t>{16, 20}));
  EXPECT_EQ(Checkpoints(config.out).best(), 20);
  EXPECT_EQ(result.checkpoint, Checkpoints(config.out).path(20));
}

TEST(Trainer, TheLogHasTheLinesOfLogH) {
  const TemporaryFolder folder;
  Config config = stateful_config();
  config.out = folder.path("run");
  run(config);
  const nlohmann::json head = log_lines(config.out, "run").at(0);
  for (const char* key : {"task", "attention", "config", "machine", "parameters", "metric",
                          "baselines", "seed", "date"}) {
    EXPECT_TRUE(head.contains(key)) << key;
  }
  const nlohmann::json step = log_lines(config.out, "step").at(0);
  for (const char* key : {"step", "loss", "lr", "grad_norm", "commitment", "tokens_per_s",
                          "seconds", "memory_bytes"}) {
    EXPECT_TRUE(step.contains(key)) << key;
  }
  EXPECT_GT(step.at("commitment"), 0.0);
  const auto evals = log_lines(config.out, "eval");
  ASSERT_EQ(evals.size(), 2u);
  for (const char* key : {"step", "split", "loss", "metric", "accuracy", "seconds", "strata"}) {
    EXPECT_TRUE(evals[0].contains(key)) << key;
  }
  const nlohmann::json end = log_lines(config.out, "end").at(0);
  EXPECT_GT(end.at("peak_memory_bytes"), 0);
  EXPECT_EQ(end.at("best"), std::max(evals[0].at("metric"), evals[1].at("metric")));
}

TEST(Trainer, ALeakingAttentionIsToldOnceOnACausalTask) {
  Config config = tiny_config("recall");
  config.recall.causal = true;
  config.attention = "routing(clusters=3,window=8,causal=paper)";
  config.train.steps = 2;
  std::vector<std::string> warnings;
  TrainHooks hooks;
  hooks.warn = [&](const std::string& line) { warnings.push_back(line); };
  run(config, /*resume=*/false, hooks);
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_HAS(warnings[0], "sees the future");
  EXPECT_EQ(leak_warning(layer_attention(config), /*causal=*/false), "");
}

TEST(Trainer, RoutingCentroidsMoveAndStartFromTheDataOrAtRandom) {
  const TemporaryFolder folder;
  Config config = stateful_config();
  config.train.steps = 3;
  const auto centroids = [&](const std::string& out, const std::string& start) {
    config.out = folder.path(out);
    config.train.centroids = start;
    return load_checkpoint(run(config).checkpoint)
        .model.at("transformer.layers.0.attention.group_1.centroids");
  };
  const at::Tensor data = centroids("a", "data"), random = centroids("b", "random");
  EXPECT_FALSE(at::equal(data, random));
  const NamedTensors fresh = module_tensors(*make_model(config, *make_task(config)));
  EXPECT_FALSE(at::equal(random, fresh.at("transformer.layers.0.attention.group_1.centroids")));
}

TEST(Trainer, Bf16PassesLeaveParametersInF32AndLossesClose) {
  const TemporaryFolder folder;
  Config config = tiny_config("copy");
  config.train.steps = 2;
  config.out = folder.path("f32");
  run(config);
  config.out = folder.path("bf16");
  config.train.dtype = "bf16";
  const TrainResult result = run(config);
  const double exact = losses(folder.path("f32"))[0], rounded = losses(config.out)[0];
  EXPECT_NE(exact, rounded);
  EXPECT_NEAR(rounded, exact, exact / 64);  // products rounded to 8 bits
  for (const auto& [name, tensor] : load_checkpoint(result.checkpoint).model) {
    EXPECT_EQ(tensor.scalar_type(), at::kFloat) << name;
  }
}

TEST(LayerAttention, LaterRangesWin) {
  Config config;
  config.model.layers = 4;
  config.attention_at = {{"1-3", "local(window=4)"}, {"2", "local(window=8)"}};
  const std::vector<AttentionSpec> specs = layer_attention(config);
  ASSERT_EQ(specs.size(), 4u);
  EXPECT_EQ(specs[0].to_string(), "full");
  EXPECT_EQ(specs[1].to_string(), "local(window=4)");
  EXPECT_EQ(specs[2].to_string(), "local(window=8)");
  EXPECT_EQ(specs[3].to_string(), "local(window=4)");
}

TEST(LayerAttention, BadRangesAndHeadCountsAreRefused) {
  for (const char* range :
       {"4", "2-4", "3-1", "-1", "1-", "a", "", "1-2-3", "99999999999999999999"}) {
    Config config;
    config.model.layers = 4;
    config.attention_at = {{range, "full"}};
    EXPECT_HAS(message_of([&] { layer_attention(config); }), "expected layers of --attention-at")
        << range;
  }
  Config config;
  config.attention = "3*full+4*full";
  EXPECT_HAS(message_of([&] { layer_attention(config); }), "add up");
}

}  // namespace
}  // namespace coterie::train
