// SPDX-License-Identifier: MIT
// Errors of heads are those of their contribution to the layer's output, after the output
// projection. One pass with full attention gives the rows of all layers; every rung runs on them.
#include "train/pretrained/calibrate.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/linear.h>
#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <map>

#include "coterie/error.h"

namespace coterie::train {
namespace {

using Watch = std::chrono::steady_clock;
using torch_api::AttentionRecord;

double seconds_of(double at_least, const std::function<at::Tensor()>& pass) {
  const auto wait = [](const at::Tensor& out) { out.flatten()[0].item<float>(); };
  wait(pass());
  std::vector<double> times;
  double sum = 0;
  while (times.size() < 2 || (sum < at_least && times.size() < 20)) {
    const auto start = Watch::now();
    wait(pass());
    times.push_back(std::chrono::duration<double>(Watch::now() - start).count());
    sum += times.back();
  }
  std::sort(times.begin(), times.end());
  return times[(times.size() - 1) / 2];
}

EncoderBatch batch_of_text(const PretrainedEncoder& encoder, const EncodedText& text) {
  return encoder_batch({&text}, encoder.tokenizer.id("[PAD]"),
                       encoder.model->parameters().front().device());
}

at::Tensor rows_of_text(PretrainedEncoder& encoder, const EncoderBatch& batch, std::uint64_t seed) {
  torch_api::PassContext context;
  context.seed = seed;
  return encoder.model->forward(batch.tokens, batch.types, context).out;
}

double relative_error(const at::Tensor& found, const at::Tensor& full) {
  const at::Tensor wanted = full.to(at::kFloat);
  return (found.to(at::kFloat) - wanted).norm().item<double>() /
         std::max(wanted.norm().item<double>(), 1e-30);
}

// Full attention on a text: the rows of attention in all layers, and the output.
struct FullPass {
  EncoderBatch batch;
  std::vector<AttentionRecord> records;
  at::Tensor out;
};

FullPass full_pass(PretrainedEncoder& encoder, const EncodedText& text, std::uint64_t seed) {
  FullPass pass;
  pass.batch = batch_of_text(encoder, text);
  encoder.model->set_attention({AttentionSpec::parse("full")});
  torch_api::PassContext context;
  context.seed = seed;
  context.records = &pass.records;
  pass.out = encoder.model->forward(pass.batch.tokens, pass.batch.types, context).out;
  return pass;
}

class Measurer {
 public:
  Measurer(PretrainedEncoder& encoder, const CalibrateOptions& options)
      : encoder_(encoder), options_(options), heads_(encoder.model->options().heads) {
    for (const std::string& rung : options.ladder) {
      const AttentionSpec spec = AttentionSpec::parse(rung);
      if (spec.groups.size() != 1 || spec.groups[0].heads != 0) {
        throw Error(
            "[approximate] expected a ladder of specs with one group and no number of heads; "
            "got \"" +
            rung + '"');
      }
      encoder.model->check_attention({spec});
      rungs_.push_back(spec);
      if (std::holds_alternative<FullParams>(spec.groups[0].mechanism)) full_ = rungs_.size() - 1;
    }
    layers_.resize(static_cast<std::size_t>(encoder.model->options().layers));
    const std::size_t R = rungs_.size(), U = static_cast<std::size_t>(heads_);
    for (LayerMeasurements& layer : layers_) {
      layer.heads = layer.units = heads_;
      layer.unit_error.assign(U * R, 0.0);
      layer.output_error.assign(R, std::numeric_limits<double>::quiet_NaN());
      layer.unit_time.assign(U * R, 0.0);
      layer.group_time.assign(R, 0.0);
    }
  }

  // Adds the squares of a text; finish() takes roots.
  void add_errors(const EncodedText& text) {
    const FullPass pass = full_pass(encoder_, text, options_.seed);
    show("errors by layer and head", 0);
    for (const AttentionRecord& record : pass.records) {
      const auto l = static_cast<std::size_t>(record.layer);
      const at::Tensor full = attend(record, full_, 0, heads_);
      const auto weights = encoder_.model->attention(record.layer)->named_parameters();
      for (std::size_t r = 0; r < rungs_.size(); ++r) {
        if (r == full_) continue;
        const at::Tensor change = attend(record, r, 0, heads_) - full;
        for (std::int64_t h = 0; h < heads_; ++h) {
          const std::int64_t D = change.size(3);
          const at::Tensor part =
              at::linear(change.select(1, h).to(at::kFloat),
                         weights["out.weight"].narrow(1, h * D, D).to(at::kFloat));
          const double norm = part.norm().item<double>();
          layers_[l].unit_error[static_cast<std::size_t>(h) * rungs_.size() + r] += norm * norm;
        }
      }
      show("errors by layer and head", record.layer + 1);
    }
    add_output_errors(pass);
    ++texts_;
  }

