// SPDX-License-Identifier: MIT
// Errors of heads are those of their contribution to the layer's output, after the output
// projection. One pass with full attention gives the rows of all layers; every rung runs on them.
#include "train/pretrained/calibrate.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/linear.h>
#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <map>

#include "coterie/error.h"
#include "train/autocast.h"

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

at::Tensor output_of(const CalibratedModel& model, const at::Tensor& tokens, std::uint64_t seed) {
  torch_api::PassContext context;
  context.seed = seed;
  return model.run(tokens, context);
}

double relative_error(const at::Tensor& found, const at::Tensor& full) {
  const at::Tensor wanted = full.to(at::kFloat);
  return (found.to(at::kFloat) - wanted).norm().item<double>() /
         std::max(wanted.norm().item<double>(), 1e-30);
}

// What the heads of a layer get: rows (B, H, N, D), with positions.
struct LayerRows {
  at::Tensor q, k, v;
  torch_api::AttentionOptions options;
};

// Full attention on a batch: the rows of attention in all layers, and the output.
struct FullPass {
  at::Tensor tokens;
  std::vector<LayerRows> layers;
  at::Tensor out;
};

FullPass full_pass(const CalibratedModel& model, const at::Tensor& tokens, std::uint64_t seed,
                   bool rows) {
  FullPass pass;
  pass.tokens = tokens;
  model.set({AttentionSpec::parse("full")});
  std::vector<AttentionRecord> records;
  torch_api::PassContext context;
  context.seed = seed;
  if (rows) context.records = &records;
  pass.out = model.run(tokens, context);
  for (const AttentionRecord& record : records) {  // one for each group of heads
    if (record.group == 0) {
      pass.layers.push_back({record.q, record.k, record.v, record.options});
      continue;
    }
    LayerRows& own = pass.layers.back();
    own.q = at::cat({own.q, record.q}, 1);
    own.k = at::cat({own.k, record.k}, 1);
    own.v = at::cat({own.v, record.v}, 1);
  }
  return pass;
}

// Of the heads of a layer, for their specs; empty if none has any.
std::vector<Positions> named_positions(const CalibratedModel& model, std::int64_t layer) {
  std::vector<Positions> positions = model.attention(layer)->trained_positions();
  const bool any = std::any_of(positions.begin(), positions.end(),
                               [](Positions own) { return own != Positions::none; });
  return any ? positions : std::vector<Positions>{};
}

class Measurer {
 public:
  Measurer(const CalibratedModel& model, const CalibrateOptions& options)
      : model_(model), options_(options), heads_(model.heads) {
    for (const std::string& rung : options.ladder) {
      const AttentionSpec spec = AttentionSpec::parse(rung);
      if (spec.groups.size() != 1 || spec.groups[0].heads != 0) {
        throw Error(
            "[approximate] expected a ladder of specs with one group and no number of heads; "
            "got \"" +
            rung + '"');
      }
      model.check({spec});
      rungs_.push_back(spec);
      if (std::holds_alternative<FullParams>(spec.groups[0].mechanism)) full_ = rungs_.size() - 1;
    }
    const std::size_t R = rungs_.size(), U = static_cast<std::size_t>(heads_);
    for (std::size_t l = 0; l < model.names.size(); ++l) {
      LayerMeasurements& layer = layers_.emplace_back();
      layer.heads = layer.units = heads_;
      layer.positions = named_positions(model, static_cast<std::int64_t>(l));
      layer.unit_error.assign(U * R, 0.0);
      layer.output_error.assign(R, std::numeric_limits<double>::quiet_NaN());
      layer.unit_time.assign(U * R, 0.0);
      layer.group_time.assign(R, 0.0);
    }
  }

  // Adds the squares of a batch; finish() takes roots.
  void add_errors(const at::Tensor& tokens) {
    const FullPass pass = full_pass(model_, tokens, options_.seed, /*rows=*/true);
    show("errors by layer and head", 0);
    for (std::size_t l = 0; l < layers_.size(); ++l) {
      const LayerRows& rows = pass.layers[l];
      const at::Tensor full = attend(rows, l, full_, heads_);
      const at::Tensor weight = output_weight(l);
      for (std::size_t r = 0; r < rungs_.size(); ++r) {
        if (r == full_) continue;
        const at::Tensor change = attend(rows, l, r, heads_) - full;
        for (std::int64_t h = 0; h < heads_; ++h) {
          const std::int64_t D = change.size(3);
          const at::Tensor part =
              at::linear(change.select(1, h).to(at::kFloat), weight.narrow(1, h * D, D));
          const double norm = part.norm().item<double>();
          layers_[l].unit_error[static_cast<std::size_t>(h) * rungs_.size() + r] += norm * norm;
        }
      }
      show("errors by layer and head", static_cast<std::int64_t>(l) + 1);
    }
    add_output_errors(pass);
    ++batches_;
  }

