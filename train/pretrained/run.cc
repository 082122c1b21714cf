// SPDX-License-Identifier: MIT
#include "train/pretrained/run.h"

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/eye.h>
#include <ATen/ops/linalg_solve.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>

#include <algorithm>
#include <chrono>
#include <numeric>

#include "coterie/error.h"
#include "coterie/random.h"

namespace coterie::train {
namespace {

using Clock = std::chrono::steady_clock;

c10::Device device_of(const PretrainedEncoder& encoder) {
  return encoder.model->parameters().front().device();
}

// Waits until the device has finished.
void finish(const at::Tensor& tensor) {
  if (tensor.is_cuda()) tensor.flatten()[0].item<float>();
}

// Texts in batches of similar length.
std::vector<std::vector<std::size_t>> batches_of(const std::vector<EncodedText>& texts,
                                                 std::int64_t tokens) {
  std::vector<std::size_t> order(texts.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return texts[a].tokens.size() < texts[b].tokens.size();
  });
  std::vector<std::vector<std::size_t>> batches;
  for (const std::size_t text : order) {
    const std::size_t length = texts[text].tokens.size();
    const bool fits = !batches.empty() &&
                      (batches.back().size() + 1) * length <= static_cast<std::size_t>(tokens);
    if (!fits) batches.emplace_back();
    batches.back().push_back(text);
  }
  return batches;
}

EncoderBatch batch_of(const PretrainedEncoder& encoder, const std::vector<EncodedText>& texts,
                      const std::vector<std::size_t>& chosen) {
  std::vector<const EncodedText*> some;
  some.reserve(chosen.size());
  for (const std::size_t text : chosen) some.push_back(&texts[text]);
  return encoder_batch(some, encoder.tokenizer.id("[PAD]"), device_of(encoder));
}

at::Tensor rows_of(PretrainedEncoder& encoder, const EncoderBatch& batch, std::uint64_t seed) {
  torch_api::PassContext context;
  if (batch.padded) context.lengths = batch.lengths;
  context.seed = seed;
  return encoder.model->forward(batch.tokens, batch.types, context).out;
}

std::vector<std::size_t> shuffled(std::size_t count, std::uint64_t seed, std::int64_t epoch) {
  const RandomStream stream{seed, RandomUse::data, static_cast<std::uint32_t>(epoch)};
  std::vector<std::size_t> order(count);
  std::iota(order.begin(), order.end(), std::size_t{0});
  for (std::size_t i = count; i > 1; --i) {
    std::swap(order[i - 1], order[random_below(stream, i, static_cast<std::uint32_t>(i))]);
  }
  return order;
}

}  // namespace

RunTextsFacts run_texts(PretrainedEncoder& encoder, const std::vector<EncodedText>& texts,
                        const RunTextsOptions& options, const TakeRows& take) {
  const at::NoGradGuard no_grad;
  encoder.model->eval();
  RunTextsFacts facts;
  const auto batches = batches_of(texts, options.batch_tokens);
  const auto all = static_cast<std::int64_t>(batches.size());
  for (std::int64_t i = 0; i < all; ++i) {
    if (options.progress) options.progress(i, all);
    const std::vector<std::size_t>& chosen = batches[static_cast<std::size_t>(i)];
    const EncoderBatch batch = batch_of(encoder, texts, chosen);
    const auto start = Clock::now();
    const at::Tensor rows = rows_of(encoder, batch, options.seed);
    finish(rows);
    facts.seconds += std::chrono::duration<double>(Clock::now() - start).count();
    for (const std::size_t text : chosen) {
      facts.tokens += static_cast<std::int64_t>(texts[text].tokens.size());
    }
    take(chosen, rows, batch);
  }
  return facts;
}

at::Tensor embeddings_of(PretrainedEncoder& encoder, const std::vector<EncodedText>& texts,
                         const RunTextsOptions& options, RunTextsFacts* facts) {
  const at::Tensor all = at::empty(
      {static_cast<std::int64_t>(texts.size()), encoder.model->options().dim}, at::kFloat);
  const RunTextsFacts own = run_texts(
      encoder, texts, options,
      [&](const std::vector<std::size_t>& chosen, const at::Tensor& rows,
          const EncoderBatch& batch) {
        const at::Tensor some = pooled(encoder.pooling, rows, batch.lengths).cpu();
        for (std::size_t i = 0; i < chosen.size(); ++i) {
          all[static_cast<std::int64_t>(chosen[i])].copy_(some[static_cast<std::int64_t>(i)]);
        }
      });
  if (facts != nullptr) *facts = own;
  return all;
}