  void add_times(const EncodedText& text) {
    const FullPass pass = full_pass(encoder_, text, options_.seed);
    for (const AttentionRecord& record : pass.records) {
      // Times of one kind of layer: those of the first are those of all.
      if (record.layer > 0) {
        layers_[static_cast<std::size_t>(record.layer)].unit_time = layers_[0].unit_time;
        layers_[static_cast<std::size_t>(record.layer)].group_time = layers_[0].group_time;
        continue;
      }
      show("times by rung", 0);
      for (std::size_t r = 0; r < rungs_.size(); ++r) {
        const double all =
            seconds_of(options_.seconds, [&] { return attend(record, r, 0, heads_); });
        const double one = seconds_of(options_.seconds, [&] { return attend(record, r, 0, 1); });
        const auto U = static_cast<double>(heads_);
        const double group = heads_ == 1 ? 0.0 : std::max(0.0, (U * one - all) / (U - 1));
        layers_[0].group_time[r] = group;
        for (std::int64_t h = 0; h < heads_; ++h) {
          layers_[0].unit_time[static_cast<std::size_t>(h) * rungs_.size() + r] =
              std::max(0.0, (all - group) / U);
        }
        show("times by rung", static_cast<std::int64_t>(r) + 1);
      }
    }
  }

  std::vector<LayerMeasurements> finish() {
    for (LayerMeasurements& layer : layers_) {
      for (double& error : layer.unit_error) error = std::sqrt(error / texts_);
      for (double& error : layer.output_error) error = std::sqrt(error / texts_);
    }
    return layers_;
  }

  std::size_t full() const { return full_; }

 private:
  at::Tensor attend(const AttentionRecord& record, std::size_t rung, std::int64_t first,
                    std::int64_t count) const {
    torch_api::AttentionOptions options = record.options;
    options.seed = group_seed(options_.seed, record.layer, 0);
    return torch_api::attention(record.q.narrow(1, first, count), record.k.narrow(1, first, count),
                                record.v.narrow(1, first, count), rungs_[rung].groups[0].mechanism,
                                options);
  }

  // Of the cheapest rungs and those in the middle of the ladder, each in one layer alone.
  void add_output_errors(const FullPass& pass) {
    const std::size_t R = rungs_.size();
    std::vector<std::size_t> chosen = {0, R / 2};
    if (R > 3) chosen.push_back(R - 2);
    show("errors of the output by layer", 0);
    for (std::size_t l = 0; l < layers_.size(); ++l) {
      for (const std::size_t r : chosen) {
        if (r == full_) continue;
        std::vector<AttentionSpec> specs(layers_.size(), rungs_[full_]);
        specs[l] = rungs_[r];
        encoder_.model->set_attention(specs);
        const double error =
            relative_error(rows_of_text(encoder_, pass.batch, options_.seed), pass.out);
        double& sum = layers_[l].output_error[r];
        sum = (std::isnan(sum) ? 0.0 : sum) + error * error;
      }
      layers_[l].output_error[full_] = 0.0;
      show("errors of the output by layer", static_cast<std::int64_t>(l) + 1);
    }
  }

  void show(const char* work, std::int64_t done) const {
    const auto all = static_cast<std::int64_t>(layers_.size());
    if (options_.progress) options_.progress(work, std::min(done, all), all);
  }

