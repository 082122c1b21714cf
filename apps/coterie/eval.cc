// SPDX-License-Identifier: MIT
// coterie eval: scores of a trained model, with the attention it was trained with and with others.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "apps/coterie/loaded_model.h"
#include "apps/coterie/progress.h"
#include "coterie/error.h"
#include "train/evaluate.h"
#include "train/option_values.h"
#include "train/options.h"
#include "train/trainer.h"
#include "verbs.h"

namespace coterie::cli {
namespace {

struct EvalOptions {
  ModelOptions model;
  std::vector<std::string> attention;
  std::string split = "valid";
  std::int64_t batches = 0;
  std::int64_t rows = 0;
  std::uint64_t seed = 0;
  bool json = false;
};

struct Row {
  std::string attention;
  bool trained = false;
  train::Evaluation evaluation;
};

// The config with `attention` in all layers.
train::Config with_attention(const train::Config& config, const std::string& attention) {
  train::Config other = config;
  train::set_attention(other, attention);
  return other;
}

// The trained attention first, then the others.
std::vector<train::Config> variants(const train::Config& config,
                                    const std::vector<std::string>& attention) {
  std::vector<train::Config> configs = {config};
  for (const std::string& spec : attention) configs.push_back(with_attention(config, spec));
  return configs;
}

// Refuses all that the model cannot use before the first one is computed.
void check_variants(const LoadedModel& loaded, const std::vector<train::Config>& configs) {
  for (const train::Config& config : configs) {
    try {
      loaded.model->transformer()->check_attention(train::layer_attention(config));
    } catch (const Error& error) {
      throw Error(fmt::format("{}; the model was trained with {}", error.what(),
                              train::attention_text(loaded.config)));
    }
  }
}

train::EvaluateOptions evaluate_options(const EvalOptions& options, const train::Config& config) {
  train::EvaluateOptions wanted;
  wanted.split = options.split == "test" ? train::Split::test : train::Split::valid;
  wanted.rows = options.rows > 0 ? options.rows : config.train.batch;
  wanted.batches = options.batches;
  wanted.seed = options.seed;
  wanted.bf16 = config.train.dtype == "bf16";
  return wanted;
}

void print_header(const EvalOptions& options, const LoadedModel& loaded, std::size_t width) {
  const train::EvaluateOptions wanted = evaluate_options(options, loaded.config);
  const std::int64_t all = loaded.task->batches(wanted.split, wanted.rows);
  const bool part = wanted.batches > 0 && wanted.batches < all;
  fmt::print("{}, {} on {}{}, trained for {} steps\n\n  {:<{}} {:>13} {:>9} {:>8}",
             loaded.checkpoint, loaded.task->name(), options.split,
             part ? fmt::format(" (the first {} of {} batches)", wanted.batches, all) : "",
             loaded.step, "attention", width, train::metric_name(loaded.task->metric()), "loss",
             "seconds");
  for (const std::string& stratum : loaded.task->strata()) {
    fmt::print("  {:>8}", stratum);
  }
  fmt::print("\n");
}

void print_row(const Row& row, const train::Task& task, std::size_t width) {
  fmt::print("{} {:<{}} {:>13.4f} {:>9.4f} {:>8.2f}", row.trained ? '*' : ' ', row.attention, width,
             row.evaluation.metric, row.evaluation.score.loss(), row.evaluation.seconds);
  for (const std::string& name : task.strata()) {
    const train::Score& score = row.evaluation.strata.at(name);
    const std::string value =
        score.count == 0 ? "-" : fmt::format("{:.4f}", metric_value(task.metric(), score));
    fmt::print("  {:>{}}", value, std::max<std::size_t>(8, name.size()));
  }
  fmt::print("\n");
  std::fflush(stdout);
}

void print_footer(const train::Task& task, const EvalOptions& options) {
  fmt::print("\n* trained with this attention");
  const char* const whose = options.split == "valid" ? "" : " (of the validation data)";
  for (const train::Baseline& baseline : task.baselines()) {
    fmt::print("; {} {:.4g}{}", baseline.name, baseline.value, whose);
  }
  for (const std::string& note : task.notes()) fmt::print("; {}", note);
  fmt::print("\n");
}

void print_json(const Row& row, const EvalOptions& options, const LoadedModel& loaded) {
  const train::Task& task = *loaded.task;
  nlohmann::ordered_json strata = nlohmann::ordered_json::object();
  for (const auto& [name, score] : row.evaluation.strata) {
    if (score.count > 0) strata[name] = metric_value(task.metric(), score);
  }
  const nlohmann::ordered_json line = {
      {"kind", "eval"},
      {"checkpoint", loaded.checkpoint},
      {"step", loaded.step},
      {"task", task.name()},
      {"split", options.split},
      {"share", row.evaluation.share},
      {"attention", row.attention},
      {"trained", row.trained},
      {"metric_name", train::metric_name(task.metric())},
      {"metric", row.evaluation.metric},
      {"loss", row.evaluation.score.loss()},
      {"accuracy", metric_value(train::Metric::accuracy, row.evaluation.score)},
      {"seconds", row.evaluation.seconds},
      {"strata", strata}};
  fmt::print("{}\n", line.dump());
  std::fflush(stdout);  // readers see every score when it is known
}

Row evaluate_variant(LoadedModel& loaded, const train::Config& variant,
                     const EvalOptions& options) {
  const std::vector<AttentionSpec> specs = train::layer_attention(variant);
  const std::string warning = train::leak_warning(specs, loaded.task->causal());
  if (!warning.empty()) fmt::print(stderr, "coterie: warning: {}\n", warning);
  loaded.model->transformer()->set_attention(specs);
  train::EvaluateOptions wanted = evaluate_options(options, loaded.config);
  Progress progress;
  wanted.progress = [&](std::int64_t done, std::int64_t all) {
    progress.show_parts("evaluation", done, all, "batches");
  };
  return {train::attention_text(variant), false, evaluate(loaded.model, *loaded.task, wanted)};
}

void run_eval(const EvalOptions& options) {
  LoadedModel loaded = load_model(options.model, UsesData::yes);
  const std::vector<train::Config> configs = variants(loaded.config, options.attention);
  check_variants(loaded, configs);
  std::size_t width = 9;
  for (const train::Config& config : configs) {
    width = std::max(width, train::attention_text(config).size());
  }
  if (!options.json) print_header(options, loaded, width);
  for (std::size_t i = 0; i < configs.size(); ++i) {
    Row row = evaluate_variant(loaded, configs[i], options);
    row.trained = i == 0;
    options.json ? print_json(row, options, loaded) : print_row(row, *loaded.task, width);
  }
  if (!options.json) print_footer(*loaded.task, options);
}

const char* const kEvalExamples =
    R"help(The table shows the attention the model was trained with, marked *, and one line
for each --attention, which replaces it in all layers without further training.
Both must have the same parameters: full, local, clustered and i-clustered can
replace each other, for example, in other groups of heads too.

Examples:
  coterie eval runs/copy-full-1
  coterie eval runs/copy-full-1 --attention "i-clustered(clusters=16)" \
    "clustered(clusters=16)"
  coterie eval runs/copy-full-1/checkpoints/step-00000200 --split test --json

)help";

}  // namespace

