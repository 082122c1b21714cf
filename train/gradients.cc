// SPDX-License-Identifier: MIT
#include "train/gradients.h"

#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <vector>

#include "coterie/random.h"
#include "train/autocast.h"

namespace coterie::train {
namespace {

// Random streams of this file, distinct from those of the tasks.
constexpr std::uint32_t kClusterings = 1, kTruncations = 2;

Batch rows_of(const Batch& batch, std::int64_t first, std::int64_t count) {
  const auto narrow = [=](const at::Tensor& tensor) {
    return tensor.defined() ? tensor.narrow(0, first, count) : tensor;
  };
  return {narrow(batch.tokens), narrow(batch.targets), narrow(batch.strata), narrow(batch.lengths)};
}

double valid_tokens(const Batch& batch) {
  const auto tokens =
      batch.lengths.defined() ? batch.lengths.sum().item<std::int64_t>() : batch.tokens.numel();
  return static_cast<double>(tokens);
}

// 1 / the number of positions with a target, in the type of losses.
at::Tensor mean_factor(const at::Tensor& targets, at::ScalarType wide) {
  return (targets != kIgnore).sum().clamp_min(1).to(at::kDouble).reciprocal().to(wide);
}

// Sum of the cross entropies over the positions with a target.
at::Tensor total_nats(const at::Tensor& logits, const at::Tensor& targets) {
  const at::ScalarType wide = c10::promoteTypes(logits.scalar_type(), at::kFloat);
  return at::cross_entropy_loss(logits.flatten(0, 1).to(wide), targets.flatten(), {},
                                at::Reduction::Sum, kIgnore);
}

}  // namespace

StepLoss add_gradients(torch_api::LanguageModel& model, const Batch& batch,
                       const GradientOptions& options) {
  const std::int64_t rows = batch.tokens.size(0);
  const std::int64_t pass_rows = options.micro_batch > 0 ? options.micro_batch : rows;
  torch_api::StepStatistics statistics;
  const at::Tensor zero = at::zeros({}, batch.tokens.options().dtype(at::kDouble));
  StepLoss result{zero, zero};
  for (std::int64_t first = 0; first < rows; first += pass_rows) {
    const Batch part = rows_of(batch, first, std::min(pass_rows, rows - first));
    torch_api::PassContext context;
    context.lengths = part.lengths;
    context.seed = options.seed;
    context.before_layer = options.before_layer;
    if (options.update_centroids) context.statistics = &statistics;

    at::Tensor loss;
    torch_api::PassOutput output;
    {
      const AutocastGuard autocast(batch.tokens.device(), options.bf16);
      output = model->forward(part.tokens, context);
    }
    loss = total_nats(output.out, part.targets);
    loss = loss * mean_factor(batch.targets, loss.scalar_type());
    result.loss = result.loss + loss.detach();
    if (output.commitment.requires_grad()) {  // there are routing heads
      // A mean over the valid tokens of the pass.
      const double share = valid_tokens(part) / std::max(valid_tokens(batch), 1.0);
      const at::Tensor commitment = output.commitment * share;
      result.commitment = result.commitment + commitment.detach();
      loss = loss + commitment;
    }
    loss.backward();
  }
  model->transformer()->update_centroids(statistics);
  return result;
}

Batch truncated(const Batch& batch, std::int64_t length) {
  if (length >= batch.tokens.size(1)) return batch;
  const auto cut = [length](const at::Tensor& tensor) {
    return tensor.defined() ? tensor.narrow(1, 0, length) : tensor;
  };
  return {cut(batch.tokens), cut(batch.targets), cut(batch.strata),
          batch.lengths.defined() ? batch.lengths.clamp_max(length) : batch.lengths};
}

std::int64_t step_length(const Config& config, std::int64_t step) {
  const RandomStream stream{config.seed, RandomUse::sample, kTruncations};
  const RandomBits bits = stream.at(static_cast<std::uint64_t>(step));
  if (random_unit(bits.word[0]) >= config.train.truncate) return config.length;
  const std::int64_t shortest = std::max<std::int64_t>(1, config.length / 8);
  const auto span = static_cast<std::uint64_t>(config.length - shortest + 1);
  return shortest + static_cast<std::int64_t>((bits.word[1] * span) >> 32);
}

std::uint64_t step_seed(std::uint64_t seed, std::int64_t step) {
  return random_u64({seed, RandomUse::sample, kClusterings}, static_cast<std::uint64_t>(step));
}

}  // namespace coterie::train