  PretrainedEncoder& encoder_;
  const CalibrateOptions& options_;
  std::int64_t heads_;
  std::vector<AttentionSpec> rungs_;
  std::size_t full_ = 0;
  std::vector<LayerMeasurements> layers_;
  double texts_ = 0;
};

// Times of heads do not always add up to that of the model: a choice that is not faster as a whole
// is given up.
void stay_full(CalibratedTarget& target, const MeasuredAttention& full, std::size_t rung) {
  const std::string reason =
      fmt::format("the model with the chosen specs is not faster: {:.3g} ms, full {:.3g} ms",
                  1e3 * target.measured.seconds, 1e3 * full.seconds);
  target.choice.layers = full.specs;
  for (auto& rungs : target.choice.rungs) std::fill(rungs.begin(), rungs.end(), rung);
  for (auto& reasons : target.choice.reasons) {
    for (std::string& own : reasons) own = own.empty() ? reason : own;
  }
  target.choice.error = 0;
  target.choice.verified = 0;
  target.measured = full;
}

}  // namespace

std::vector<std::string> default_ladder(std::int64_t length) {
  std::vector<std::string> ladder;
  for (const char* rung :
       {"local(window=64)", "local(window=256)", "local(window=1024)", "clustered(clusters=64)",
        "clustered(clusters=128,near=32)", "i-clustered(clusters=32,topk=32)",
        "i-clustered(clusters=64,topk=32,near=32)", "i-clustered(clusters=128,topk=32)",
        "i-clustered(clusters=128,topk=32,near=32)", "i-clustered(clusters=256,topk=64)",
        "i-clustered(clusters=256,topk=64,near=32)",
        "i-clustered(clusters=256,topk=128,near=128)"}) {
    const Mechanism mechanism = AttentionSpec::parse(rung).groups[0].mechanism;
    if (!covers(mechanism, length)) ladder.emplace_back(rung);
  }
  ladder.emplace_back("full");
  return ladder;
}

Calibration calibrate(PretrainedEncoder& encoder, const std::vector<EncodedText>& texts,
                      const std::vector<EncodedText>& held_out, const CalibrateOptions& options) {
  const at::NoGradGuard no_grad;
  if (texts.empty() || held_out.empty()) {
    throw Error(
        fmt::format("[approximate] expected texts to measure and to verify; got {} and {} "
                    "(give more --data, or a smaller --length)",
                    texts.size(), held_out.size()));
  }
  encoder.model->eval();
  Measurer measurer(encoder, options);
  for (const EncodedText& text : texts) measurer.add_errors(text);
  measurer.add_times(texts.front());
  Calibration found;
  found.ladder = options.ladder;
  found.full = measurer.full();
  found.layers = measurer.finish();

  std::vector<FullPass> passes;
  for (const EncodedText& text : held_out) {
    passes.push_back(full_pass(encoder, text, options.seed));
    passes.back().records.clear();
  }
  const auto error_of = [&](const std::vector<AttentionSpec>& specs) {
    encoder.model->set_attention(specs);
    double sum = 0;
    for (const FullPass& pass : passes) {
      const double error =
          relative_error(rows_of_text(encoder, pass.batch, options.seed), pass.out);
      sum += error * error;
    }
    return std::sqrt(sum / static_cast<double>(passes.size()));
  };
  std::map<std::string, MeasuredAttention> measured;
  const auto measure = [&](const std::string& name, const std::vector<AttentionSpec>& specs,
                           double error) {
    encoder.model->set_attention(specs);
    std::string key;
    for (const AttentionSpec& spec : specs) key += spec.to_string() + ";";
    const auto known = measured.find(key);
    if (known != measured.end()) return known->second;
    MeasuredAttention own{name, specs, std::isnan(error) ? error_of(specs) : error, 0};
    own.seconds = seconds_of(
        options.seconds, [&] { return rows_of_text(encoder, passes.front().batch, options.seed); });
    return measured[key] = own;
  };
  const double unknown = std::numeric_limits<double>::quiet_NaN();
  const auto all = static_cast<std::int64_t>(options.ladder.size());
  for (const std::string& rung : options.ladder) {
    if (options.progress) {
      options.progress("each rung in all heads", static_cast<std::int64_t>(found.uniform.size()),
                       all);
    }
    const std::vector<AttentionSpec> specs(found.layers.size(), AttentionSpec::parse(rung));
    found.uniform.push_back(measure(rung, specs, unknown));
  }
  for (const double target : options.targets) {
    if (options.progress) {
      options.progress("choosing and verifying", static_cast<std::int64_t>(found.targets.size()),
                       static_cast<std::int64_t>(options.targets.size()));
    }
    CalibratedTarget own{target, {}, {}};
    own.choice = choose_verified(options.ladder, found.layers, target,
                                 [&](const Choice& choice) { return error_of(choice.layers); });
    own.measured =
        measure(fmt::format("chosen for {}", target), own.choice.layers, own.choice.verified);
    const MeasuredAttention& full = found.uniform.at(found.full);
    if (own.measured.seconds >= full.seconds) stay_full(own, full, found.full);
    found.targets.push_back(std::move(own));
  }
  return found;
}

std::vector<std::string> explain(const CalibratedTarget& target, std::int64_t length) {
  std::vector<std::string> lines;
  std::int64_t full = 0, heads = 0;
  std::map<std::string, std::int64_t> reasons;
  for (std::size_t l = 0; l < target.choice.reasons.size(); ++l) {
    for (const std::string& reason : target.choice.reasons[l]) {
      ++heads;
      if (reason.empty()) continue;
      ++full;
      ++reasons[reason.substr(0, reason.find(':'))];  // the kind; the rest is about one head
    }
  }
  if (full == heads) {
    lines.push_back(
        fmt::format("full attention is the answer: at {} tokens on this device no "
                    "assignment of the ladder is faster under an error of {}",
                    length, target.target));
  } else {
    lines.push_back(fmt::format("{} of {} heads leave full attention", heads - full, heads));
  }
  for (const auto& [reason, count] : reasons) {
    lines.push_back(fmt::format("{} stay full: {}", count, reason));
  }
  return lines;
}

}  // namespace coterie::train