void add_eval(CLI::App& program) {
  CLI::App* verb = program.add_subcommand(
      "eval", "Score a trained model, with its own attention and optionally with others");
  const auto shared = std::make_shared<EvalOptions>();  // lives as long as the callback
  EvalOptions& options = *shared;
  add_model_options(*verb, options.model, UsesData::yes);
  verb->add_option("--attention", options.attention,
                   "Further attentions to evaluate, or files of specs per layer (FILE.json); "
                   "coterie help spec explains them")
      ->type_name("SPEC");
  train::add_choice(*verb, "--split", options.split, {"valid", "test"}, "Held-out data to use");
  train::add_number(*verb, "--batches", options.batches, 0, 1 << 30, "Number of batches; all if 0");
  train::add_number(*verb, "--rows", options.rows, 0, 1 << 20, "Batch size; as in training if 0");
  train::add_number(*verb, "--seed", options.seed, 0, std::numeric_limits<std::uint64_t>::max(),
                    "Random seed of clusters");
  train::add_number(*verb, "--beam", options.model.beam, 0, 1024,
                    "speech: prefixes kept by the decoding, 1 is greedy; as in training if 0");
  verb->add_flag("--json", options.json, "Print JSON lines instead of the table");
  verb->footer(kEvalExamples);
  verb->callback([shared] { run_eval(*shared); });
}

}  // namespace coterie::cli