  // The time of all heads of every layer, on its own rows. What a group costs besides its heads is
  // that of the first layer: launches and threads that wait, whatever the rows.
  void add_times(const at::Tensor& tokens) {
    const FullPass pass = full_pass(model_, tokens, options_.seed, /*rows=*/true);
    const auto U = static_cast<double>(heads_);
    for (std::size_t l = 0; l < layers_.size(); ++l) {
      show("times by layer", static_cast<std::int64_t>(l));
      std::vector<double>& seconds = seconds_.emplace_back();
      for (std::size_t r = 0; r < rungs_.size(); ++r) {
        const auto time = [&](std::int64_t heads) {
          return seconds_of(options_.seconds, [&] { return attend(pass.layers[l], l, r, heads); });
        };
        const double all = time(heads_);
        seconds.push_back(all);
        layers_[l].group_time[r] = layers_[0].group_time[r];
        if (l == 0 && heads_ > 1) {
          layers_[l].group_time[r] = std::max(0.0, (U * time(1) - all) / (U - 1));
        }
        for (std::int64_t h = 0; h < heads_; ++h) {
          layers_[l].unit_time[static_cast<std::size_t>(h) * rungs_.size() + r] =
              std::max(0.0, (all - layers_[l].group_time[r]) / U);
        }
      }
    }
  }

  std::vector<LayerMeasurements> finish() {
    for (LayerMeasurements& layer : layers_) {
      for (double& error : layer.unit_error) error = std::sqrt(error / batches_);
      for (double& error : layer.output_error) error = std::sqrt(error / batches_);
    }
    return layers_;
  }

  std::size_t full() const { return full_; }
  const std::vector<std::vector<double>>& seconds() const { return seconds_; }

 private:
  // The first heads of a layer.
  at::Tensor attend(const LayerRows& rows, std::size_t layer, std::size_t rung,
                    std::int64_t count) const {
    torch_api::AttentionOptions options = rows.options;
    options.seed = group_seed(options_.seed, static_cast<std::int64_t>(layer), 0);
    return torch_api::attention(rows.q.narrow(1, 0, count), rows.k.narrow(1, 0, count),
                                rows.v.narrow(1, 0, count), rungs_[rung].groups[0].mechanism,
                                options);
  }

  at::Tensor output_weight(std::size_t layer) const {
    const auto weights = model_.attention(static_cast<std::int64_t>(layer))->named_parameters();
    return weights["out.weight"].to(at::kFloat);
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
        model_.set(specs);
        const double error =
            relative_error(output_of(model_, pass.tokens, options_.seed), pass.out);
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

  const CalibratedModel& model_;
  const CalibrateOptions& options_;
  std::int64_t heads_;
  std::vector<AttentionSpec> rungs_;
  std::size_t full_ = 0;
  std::vector<LayerMeasurements> layers_;
  std::vector<std::vector<double>> seconds_;
  double batches_ = 0;
};

std::vector<std::string> names_of(const char* pattern, std::int64_t layers) {
  std::vector<std::string> names;
  for (std::int64_t l = 0; l < layers; ++l) names.push_back(fmt::format(fmt::runtime(pattern), l));
  return names;
}

// A rung in all heads, as the core writes it.
std::vector<AttentionSpec> in_all_heads(const std::string& rung,
                                        const std::vector<LayerMeasurements>& layers) {
  const HeadGroup group = AttentionSpec::parse(rung).groups[0];
  std::vector<AttentionSpec> specs;
  for (const LayerMeasurements& layer : layers) {
    AttentionSpec& spec = specs.emplace_back();
    for (std::size_t h = 0; h < static_cast<std::size_t>(layer.heads); ++h) {
      const Positions own = layer.positions.empty() ? Positions::automatic : layer.positions[h];
      if (spec.groups.empty() || spec.groups.back().positions != own) {
        spec.groups.push_back(group);
        spec.groups.back().positions = own;
      }
      ++spec.groups.back().heads;
    }
    if (spec.groups.size() == 1) spec.groups[0].heads = 0;
  }
  return specs;
}

}  // namespace

CalibratedModel calibrated_model(const PretrainedEncoder& encoder) {
  torch_api::Encoder model = encoder.model;
  model->eval();
  return {.names = names_of("encoder.layer.{}.attention.self", model->options().layers),
          .heads = model->options().heads,
          .run =
              [model](const at::Tensor& tokens, const torch_api::PassContext& context) mutable {
                return model->forward(tokens, {}, context).out;
              },
          .attention = [model](std::int64_t layer) { return model->attention(layer); },
          .check = [model](const auto& specs) { model->check_attention(specs); },
          .set = [model](const auto& specs) mutable { model->set_attention(specs); }};
}

