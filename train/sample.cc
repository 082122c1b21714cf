// SPDX-License-Identifier: MIT
#include "train/sample.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>

#include "coterie/error.h"
#include "coterie/random.h"
#include "train/eval_mode.h"

namespace coterie::train {
namespace {

void check(const SampleOptions& options) {
  if (options.tokens < 0 || options.top_k < 0) {
    throw Error("[sample] expected tokens and top_k of at least 0; got " +
                std::to_string(options.tokens) + " and " + std::to_string(options.top_k));
  }
  if (!(options.temperature >= 0.0) || !std::isfinite(options.temperature)) {
    throw Error("[sample] expected a temperature of at least 0; got " +
                std::to_string(options.temperature));
  }
  if (!(options.top_p > 0.0 && options.top_p <= 1.0)) {
    throw Error("[sample] expected top_p above 0 and at most 1; got " +
                std::to_string(options.top_p));
  }
}

struct Candidate {
  std::int64_t token;
  double weight;  // not normalised
};

// The tokens that may be chosen, most likely first; ties by lower token.
std::vector<Candidate> candidates(const at::Tensor& values, const SampleOptions& options) {
  const double* const logit = values.const_data_ptr<double>();
  std::vector<std::int64_t> order(static_cast<std::size_t>(values.numel()));
  std::iota(order.begin(), order.end(), 0);
  const std::size_t kept = options.top_k == 0
                               ? order.size()
                               : std::min(order.size(), static_cast<std::size_t>(options.top_k));
  std::partial_sort(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(kept), order.end(),
                    [&](std::int64_t a, std::int64_t b) {
                      return logit[a] != logit[b] ? logit[a] > logit[b] : a < b;
                    });
  order.resize(kept);
  std::vector<Candidate> result;
  for (const std::int64_t token : order) {
    result.push_back({token, std::exp((logit[token] - logit[order[0]]) / options.temperature)});
  }
  return result;
}

// Keeps the shortest prefix that has at least the fraction `top_p` of the weight.
void keep_nucleus(std::vector<Candidate>& kept, double top_p) {
  double total = 0;
  for (const Candidate& candidate : kept) total += candidate.weight;
  double sum = 0;
  for (std::size_t i = 0; i < kept.size(); ++i) {
    sum += kept[i].weight;
    if (sum >= top_p * total) {
      kept.resize(i + 1);
      return;
    }
  }
}

}  // namespace

std::int64_t choose(const at::Tensor& logits, const SampleOptions& options, std::uint64_t index) {
  const at::Tensor values = logits.to(at::kCPU, at::kDouble).contiguous();  // waits for a GPU once
  const double *first = values.const_data_ptr<double>(), *last = first + values.numel();
  if (!std::all_of(first, last, [](double value) { return std::isfinite(value); })) {
    throw Error("[sample] expected finite logits; got NaN or infinity: the model is damaged");
  }
  if (options.temperature == 0.0) return std::max_element(first, last) - first;
  std::vector<Candidate> kept = candidates(values, options);
  keep_nucleus(kept, options.top_p);
  double total = 0;
  for (const Candidate& candidate : kept) total += candidate.weight;
  const RandomStream stream{
      .seed = options.seed, .use = RandomUse::sample, .problem = options.number};
  // 53 random bits: a uniform double in [0, 1).
  const double point = static_cast<double>(random_u64(stream, index) >> 11) * 0x1p-53 * total;
  double sum = 0;
  for (const Candidate& candidate : kept) {
    sum += candidate.weight;
    if (point < sum) return candidate.token;
  }
  return kept.back().token;
}

ReadPrompt read_prompt(torch_api::LanguageModel& model, const std::vector<std::int64_t>& prompt,
                       const std::function<void(std::int64_t)>& progress) {
  if (prompt.empty()) throw Error("[sample] expected a prompt of at least one token; got none");
  const at::NoGradGuard no_grad;
  const EvalMode eval_mode(model.ptr());
  const at::Device device = model->parameters().front().device();
  const at::Tensor tokens = at::tensor(prompt, at::kLong).unsqueeze(0);
  ReadPrompt read{model->make_cache(1), {}};
  for (std::int64_t first = 0; first < tokens.size(1); first += kPrefillChunk) {
    const std::int64_t end = std::min(first + kPrefillChunk, tokens.size(1));
    read.logits = model->prefill(tokens.slice(1, first, end).to(device), read.cache)[0];
    if (progress) progress(end);
  }
  return read;
}

void sample(torch_api::LanguageModel& model, const ReadPrompt& prompt, const SampleOptions& options,
            const std::function<bool(std::int64_t)>& emit) {
  check(options);
  const at::NoGradGuard no_grad;
  const EvalMode eval_mode(model.ptr());
  torch_api::DecoderCache cache = prompt.cache;
  at::Tensor logits = prompt.logits;
  for (std::int64_t i = 0; i < options.tokens; ++i) {
    const std::int64_t token = choose(logits, options, static_cast<std::uint64_t>(i));
    if (!emit(token) || i + 1 == options.tokens) return;
    logits = model->step(at::full({1}, token, logits.options().dtype(at::kLong)), cache)[0];
  }
}

Picture sample_image(const std::shared_ptr<torch_api::ImageModelImpl>& model,
                     const SampleOptions& options) {
  check(options);
  const at::NoGradGuard no_grad;
  const EvalMode eval_mode(model);
  const torch_api::ImageModelOptions& shape = model->options();
  Picture picture{shape.height, shape.width, shape.channels, ""};
  const std::int64_t values = shape.height * shape.width * shape.channels;
  torch_api::DecoderCache cache = model->make_cache(1);
  const at::TensorOptions numbers = model->parameters().front().options().dtype(at::kLong);
  at::Tensor logits = model->prefill(at::empty({1, 0}, numbers), cache);
  for (std::int64_t i = 0; i < values; ++i) {
    const std::int64_t value = choose(logits[0], options, static_cast<std::uint64_t>(i));
    picture.values.push_back(static_cast<char>(value));
    if (i + 1 < values) logits = model->prefill(at::full({1, 1}, value, numbers), cache);
  }
  return picture;
}

}  // namespace coterie::train
