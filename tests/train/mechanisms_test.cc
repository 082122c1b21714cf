// SPDX-License-Identifier: MIT
// Every attention in the trainer, with fewer key/value heads, micro-batches and recomputation:
// training, final inspection and generation.
#include <ATen/ops/isfinite.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "coterie/error.h"
#include "runs.h"
#include "temporary_folder.h"
#include "train/compare.h"
#include "train/inspect.h"
#include "train/sample.h"

namespace coterie::train {
namespace {

constexpr std::int64_t kModelHeads = 4;

// Pairs of attention spec and causality: all of the comparison plan, and every form of routing.
std::set<std::pair<std::string, bool>> every_form() {
  std::set<std::pair<std::string, bool>> forms;
  for (const PlannedRun& planned : comparison_plan("unused")) {
    forms.emplace(planned.config.attention,
                  planned.config.task == "bytes" || planned.config.recall.causal);
  }
  for (const std::string shared : {"false", "true"}) {
    const auto routing = [&](const std::string& more) {
      return "routing(clusters=3,decay=0.9,share_qk=" + shared + more + ")";
    };
    forms.emplace(routing(",window=8,membership=top"), false);
    forms.emplace(routing(",window=8,membership=top,causal=paper"), true);
    forms.emplace(routing(",membership=balanced"), false);
    forms.emplace(routing(",window=8,membership=nearest"), true);
    forms.emplace(routing(",window=8,causal=strict,queries_in=2,self=demote"), true);
    for (const bool causal : {false, true}) {
      forms.emplace("2*local(window=8)+2*" + routing(",window=8"), causal);
    }
  }
  forms.emplace("2*local(window=8)+2*lsh(chunk=8,buckets=4)", false);
  forms.emplace("lsh(chunk=8,buckets=4,combine=mean)", true);
  forms.emplace("strided(stride=4)", true);
  forms.emplace("oracle-top(topk=4)", true);
  return forms;
}

Config config_of(const std::string& attention, bool causal, std::int64_t kv_heads) {
  Config config = tiny_config("recall");
  config.recall.causal = causal;
  config.attention = attention;
  config.model.heads = kModelHeads;
  config.model.positions = "sinusoidal";  // equal tokens would tie, and rounding would decide
  config.model.kv_heads = kv_heads;
  config.train.steps = 3;
  config.train.eval_every = 0;
  // Makes steps proportional to gradients. With a small eps, Adam would take full-size steps for
  // gradients that consist of rounding errors only.
  config.optimizer.eps = 1;
  return config;
}

// Groups are refused if their heads do not divide evenly over the key/value heads.
bool allowed(const std::string& attention, std::int64_t kv_heads) {
  const std::vector<std::int64_t> counts = AttentionSpec::parse(attention).head_counts(kModelHeads);
  return std::all_of(counts.begin(), counts.end(),
                     [&](std::int64_t heads) { return heads * kv_heads % kModelHeads == 0; });
}

bool generates(const std::string& attention, bool causal) {
  return causal && leak_warning({AttentionSpec::parse(attention)}, causal).empty();
}

void expect_inspection_and_text(const Config& config, const std::string& checkpoint, bool causal) {
  const std::unique_ptr<Task> task = make_task(config);
  torch_api::Model model = make_model(config, *task);
  load_module(*model, load_checkpoint(checkpoint).model, checkpoint);
  for (const GroupReport& group : inspect(model, *task, 2, /*seed=*/1).groups) {
    for (const HeadReport& head : group.heads) {
      EXPECT_TRUE(head.mass > 0 && head.mass < 1.0001) << head.mass;
      EXPECT_TRUE(std::isfinite(head.entropy));
    }
  }
  std::vector<std::int64_t> tokens;
  torch_api::LanguageModel text_model = language_model(model, *task);
  const auto generate = [&] {
    const ReadPrompt prompt = read_prompt(text_model, {1, 2});
    sample(text_model, prompt, {.tokens = 5}, [&](std::int64_t token) {
      tokens.push_back(token);
      return true;
    });
  };
  if (generates(config.attention, causal)) {
    generate();
    EXPECT_EQ(tokens.size(), 5u);
  } else {
    EXPECT_THROW(generate(), Error);
  }
}

TEST(EveryAttention, TrainsAndIsInspectedWithAnyNumberOfKeyHeads) {
  for (const auto& [attention, causal] : every_form()) {
    for (const std::int64_t kv_heads : {std::int64_t{1}, std::int64_t{2}, kModelHeads}) {
      SCOPED_TRACE(attention + (causal ? ", causal, " : ", ") + std::to_string(kv_heads) +
                   " key heads");
      const TemporaryFolder folder;
      Config config = config_of(attention, causal, kv_heads);
      config.out = folder.path("run");
      if (!allowed(attention, kv_heads)) {
        EXPECT_THROW(run(config), Error);
        continue;
      }
      TrainResult result;
      ASSERT_NO_THROW(result = run(config));
      EXPECT_EQ(log_lines(config.out, "end").size(), 1u);
      for (const double loss : losses(config.out)) EXPECT_TRUE(std::isfinite(loss));
      expect_inspection_and_text(config, result.checkpoint, causal);
    }
  }
}

// A default that keeps a mechanism from learning trains without an error: with commitment=1 all
// normalised rows of routing became equal within 50 steps. Local attention alone gets 0.32, 0.41 if
// causal, and guessing 0.125.
TEST(EveryAttention, LearnedCentroidsRecallWithTheirDefaults) {
  for (PlannedRun& planned : comparison_plan("unused")) {
    Config& config = planned.config;
    const bool learned = config.attention.find("routing") != std::string::npos ||
                         config.attention.find("cast") != std::string::npos;
    if (config.task != "recall" || !learned) continue;
    SCOPED_TRACE(planned.section + ", " + config.attention);
    const TemporaryFolder folder;
    config.out = folder.path("run");
    config.train.steps = 100;
    config.train.eval_every = 0;
    config.threads = 1;
    EXPECT_GT(run(config).evaluation->metric, config.recall.causal ? 0.5 : 0.4);
  }
}

// Losses of a run and the centroids at its end.
struct RunOutcome {
  std::vector<double> losses, commitments;
  std::vector<std::pair<std::string, at::Tensor>> centroids;
};

RunOutcome run_outcome(Config config) {
  const TemporaryFolder folder;
  config.out = folder.path("run");
  const NamedTensors model = load_checkpoint(run(config).checkpoint).model;
  RunOutcome outcome;
  for (const nlohmann::json& line : log_lines(config.out, "step")) {
    outcome.losses.push_back(line.at("loss"));
    if (line.contains("commitment")) outcome.commitments.push_back(line.at("commitment"));
  }
  for (const auto& [name, tensor] : model) {
    if (name.ends_with(".centroids")) outcome.centroids.emplace_back(name, tensor);
  }
  return outcome;
}

// In single precision the two runs differ by the order of sums. A logit is the result of about a
// hundred operations on numbers of order one, each with a rounding of 6e-8: 1e-5 of a loss or a
// centroid.
void expect_near(const RunOutcome& got, const RunOutcome& wanted) {
  constexpr double kRunRounding = 1e-5;
  ASSERT_EQ(got.losses.size(), wanted.losses.size());
  for (std::size_t i = 0; i < wanted.losses.size(); ++i) {
    EXPECT_NEAR(got.losses[i], wanted.losses[i], kRunRounding * wanted.losses[i]) << "step " << i;
  }
  ASSERT_EQ(got.commitments.size(), wanted.commitments.size());
  for (std::size_t i = 0; i < wanted.commitments.size(); ++i) {
    EXPECT_NEAR(got.commitments[i], wanted.commitments[i], kRunRounding * wanted.commitments[i]);
  }
  for (std::size_t i = 0; i < wanted.centroids.size(); ++i) {
    const at::Tensor& tensor = wanted.centroids[i].second;
    EXPECT_LE((got.centroids.at(i).second - tensor).abs().max().item<double>(),
              kRunRounding * tensor.abs().max().item<double>())
        << wanted.centroids[i].first;
  }
}

// Whether clusters start from random tokens of each row. The random stream depends on the row's
// index within a pass, so a row has other clusters in another micro-batch.
bool starts_at_random(const std::string& attention) {
  const std::vector<HeadGroup> groups = AttentionSpec::parse(attention).groups;
  return std::any_of(groups.begin(), groups.end(), [](const HeadGroup& group) {
    return std::holds_alternative<ClusteredParams>(group.mechanism) ||
           std::holds_alternative<ImprovedClusteredParams>(group.mechanism);
  });
}

TEST(EveryAttention, TrainsTheSameInMicroBatchesAndRecomputed) {
  for (const auto& [attention, causal] : every_form()) {
    const std::int64_t kv_heads = allowed(attention, 1) ? 1 : 2;
    SCOPED_TRACE(attention + (causal ? ", causal" : ""));
    Config config = config_of(attention, causal, kv_heads);
    const RunOutcome whole = run_outcome(config);
    config.model.recompute = true;
    const RunOutcome recomputed = run_outcome(config);
    EXPECT_EQ(recomputed.losses, whole.losses);
    for (const std::int64_t rows : {1, 3}) {
      config.train.micro_batch = rows;
      config.model.recompute = rows == 3;
      const RunOutcome parts = run_outcome(config);
      if (!starts_at_random(attention)) expect_near(parts, whole);
      for (const double loss : parts.losses) EXPECT_TRUE(std::isfinite(loss));
    }
  }
}

}  // namespace
}  // namespace coterie::train