CalibratedModel calibrated_model(const torch_api::Model& model, bool bf16) {
  torch_api::Transformer stack = model->transformer();
  const torch_api::TransformerOptions& options = stack->options();
  if (options.causal) {
    throw Error(
        "[approximate] expected a model that sees both sides, such as one of --task masked; got a "
        "causal one");
  }
  for (const AttentionSpec& spec : options.attention) {
    for (const HeadGroup& group : spec.groups) {
      if (std::holds_alternative<FullParams>(group.mechanism)) continue;
      throw Error("[approximate] expected a model that was trained with full attention; got \"" +
                  spec.to_string() + '"');
    }
  }
  model->eval();
  return {.names = names_of("transformer.layers.{}.attention", options.layers),
          .heads = options.heads,
          .run =
              [model, bf16](const at::Tensor& tokens, const torch_api::PassContext& context) {
                const AutocastGuard autocast(tokens.device(), bf16);
                return model->forward(tokens, context).out;
              },
          .attention = [stack](std::int64_t layer) { return stack->attention(layer); },
          .check = [stack](const auto& specs) { stack->check_attention(specs); },
          .set = [stack](const auto& specs) mutable { stack->set_attention(specs); }};
}

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

std::vector<at::Tensor> equal_batches(const std::vector<at::Tensor>& rows, std::int64_t tokens) {
  std::vector<at::Tensor> batches;
  if (rows.empty()) return batches;
  const auto size =
      std::min(rows.size(),
               static_cast<std::size_t>(std::max<std::int64_t>(tokens / rows.front().size(1), 1)));
  for (std::size_t first = 0; first + size <= rows.size(); first += size) {
    const auto begin = rows.begin() + static_cast<std::ptrdiff_t>(first);
    batches.push_back(
        at::cat(std::vector<at::Tensor>(begin, begin + static_cast<std::ptrdiff_t>(size))));
  }
  return batches;
}

Calibration calibrate(const CalibratedModel& model, const std::vector<at::Tensor>& measured,
                      const std::vector<at::Tensor>& held_out, const CalibrateOptions& options) {
  const at::NoGradGuard no_grad;
  if (measured.empty() || held_out.empty()) {
    throw Error(
        fmt::format("[approximate] expected texts to measure and to verify; got {} and {} "
                    "(give more --data, or a smaller --length)",
                    measured.size(), held_out.size()));
  }
  Measurer measurer(model, options);
  for (const at::Tensor& tokens : measured) measurer.add_errors(tokens);
  measurer.add_times(measured.front());
  Calibration found;
  found.ladder = options.ladder;
  found.full = measurer.full();
  found.layers = measurer.finish();
  found.seconds = measurer.seconds();

  std::vector<FullPass> passes;
  for (const at::Tensor& tokens : held_out) {
    passes.push_back(full_pass(model, tokens, options.seed, /*rows=*/false));
  }
  // Each attention once.
  std::map<std::string, double> errors, times;
  const auto once = [&](std::map<std::string, double>& known,
                        const std::vector<AttentionSpec>& specs,
                        const std::function<double()>& measure) {
    std::string key;
    for (const AttentionSpec& spec : specs) key += spec.to_string() + ";";
    const auto place = known.find(key);
    if (place != known.end()) return place->second;
    model.set(specs);
    return known[key] = measure();
  };
  const auto error_of = [&](const std::vector<AttentionSpec>& specs) {
    return once(errors, specs, [&] {
      double sum = 0;
      for (const FullPass& pass : passes) {
        const double error = relative_error(output_of(model, pass.tokens, options.seed), pass.out);
        sum += error * error;
      }
      return std::sqrt(sum / static_cast<double>(passes.size()));
    });
  };
  const auto seconds = [&](const std::vector<AttentionSpec>& specs) {
    return once(times, specs, [&] {
      return seconds_of(options.seconds,
                        [&] { return output_of(model, passes.front().tokens, options.seed); });
    });
  };
  const auto all = static_cast<std::int64_t>(options.ladder.size());
  for (const std::string& rung : options.ladder) {
    if (options.progress) {
      options.progress("each rung in all heads", static_cast<std::int64_t>(found.uniform.size()),
                       all);
    }
    const std::vector<AttentionSpec> specs = in_all_heads(rung, found.layers);
    found.uniform.push_back({rung, specs, error_of(specs), seconds(specs)});
  }
  for (const double target : options.targets) {
    if (options.progress) {
      options.progress("choosing and verifying", static_cast<std::int64_t>(found.targets.size()),
                       static_cast<std::int64_t>(options.targets.size()));
    }
    CalibratedTarget own{target, {}, {}};
    own.choice = choose_verified(
        options.ladder, found.layers, target,
        [&](const Choice& choice) { return error_of(choice.layers); },
        [&](const Choice& choice) { return seconds(choice.layers); });
    own.measured = {fmt::format("chosen for {}", target), own.choice.layers, own.choice.verified,
                    own.choice.seconds};
    found.targets.push_back(std::move(own));
  }
  model.set({AttentionSpec::parse("full")});
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
