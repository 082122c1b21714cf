// SPDX-License-Identifier: MIT
#include "train/evaluate.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/argmax.h>
#include <ATen/ops/nll_loss.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <chrono>

#include "coterie/error.h"
#include "train/autocast.h"
#include "train/eval_mode.h"
#include "train/gradients.h"
#include "train/transcripts.h"

namespace coterie::train {
namespace {

// Sums over the positions in the mask `asked` of the flattened batch.
Score sum_where(const at::Tensor& asked, const at::Tensor& nats, const at::Tensor& right) {
  const at::Tensor weight = asked.to(at::kDouble);
  return {.nats = (nats.to(at::kDouble) * weight).sum().item<double>(),
          .count = asked.sum().item<std::int64_t>(),
          .correct = (right & asked).sum().item<std::int64_t>()};
}

// Scores of all batches and strata, three numbers each. Ranks fill in those of their batches.
class ScoreTable {
 public:
  ScoreTable(std::int64_t batches, std::size_t strata)
      : numbers_(at::zeros({batches, 1 + static_cast<std::int64_t>(strata), 3}, at::kDouble)) {}

  void set(std::int64_t batch, std::size_t place, const Score& score) {
    const at::Tensor row = numbers_[batch][static_cast<std::int64_t>(place)];
    row[0] = score.nats;
    row[1] = score.count;
    row[2] = score.correct;
  }
  // In the order of the batches, so that the sums do not depend on the number of ranks.
  Score total(std::size_t place) const {
    Score sum;
    for (std::int64_t batch = 0; batch < numbers_.size(0); ++batch) {
      const at::Tensor row = numbers_[batch][static_cast<std::int64_t>(place)];
      sum.nats += row[0].item<double>();
      sum.count += static_cast<std::int64_t>(row[1].item<double>());
      sum.correct += static_cast<std::int64_t>(row[2].item<double>());
    }
    return sum;
  }
  const at::Tensor& numbers() const { return numbers_; }

 private:
  at::Tensor numbers_;
};

void add(Score& sum, const Score& part) {
  sum.nats += part.nats;
  sum.count += part.count;
  sum.correct += part.correct;
}

}  // namespace

Batch to_device(const Batch& batch, c10::Device device) {
  // From pinned memory, so that the host does not wait for earlier work on the device.
  const auto move = [device](const at::Tensor& tensor) {
    if (!tensor.defined() || device.is_cpu()) return tensor;
    return tensor.pin_memory().to(device, /*non_blocking=*/true);
  };
  return {move(batch.tokens), move(batch.targets), move(batch.strata), move(batch.lengths)};
}

Score score_of(const at::Tensor& logits, const Batch& batch, std::vector<Score>* strata) {
  const at::Tensor flat = logits.flatten(0, -2).to(at::kFloat);
  const at::Tensor targets = batch.targets.flatten();
  const at::Tensor nats =
      at::nll_loss(flat.log_softmax(-1), targets, {}, at::Reduction::None, kIgnore);
  const at::Tensor right = flat.argmax(-1) == targets, asked = targets != kIgnore;
  if (strata != nullptr && batch.strata.defined()) {
    const at::Tensor stratum = batch.strata.flatten();
    for (std::size_t i = 0; i < strata->size(); ++i) {
      const at::Tensor inside = asked & (stratum == static_cast<std::int64_t>(i));
      add((*strata)[i], sum_where(inside, nats, right));
    }
  }
  return sum_where(asked, nats, right);
}

Evaluation evaluate(const torch_api::Model& model, const Task& task,
                    const EvaluateOptions& options) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point start = Clock::now();
  const at::NoGradGuard no_grad;
  const EvalMode eval_mode(model);
  const c10::Device device = model->parameters().front().device();
  const AutocastGuard autocast(device, options.bf16);
  const std::vector<std::string> names = task.strata();
  const Answers answers = task.answers();
  const auto* const transcript = std::get_if<TranscriptAnswer>(&answers);
  const std::int64_t all = task.batches(options.split, options.rows);
  const std::int64_t batches = options.batches > 0 ? std::min(all, options.batches) : all;
  if (batches < 1) throw Error("[evaluate] expected at least one batch of held-out data; got none");

  Evaluation result;
  ScoreTable table(batches, names.size());
  const std::int64_t own = options.ranks == nullptr ? 0 : options.ranks->data_rank();
  const std::int64_t parts = options.ranks == nullptr ? 1 : options.ranks->data_size();
  const torch_api::SequenceRanks* const sequence =
      options.ranks == nullptr ? nullptr : options.ranks->sequence();
  if (options.progress) options.progress(0, batches);
  for (std::int64_t index = own; index < batches; index += parts) {
    const Batch batch = to_device(task.batch(options.split, index, options.rows), device);
    torch_api::PassContext context;
    context.lengths = batch.lengths;
    context.seed = options.seed + static_cast<std::uint64_t>(index);
    context.before_layer = options.before_layer;
    context.ranks = sequence;
    std::vector<Score> strata(names.size());
    const at::Tensor logits = model->forward(batch.tokens, context).out;
    const Batch own_batch = own_positions(batch, sequence);
    table.set(index, 0,
              transcript == nullptr
                  ? score_of(logits, own_batch, &strata)
                  : score_transcripts(*model, *transcript, logits, own_batch, strata));
    for (std::size_t i = 0; i < names.size(); ++i) table.set(index, 1 + i, strata[i]);
    if (options.progress) options.progress(index + 1, batches);
  }
  if (options.ranks != nullptr) options.ranks->sum(table.numbers(), "evaluation");
  result.score = table.total(0);
  for (std::size_t i = 0; i < names.size(); ++i) result.strata[names[i]] = table.total(1 + i);
  result.metric = metric_value(task.metric(), result.score);
  result.share = static_cast<double>(batches) / static_cast<double>(all);
  result.seconds = std::chrono::duration<double>(Clock::now() - start).count();
  return result;
}

}  // namespace coterie::train
