// SPDX-License-Identifier: MIT
#include "train/gradients.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "runs.h"
#include "train/evaluate.h"

namespace coterie::train {
namespace {

// Loss, gradients and buffers of a new model after one pass over a batch, in double.
struct Step {
  StepLoss loss;
  std::vector<at::Tensor> gradients, buffers;
};

Step step_of(const Config& config, const Batch& batch, std::int64_t micro_batch) {
  torch_api::Model model = make_model(config, *make_task(config));
  model->to(at::kDouble);
  Step step;
  step.loss = add_gradients(model, batch,
                            {.micro_batch = micro_batch, .seed = 1, .update_centroids = true});
  for (const at::Tensor& parameter : model->parameters())
    step.gradients.push_back(parameter.grad());
  step.buffers = model->buffers();
  return step;
}

double largest(const std::vector<at::Tensor>& tensors) {
  double value = 0;
  for (const at::Tensor& tensor : tensors) {
    value = std::max(value, tensor.abs().max().item<double>());
  }
  return value;
}

// The same terms are summed in another order. An element is the sum of fewer than 1e4 terms (rows,
// positions), each the result of about a hundred operations. The tolerance is 1e4 units in the last
// place of the largest element: 1e-12 of it.
void expect_near(const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& wanted) {
  const double tolerance = 1e-12 * largest(wanted);
  ASSERT_EQ(got.size(), wanted.size());
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    EXPECT_LE((got[i] - wanted[i]).abs().max().item<double>(), tolerance) << i;
  }
}

// Rows with different lengths and numbers of target positions.
Batch uneven_batch(const Config& config) {
  Batch batch = make_task(config)->batch(Split::train, 0, 8);
  batch.targets[0].fill_(kIgnore);
  batch.targets[1].slice(0, 5).fill_(kIgnore);
  batch.lengths = ::torch::tensor({34L, 7L, 20L, 34L, 1L, 33L, 12L, 34L});
  return batch;
}

TEST(Gradients, DoNotDependOnTheSplitIntoMicroBatches) {
  struct Form {
    std::string attention;
    bool causal = false;
  };
  const std::vector<Form> forms = {
      {"full"},
      {"lsh(chunk=8,buckets=4)"},
      {"cast(clusters=3,size=8)"},
      {"routing(clusters=3,window=8,decay=0.5)"},
      {"routing(clusters=3,window=8,decay=0.5,share_qk=true)"},
      {"routing(clusters=3,decay=0.5,membership=balanced)"},
      {"routing(clusters=3,window=8,decay=0.5,commitment=0.3)", true},
      {"routing(clusters=3,window=8,decay=0.5,share_qk=true,commitment=0.3)", true},
      {"routing(clusters=3,window=8,decay=0.5,causal=paper)", true},
      {"1*local(window=8)+1*routing(clusters=3,window=8,decay=0.5,share_qk=true)", true}};
  for (const auto& [attention, causal] : forms) {
    Config config = tiny_config("recall");
    config.attention = attention;
    config.recall.causal = causal;
    config.model.positions = "sinusoidal";  // equal tokens would tie, and rounding would decide
    const Batch batch = uneven_batch(config);
    torch_api::Model fresh = make_model(config, *make_task(config));
    fresh->to(at::kDouble);
    const Step whole = step_of(config, batch, 0);
    for (std::size_t i = 0; i < whole.buffers.size(); ++i) {
      EXPECT_FALSE(at::equal(whole.buffers[i], fresh->buffers()[i])) << attention;
    }
    for (const std::int64_t rows : {1, 3, 8, 100}) {
      SCOPED_TRACE(attention + ", " + std::to_string(rows) + " rows at once");
      const Step parts = step_of(config, batch, rows);
      EXPECT_NEAR(parts.loss.loss.item<double>(), whole.loss.loss.item<double>(),
                  1e-12 * whole.loss.loss.item<double>());
      EXPECT_NEAR(parts.loss.commitment.item<double>(), whole.loss.commitment.item<double>(),
                  1e-12 * whole.loss.commitment.item<double>());
      expect_near(parts.gradients, whole.gradients);
      if (!whole.buffers.empty()) expect_near(parts.buffers, whole.buffers);
    }
  }
}

TEST(Gradients, LossIsTheMeanOverAskedPositions) {
  const Config config = tiny_config("copy");
  const auto task = make_task(config);
  torch_api::Model model = make_model(config, *task);
  const Batch batch = task->batch(Split::train, 0, 8);
  const Score score = score_of(model->forward(batch.tokens).out.detach(), batch);
  EXPECT_GT(score.count, 0);
  EXPECT_NEAR(add_gradients(model, batch, {}).loss.item<double>(), score.loss(),
              1e-5 * score.loss());
}

TEST(Gradients, ABatchThatAsksNothingHasLossZero) {
  const Config config = tiny_config("copy");
  const auto task = make_task(config);
  torch_api::Model model = make_model(config, *task);
  Batch batch = task->batch(Split::train, 0, 2);
  batch.targets.fill_(kIgnore);
  EXPECT_EQ(add_gradients(model, batch, {}).loss.item<double>(), 0.0);
}

TEST(Truncation, CutsTokensTargetsAndLengths) {
  Batch batch;
  batch.tokens = ::torch::arange(20).view({2, 10});
  batch.targets = batch.tokens + 1;
  batch.lengths = ::torch::tensor({10, 3});
  const Batch cut = truncated(batch, 4);
  EXPECT_EQ(cut.tokens.size(1), 4);
  EXPECT_EQ(cut.targets.size(1), 4);
  EXPECT_TRUE(at::equal(cut.lengths, ::torch::tensor({4, 3})));
  EXPECT_FALSE(cut.strata.defined());
  EXPECT_EQ(truncated(batch, 10).tokens.size(1), 10);
}

TEST(Truncation, HappensAsOftenAsAskedAndIsAPureFunctionOfTheStep) {
  Config config;
  config.length = 80;
  std::set<std::int64_t> lengths;
  int cut = 0;
  for (std::int64_t step = 1; step <= 1000; ++step) {
    config.train.truncate = 0.0;
    EXPECT_EQ(step_length(config, step), 80);
    config.train.truncate = 1.0;
    const std::int64_t length = step_length(config, step);
    EXPECT_EQ(length, step_length(config, step));
    EXPECT_GE(length, 10);
    EXPECT_LE(length, 80);
    lengths.insert(length);
    config.train.truncate = 0.25;
    cut += step_length(config, step) < 80 ? 1 : 0;
  }
  EXPECT_EQ(lengths.size(), 71u);  // each of 1000 draws misses a length with probability 70/71
  EXPECT_NEAR(cut, 250, 4 * std::sqrt(1000 * 0.25 * 0.75) + 4);
}

TEST(Gradients, SeedsOfStepsDiffer) {
  EXPECT_NE(step_seed(1, 1), step_seed(1, 2));
  EXPECT_NE(step_seed(1, 1), step_seed(2, 1));
  EXPECT_EQ(step_seed(1, 1), step_seed(1, 1));
}

// Three classes and two rows; only the second row has strata.
TEST(Evaluate, ScoresAreSumsOverAskedPositions) {
  const at::Tensor logits =
      ::torch::tensor({{{2.0, 0.0, 0.0}, {0.0, 3.0, 0.0}}, {{0.0, 0.0, 1.0}, {1.0, 0.0, 0.0}}});
  Batch batch;
  batch.targets = ::torch::tensor({0L, 0L, 2L, kIgnore}).view({2, 2});
  batch.strata = ::torch::tensor({0L, 1L, 1L, 1L}).view({2, 2});
  std::vector<Score> strata(3);
  const Score score = score_of(logits, batch, &strata);
  const auto nats = [](double right, double a, double b) {
    return std::log(std::exp(right) + std::exp(a) + std::exp(b)) - right;
  };
  EXPECT_EQ(score.count, 3);
  EXPECT_EQ(score.correct, 2);
  EXPECT_NEAR(score.nats, nats(2, 0, 0) + nats(0, 3, 0) + nats(1, 0, 0), 1e-6);
  EXPECT_EQ(strata[0].count, 1);
  EXPECT_NEAR(strata[0].nats, nats(2, 0, 0), 1e-6);
  EXPECT_EQ(strata[1].count, 2);
  EXPECT_EQ(strata[1].correct, 1);
  EXPECT_EQ(strata[2].count, 0);
}

TEST(Evaluate, IsWithoutDropoutAndLeavesTheModelTraining) {
  Config config = tiny_config("recall");
  config.model.dropout = 0.5;
  const auto task = make_task(config);
  torch_api::Model model = make_model(config, *task);
  model->train();
  const Evaluation first = evaluate(model, *task, {.rows = 8, .batches = 2});
  const Evaluation second = evaluate(model, *task, {.rows = 8, .batches = 2});
  EXPECT_EQ(first.score.nats, second.score.nats);
  EXPECT_TRUE(model->is_training());
  EXPECT_TRUE(at::GradMode::is_enabled());
  std::int64_t count = 0;
  for (const auto& [name, score] : first.strata) count += score.count;
  EXPECT_TRUE(first.strata.empty() || count == first.score.count);
}

}  // namespace
}  // namespace coterie::train