void tune(PretrainedEncoder& encoder, const std::vector<at::Tensor>& head,
          const std::vector<EncodedText>& texts, const TuneOptions& options,
          const BatchLoss& loss) {
  using ::torch::optim::AdamW;
  using ::torch::optim::AdamWOptions;
  using ::torch::optim::OptimizerParamGroup;
  const std::vector<at::Tensor> weights =
      options.encoder ? encoder.model->parameters() : std::vector<at::Tensor>{};
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(head, std::make_unique<AdamWOptions>(options.head_rate));
  if (!weights.empty()) {
    groups.emplace_back(weights, std::make_unique<AdamWOptions>(options.rate));
  }
  AdamW optimizer(groups, AdamWOptions(options.head_rate).weight_decay(0.01));
  std::vector<at::Tensor> all = head;
  all.insert(all.end(), weights.begin(), weights.end());
  encoder.model->train(options.encoder);
  const auto size = static_cast<std::size_t>(options.batch);
  const std::int64_t per_epoch = static_cast<std::int64_t>((texts.size() + size - 1) / size),
                     steps = per_epoch * options.epochs;
  const double warm = std::max(1.0, 0.1 * static_cast<double>(steps));
  at::manual_seed(options.seed);  // dropout
  for (std::int64_t step = 0; step < steps; ++step) {
    if (options.progress) options.progress(step, steps);
    const std::vector<std::size_t> order = shuffled(texts.size(), options.seed, step / per_epoch);
    const std::size_t first = static_cast<std::size_t>(step % per_epoch) * size;
    const std::vector<std::size_t> chosen(
        order.begin() + static_cast<std::ptrdiff_t>(first),
        order.begin() + static_cast<std::ptrdiff_t>(std::min(first + size, order.size())));
    const auto done = static_cast<double>(step);
    const double factor =
        done < warm ? (done + 1) / warm
                    : (static_cast<double>(steps) - done) / (static_cast<double>(steps) - warm + 1);
    const double rates[] = {options.head_rate, options.rate};
    for (std::size_t g = 0; g < optimizer.param_groups().size(); ++g) {
      static_cast<AdamWOptions&>(optimizer.param_groups()[g].options()).lr(factor * rates[g]);
    }
    const EncoderBatch batch = batch_of(encoder, texts, chosen);
    at::Tensor rows;
    {
      const at::AutoGradMode gradients(options.encoder);
      rows = rows_of(encoder, batch, options.seed);
    }
    optimizer.zero_grad();
    loss(chosen, rows.to(at::kFloat), batch).backward();
    ::torch::nn::utils::clip_grad_norm_(all, 1.0);
    optimizer.step();
  }
  encoder.model->eval();
}

void LinearProbe::fit(const at::Tensor& features, const std::vector<double>& labels) {
  const at::Tensor x = features.to(at::kDouble), y = at::tensor(labels, at::kDouble);
  const std::int64_t n = x.size(0), E = x.size(1);
  if (n < 2 || y.sum().item<double>() == 0 || y.sum().item<double>() == static_cast<double>(n)) {
    throw Error("[probe] expected training texts with both labels; got " + std::to_string(n) +
                " texts with one label");
  }
  mean_ = x.mean(0);
  deviation_ = (x - mean_).square().mean(0).sqrt().clamp_min(1e-8);
  const at::Tensor rows = at::cat({(x - mean_) / deviation_, at::ones({n, 1}, at::kDouble)}, 1);
  // Standardised features with a penalty as of a few hundred rows: enough where rows are fewer than
  // features.
  constexpr double kRidge = 10.0;
  at::Tensor penalty = at::eye(E + 1, at::kDouble) * kRidge;
  penalty[E][E] = 1e-6;
  weight_ = at::zeros({E + 1}, at::kDouble);
  constexpr int kSteps = 12;
  for (int step = 0; step < kSteps; ++step) {
    const at::Tensor p = at::sigmoid(rows.matmul(weight_));
    const at::Tensor gradient = rows.t().matmul(p - y) + penalty.matmul(weight_);
    const at::Tensor curvature = rows.t().matmul(rows * (p * (1 - p)).unsqueeze(1)) + penalty;
    weight_ = weight_ - at::linalg_solve(curvature, gradient);
  }
}

at::Tensor LinearProbe::scores(const at::Tensor& features) const {
  const at::Tensor x = (features.to(at::kDouble) - mean_) / deviation_;
  return x.matmul(weight_.narrow(0, 0, x.size(1))) + weight_[x.size(1)];
}

}  // namespace coterie::train
