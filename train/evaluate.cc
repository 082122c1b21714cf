// SPDX-License-Identifier: MIT
#include "train/evaluate.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/argmax.h>
#include <ATen/ops/nll_loss.h>

#include <algorithm>
#include <chrono>

#include "coterie/error.h"
#include "train/autocast.h"
#include "train/eval_mode.h"

namespace coterie::train {
namespace {

// Sums over the positions in the mask `asked` of the flattened batch.
Score sum_where(const at::Tensor& asked, const at::Tensor& nats, const at::Tensor& right) {
  const at::Tensor weight = asked.to(at::kDouble);
  return {.nats = (nats.to(at::kDouble) * weight).sum().item<double>(),
          .count = asked.sum().item<std::int64_t>(),
          .correct = (right & asked).sum().item<std::int64_t>()};
}

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
  const at::Tensor flat = logits.flatten(0, 1).to(at::kFloat);
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

Evaluation evaluate(torch_api::LanguageModel& model, const Task& task,
                    const EvaluateOptions& options) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point start = Clock::now();
  const at::NoGradGuard no_grad;
  const EvalMode eval_mode(model);
  const c10::Device device = model->parameters().front().device();
  const AutocastGuard autocast(device, options.bf16);
  const std::vector<std::string> names = task.strata();
  std::vector<Score> strata(names.size());
  const std::int64_t all = task.batches(options.split, options.rows);
  const std::int64_t batches = options.batches > 0 ? std::min(all, options.batches) : all;
  if (batches < 1) throw Error("[evaluate] expected at least one batch of held-out data; got none");

  Evaluation result;
  if (options.progress) options.progress(0, batches);
  for (std::int64_t index = 0; index < batches; ++index) {
    const Batch batch = to_device(task.batch(options.split, index, options.rows), device);
    torch_api::PassContext context;
    context.lengths = batch.lengths;
    context.seed = options.seed + static_cast<std::uint64_t>(index);
    context.before_layer = options.before_layer;
    add(result.score, score_of(model->forward(batch.tokens, context).out, batch, &strata));
    if (options.progress) options.progress(index + 1, batches);
  }
  for (std::size_t i = 0; i < names.size(); ++i) result.strata[names[i]] = strata[i];
  result.metric = metric_value(task.metric(), result.score);
  result.share = static_cast<double>(batches) / static_cast<double>(all);
  result.seconds = std::chrono::duration<double>(Clock::now() - start).count();
  return result;
}

}  // namespace coterie::train
