// SPDX-License-Identifier: MIT
#include "train/gradients.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <vector>

#include "coterie/layer.h"
#include "coterie/random.h"
#include "train/autocast.h"

namespace coterie::train {
namespace {

static_assert(kIgnore == torch_api::kNoTarget);

// Random streams of this file, distinct from those of the tasks.
constexpr std::uint32_t kClusterings = 1, kTruncations = 2;

at::Tensor valid_tokens(const Batch& batch) {
  return batch.lengths.defined() ? batch.lengths.sum().to(at::kDouble)
                                 : at::full({}, batch.tokens.size(0) * batch.tokens.size(1),
                                            batch.tokens.options().dtype(at::kDouble));
}

// What the losses of a step are divided by: positions with a target and valid tokens, in double, at
// least 1.
struct Totals {
  at::Tensor targets, tokens;

  Totals(const Batch& batch, Ranks* ranks) {
    at::Tensor counts =
        at::stack({(batch.targets != kIgnore).sum().to(at::kDouble), valid_tokens(batch)});
    if (ranks != nullptr) ranks->sum(counts, "counts");
    // Ranks that share sequences have all counted them.
    if (ranks != nullptr) counts = counts / static_cast<double>(ranks->context_size());
    counts = counts.clamp_min(1);
    targets = counts[0];
    tokens = counts[1];
  }
};

// Sums the losses and the statistics of centroids of all ranks, in one collective.
void sum_over_ranks(StepLoss& loss, torch_api::StepStatistics& statistics, Ranks& ranks) {
  std::vector<at::Tensor> all = {loss.loss.reshape(1), loss.commitment.reshape(1)};
  std::vector<at::Tensor> targets;
  for (auto& [place, group] : statistics) {
    for (const torch_api::CentroidStatistics& own : {group.queries, group.keys}) {
      if (!own.members.defined()) continue;
      targets.insert(targets.end(), {own.members, own.sums});
    }
  }
  for (const at::Tensor& target : targets) all.push_back(target.reshape(-1));
  const at::Tensor flat = at::cat(all);
  ranks.sum(flat, "losses and centroids");
  loss = {flat[0], flat[1]};
  std::int64_t at = 2;
  for (const at::Tensor& target : targets) {
    target.copy_(flat.narrow(0, at, target.numel()).view_as(target));
    at += target.numel();
  }
}

}  // namespace

StepLoss add_gradients(const torch_api::Model& model, const Batch& batch,
                       const GradientOptions& options) {
  const std::int64_t rows = batch.tokens.size(0);
  const std::int64_t pass_rows = options.micro_batch > 0 ? options.micro_batch : rows;
  torch_api::StepStatistics statistics;
  const at::Tensor zero = at::zeros({}, batch.tokens.options().dtype(at::kDouble));
  StepLoss result{zero, zero};
  const Totals totals(batch, options.ranks);
  const torch_api::SequenceRanks* const sequence =
      options.ranks == nullptr ? nullptr : options.ranks->sequence();
  for (std::int64_t first = 0; first < rows; first += pass_rows) {
    const Batch part = rows_of(batch, first, std::min(pass_rows, rows - first));
    torch_api::PassContext context;
    context.lengths = part.lengths;
    context.seed = context.dropout_seed = options.seed;
    context.first_row = options.first_row + first;
    context.before_layer = options.before_layer;
    context.ranks = sequence;
    if (options.update_centroids) context.statistics = &statistics;

    at::Tensor loss;
    torch_api::PassOutput output;
    {
      const AutocastGuard autocast(batch.tokens.device(), options.bf16);
      output = model->forward(part.tokens, context);
    }
    loss = model->nats(output.out, own_positions(part, sequence).targets, part.lengths);
    loss = loss * totals.targets.reciprocal().to(loss.scalar_type());
    result.loss = result.loss + loss.detach();
    if (output.commitment.requires_grad()) {  // there are routing heads
      // A mean over the valid tokens of the pass.
      const at::Tensor share = valid_tokens(part) / totals.tokens;
      const at::Tensor commitment = output.commitment * share.to(output.commitment.scalar_type());
      result.commitment = result.commitment + commitment.detach();
      loss = loss + commitment;
    }
    const bool last = first + pass_rows >= rows;
    if (last && options.sums != nullptr) options.sums->before_last_backward();
    loss.backward();
  }
  if (options.ranks != nullptr) sum_over_ranks(result, statistics, *options.ranks);
  model->transformer()->update_centroids(statistics);
  return result;
}

Batch rows_of(const Batch& batch, std::int64_t first, std::int64_t count) {
  const auto narrow = [=](const at::Tensor& tensor) {
    return tensor.defined() ? tensor.narrow(0, first, count) : tensor;
  };
  return {narrow(batch.tokens), narrow(batch.targets), narrow(batch.strata), narrow(batch.lengths)};
}

Batch own_positions(const Batch& batch, const torch_api::SequenceRanks* ranks) {
  if (ranks == nullptr) return batch;
  const torch_api::SequenceSlice own =
      torch_api::sequence_slice(batch.tokens.size(1), ranks->rank, ranks->size);
  const auto narrow = [own](const at::Tensor& tensor) {
    return tensor.defined() ? tensor.narrow(1, own.first, own.count) : tensor;
  };
  return {narrow(batch.tokens), narrow(batch.targets), narrow(batch.strata), batch.lengths};
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
