// SPDX-License-Identifier: MIT
#include "train/pretrained/approximate.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <chrono>
#include <cmath>

#include "coterie/error.h"
#include "coterie/layer.h"
#include "train/memory.h"

namespace coterie::train {
namespace {

using Clock = std::chrono::steady_clock;
using torch_api::AttentionRecord;

template <class... Ts>
struct CoverCases : Ts... {
  using Ts::operator()...;
};

bool near_covers(std::int64_t near, std::int64_t length) {
  return near > 0 && (length + near - 1) / near <= 2;  // a block and those beside it
}

c10::Device encoder_device(const PretrainedEncoder& encoder) {
  return encoder.model->parameters().front().device();
}

torch_api::PassContext pass_context(const EncoderBatch& batch, std::uint64_t seed) {
  torch_api::PassContext context;
  if (batch.padded) context.lengths = batch.lengths;
  context.seed = seed;
  return context;
}

constexpr double kLongPass = 10.0;  // seconds; measured once, because warming up is short beside it

// Median seconds of `pass`, which waits for the device.
double median_seconds(double seconds, const std::function<void()>& pass) {
  const at::NoGradGuard no_grad;
  const auto timed = [&] {
    const auto start = Clock::now();
    pass();
    return std::chrono::duration<double>(Clock::now() - start).count();
  };
  if (const double first = timed(); first > kLongPass) return first;
  std::vector<double> times;
  double sum = 0;
  while (times.size() < 2 || (sum < seconds && times.size() < 50)) {
    times.push_back(timed());
    sum += times.back();
  }
  std::sort(times.begin(), times.end());
  return 0.5 * (times[(times.size() - 1) / 2] + times[times.size() / 2]);
}

void wait_for(const at::Tensor& tensor) { tensor.flatten()[0].item<float>(); }

// Cosines (n) and the relative error of embeddings (n, E).
struct Agreement {
  double mean = 1, least = 1, error = 0;
};
Agreement agreement(const at::Tensor& found, const at::Tensor& full) {
  const at::Tensor a = found.to(at::kDouble), b = full.to(at::kDouble);
  const at::Tensor cosine =
      (a * b).sum(1) / (a.norm(2, {1}, false) * b.norm(2, {1}, false)).clamp_min(1e-30);
  return {cosine.mean().item<double>(), cosine.min().item<double>(),
          (a - b).norm().item<double>() / std::max(b.norm().item<double>(), 1e-30)};
}

// Of one attention: embeddings (inputs, E), and what the task took.
at::Tensor take_inputs(PretrainedEncoder& encoder, EncoderTask& task,
                       const RunTextsOptions& options, RunTextsFacts& facts) {
  const auto count = static_cast<std::int64_t>(task.inputs().size());
  const at::Tensor all = at::empty({count, encoder.model->options().dim}, at::kFloat);
  facts = run_texts(
      encoder, task.inputs(), options,
      [&](const std::vector<std::size_t>& chosen, const at::Tensor& rows,
          const EncoderBatch& batch) {
        const at::Tensor some = pooled(encoder.pooling, rows, batch.lengths).cpu();
        task.take(chosen, rows, batch, some);
        for (std::size_t i = 0; i < chosen.size(); ++i) {
          all[static_cast<std::int64_t>(chosen[i])].copy_(some[static_cast<std::int64_t>(i)]);
        }
      });
  return all;
}

double exact_share(const std::vector<EncodedText>& inputs, const NamedAttention& attention) {
  std::size_t exact = 0;
  for (const EncodedText& input : inputs) {
    const auto length = static_cast<std::int64_t>(input.tokens.size());
    exact += std::all_of(attention.specs.begin(), attention.specs.end(), [&](const auto& spec) {
      return std::all_of(spec.groups.begin(), spec.groups.end(),
                         [&](const HeadGroup& group) { return covers(group.mechanism, length); });
    });
  }
  return static_cast<double>(exact) / static_cast<double>(std::max<std::size_t>(inputs.size(), 1));
}

// The length where the curves of time cross, between two lengths that were measured.
std::optional<double> crossover_of(const std::vector<SpeedPoint>& full,
                                   const std::vector<SpeedPoint>& other) {
  for (std::size_t i = 0; i < full.size() && i < other.size(); ++i) {
    const double ratio = other[i].tokens_per_s / full[i].tokens_per_s;
    if (ratio < 1) continue;
    if (i == 0) return static_cast<double>(full[0].length);
    const double before = other[i - 1].tokens_per_s / full[i - 1].tokens_per_s;
    const double share = -std::log(before) / (std::log(ratio) - std::log(before));
    const double low = std::log(static_cast<double>(full[i - 1].length)),
                 high = std::log(static_cast<double>(full[i].length));
    return std::exp(low + share * (high - low));
  }
  return std::nullopt;
}

std::vector<EncodedText> some_inputs(const std::vector<EncodedText>& inputs, std::int64_t count) {
  std::vector<EncodedText> some;
  const std::size_t step = std::max<std::size_t>(
      inputs.size() / static_cast<std::size_t>(std::max<std::int64_t>(count, 1)), 1);
  for (std::size_t i = 0; i < inputs.size() && some.size() < static_cast<std::size_t>(count);
       i += step) {
    some.push_back(inputs[i]);
  }
  return some;
}

EncoderBatch batch_of_inputs(const PretrainedEncoder& encoder,
                             const std::vector<EncodedText>& inputs) {
  std::vector<const EncodedText*> pointers;
  pointers.reserve(inputs.size());
  for (const EncodedText& input : inputs) pointers.push_back(&input);
  return encoder_batch(pointers, encoder.tokenizer.id("[PAD]"), encoder_device(encoder));
}

// Scores of one attention by bootstrap, and their differences from those of full attention over
// the same samples.
std::vector<ScoreResult> score_results(const EncoderTask& task, const ApproximateOptions& options,
                                       std::vector<std::vector<double>>& full_draws, bool is_full) {
  const std::vector<std::string> names = task.score_names();
  std::vector<ScoreResult> results;
  if (names.empty()) return results;
  std::vector<std::vector<double>> draws;  // of this attention
  const std::vector<Interval> values = bootstrap(
      [&](const std::vector<std::size_t>& units) {
        draws.push_back(task.scores(units));
        return draws.back();
      },
      task.units(), options.draws, options.run.seed);
  if (is_full) full_draws = draws;
  std::size_t draw = 0;
  const std::vector<Interval> differences = bootstrap(
      [&](const std::vector<std::size_t>& /*units*/) {
        std::vector<double> difference = draws[draw];
        for (std::size_t s = 0; s < difference.size(); ++s) difference[s] -= full_draws[draw][s];
        ++draw;
        return difference;
      },
      task.units(), options.draws, options.run.seed);
  for (std::size_t s = 0; s < names.size(); ++s) {
    results.push_back({names[s], values[s], differences[s]});
  }
  return results;
}

}  // namespace

bool covers(const Mechanism& mechanism, std::int64_t length) {
  const CoverCases cases{[&](const FullParams&) { return true; },
                         [&](const LocalParams& local) {
                           if (local.kind == LocalKind::sliding)
                             return (local.window + 1) / 2 >= length;
                           return (length + local.window - 1) / local.window <= local.flange + 1;
                         },
                         [&](const StridedParams& strided) { return strided.stride == 1; },
                         [&](const OracleTopParams& top) { return top.topk >= length; },
                         [&](const ClusteredParams& clustered) {
                           return clustered.clustering.clusters >= length ||
                                  near_covers(clustered.near, length);
                         },
                         [&](const ImprovedClusteredParams& improved) {
                           return improved.clustering.clusters >= length ||
                                  improved.topk >= length || near_covers(improved.near, length);
                         },
                         [&](const auto&) { return false; }};
  return std::visit(cases, mechanism);
}

std::vector<HeadErrors> head_errors(PretrainedEncoder& encoder, const EncoderBatch& batch,
                                    const std::vector<NamedAttention>& attentions,
                                    std::uint64_t seed) {
  const at::NoGradGuard no_grad;
  const std::int64_t H = encoder.model->options().heads;
  const std::vector<AttentionSpec> before = encoder.model->attention_specs();
  encoder.model->set_attention({AttentionSpec::parse("full")});
  std::vector<AttentionRecord> records;
  torch_api::PassContext context = pass_context(batch, seed);
  context.records = &records;
  encoder.model->forward(batch.tokens, batch.types, context);
  encoder.model->set_attention(before);
  const at::Tensor places = at::arange(batch.tokens.size(1), batch.lengths.options());
  const at::Tensor valid =
      (places < batch.lengths.unsqueeze(1)).unsqueeze(1).unsqueeze(3).to(at::kFloat);
  std::vector<HeadErrors> errors(attentions.size());
  for (const AttentionRecord& record : records) {
    const auto layer = static_cast<std::size_t>(record.layer);
    const at::Tensor full =
        torch_api::attention(record.q, record.k, record.v, record.mechanism, record.options)
            .to(at::kFloat) *
        valid;
    for (std::size_t which = 0; which < attentions.size(); ++which) {
      const std::vector<AttentionSpec>& specs = attentions[which].specs;
      const AttentionSpec& spec = specs.size() == 1 ? specs[0] : specs.at(layer);
      std::vector<double>& own = errors[which].emplace_back();
      const std::vector<HeadSlice> slices = head_slices(spec, H, H);
      for (std::size_t g = 0; g < slices.size(); ++g) {
        const std::int64_t first = slices[g].first, count = slices[g].count;
        torch_api::AttentionOptions options = record.options;
        options.seed = group_seed(seed, record.layer, static_cast<std::int64_t>(g));
        const at::Tensor out =
            torch_api::attention(record.q.narrow(1, first, count), record.k.narrow(1, first, count),
                                 record.v.narrow(1, first, count), spec.groups[g].mechanism,
                                 options)
                .to(at::kFloat) *
            valid;
        for (std::int64_t h = 0; h < count; ++h) {
          const at::Tensor wanted = full.select(1, first + h);
          own.push_back((out.select(1, h) - wanted).norm().item<double>() /
                        std::max(wanted.norm().item<double>(), 1e-30));
        }
      }
    }
  }
  return errors;
}

double encoder_speed(PretrainedEncoder& encoder, const EncoderBatch& batch, double seconds,
                     std::uint64_t seed) {
  const torch_api::PassContext context = pass_context(batch, seed);
  const double median = median_seconds(
      seconds, [&] { wait_for(encoder.model->forward(batch.tokens, batch.types, context).out); });
  return static_cast<double>(batch.tokens.numel()) / median;
}

double torch_speed(PretrainedEncoder& encoder, const EncoderBatch& batch, double seconds) {
  const std::int64_t H = encoder.model->options().heads;
  const auto attend = [&](std::int64_t layer, const at::Tensor& x) {
    const auto weights = encoder.model->attention(layer)->named_parameters();
    const auto project = [&](const char* name, const at::Tensor& rows) {
      return at::linear(rows, weights[std::string(name) + ".weight"],
                        weights[std::string(name) + ".bias"]);
    };
    const auto heads = [&](const char* name) {
      return project(name, x).unflatten(2, {H, -1}).transpose(1, 2);
    };
    const at::Tensor out = at::scaled_dot_product_attention(heads("q"), heads("k"), heads("v"));
    return project("out", out.transpose(1, 2).flatten(2));
  };
  const double median = median_seconds(
      seconds, [&] { wait_for(encoder.model->forward_with(batch.tokens, batch.types, attend)); });
  return static_cast<double>(batch.tokens.numel()) / median;
}

EncoderBatch speed_batch(const PretrainedEncoder& encoder, const std::vector<EncodedText>& inputs,
                         std::int64_t length, std::int64_t tokens) {
  const auto size = static_cast<std::size_t>(length);
  std::vector<EncodedText> rows(
      static_cast<std::size_t>(std::max<std::int64_t>(tokens / length, 1)));
  std::size_t next = 0;
  for (EncodedText& row : rows) {
    while (row.tokens.size() < size) {
      const std::vector<std::int32_t>& more = inputs[next++ % inputs.size()].tokens;
      row.tokens.insert(row.tokens.end(), more.begin(), more.end());
    }
    row.tokens.resize(size);
    row.types.assign(size, 0);
  }
  return batch_of_inputs(encoder, rows);
}

std::vector<ApproximateResult> approximate(
    PretrainedEncoder& encoder, EncoderTask& task, const std::vector<NamedAttention>& attentions,
    const ApproximateOptions& options, const std::function<void(const ApproximateResult&)>& show) {
  const c10::Device device = encoder_device(encoder);
  for (const NamedAttention& attention : attentions) {
    encoder.model->check_attention(attention.specs);
  }
  std::vector<NamedAttention> all = {{"full", {AttentionSpec::parse("full")}}};
  all.insert(all.end(), attentions.begin(), attentions.end());
  encoder.model->set_attention(all[0].specs);
  const auto show_work = [&](const std::string& work) {
    return [&options, work](std::int64_t done, std::int64_t count) {
      if (options.progress) options.progress(work, done, count);
    };
  };
  RunTextsOptions run = options.run;
  run.progress = show_work("learning with full attention");
  task.fit(encoder, run);
  const EncoderBatch sample =
      batch_of_inputs(encoder, some_inputs(task.inputs(), options.error_inputs));
  const std::int64_t speed_tokens = device.is_cuda() ? 32768 : 2048;
  std::vector<HeadErrors> errors(attentions.size());
  if (options.error_inputs > 0 && !attentions.empty()) {
    show_work("errors of layers and heads")(0, 1);
    errors = head_errors(encoder, sample, attentions, run.seed);
  }
  std::vector<ApproximateResult> results;
  std::vector<std::vector<double>> full_draws;
  at::Tensor full;
  for (std::size_t i = 0; i < all.size(); ++i) {
    ApproximateResult result;
    result.attention = all[i].name;
    encoder.model->set_attention(all[i].specs);
    const MemoryMeter memory(device);
    RunTextsFacts facts;
    run.progress = show_work(all[i].name);
    const at::Tensor embeddings = take_inputs(encoder, task, run, facts);
    result.peak_memory_bytes = memory.peak_bytes();
    if (i == 0) full = embeddings;
    const Agreement agrees = agreement(embeddings, full);
    result.cosine = agrees.mean;
    result.worst_cosine = agrees.least;
    result.embedding_error = agrees.error;
    result.scores = score_results(task, options, full_draws, i == 0);
    result.exact_share = exact_share(task.inputs(), all[i]);
    result.seconds = facts.seconds;
    result.tokens = facts.tokens;
    result.tokens_per_s = static_cast<double>(facts.tokens) / std::max(facts.seconds, 1e-9);
    if (i > 0) {
      result.head_error = errors[i - 1];
    } else if (options.error_inputs > 0) {
      const auto sizes = encoder.model->options();
      result.head_error.assign(static_cast<std::size_t>(sizes.layers),
                               std::vector<double>(static_cast<std::size_t>(sizes.heads)));
    }
    for (const std::int64_t length : options.speed_lengths) {
      const EncoderBatch batch = speed_batch(encoder, task.inputs(), length, speed_tokens);
      result.speeds.push_back(
          {length, encoder_speed(encoder, batch, options.speed_seconds, run.seed)});
    }
    if (i > 0) result.crossover = crossover_of(results[0].speeds, result.speeds);
    results.push_back(result);
    if (show) show(result);
  }
  return results;
}

}  // namespace coterie::train
