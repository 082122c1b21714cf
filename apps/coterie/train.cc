// SPDX-License-Identifier: MIT
// coterie train: trains a model with any attention and writes it into a folder.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <filesystem>
#include <memory>
#include <string>

#include "apps/coterie/interrupt.h"
#include "apps/coterie/progress.h"
#include "coterie/error.h"
#include "coterie/spec.h"
#include "formats/files.h"
#include "train/options.h"
#include "train/trainer.h"
#include "verbs.h"

namespace coterie::cli {
namespace {

struct TrainVerb {
  train::Config config;
  bool resume = false;
};

// "runs/copy-full-1": task, names of the mechanisms, and the first free number.
std::string free_folder(const train::Config& config) {
  std::string name = "runs/" + config.task;
  for (const HeadGroup& group : AttentionSpec::parse(config.attention).groups) {
    name += std::string("-") + mechanism_name(group.mechanism);
  }
  int number = 1;
  while (std::filesystem::exists(fmt::format("{}-{}", name, number))) ++number;
  return fmt::format("{}-{}", name, number);
}

// Reads the options of the resumed run, except those given on the command line.
void read_resumed_config(CLI::App& verb, const std::string& out) {
  if (out.empty()) {
    throw CLI::ValidationError("--resume", "expected --out FOLDER, the run to resume; got none");
  }
  const std::string path = out + "/config.toml";
  if (!std::filesystem::exists(path)) {
    throw CLI::ValidationError("--resume",
                               "no run to resume in " + out + ": there is no config.toml");
  }
  train::apply_config(verb, train::read_file(path, train::kConfigFile), path);
}

void print_result(const train::Config& config, const train::Task& task,
                  const train::TrainResult& result) {
  fmt::print("{} with {}: {} of {} steps in {}", config.task, config.attention, result.state.step,
             config.train.steps, duration_text(result.state.seconds));
  if (result.reason == "patience") {
    fmt::print(", stopped after {} validations without improvement", config.train.patience);
  }
  fmt::print("\n");
  const char* const metric = train::metric_name(task.metric());
  if (result.evaluation) {
    fmt::print("{} on held-out data {:.4g}", metric, result.evaluation->metric);
    if (result.state.best) {
      fmt::print(", best {:.4g} at step {}", *result.state.best, result.state.best_step);
    }
    for (const train::Baseline& baseline : task.baselines()) {
      fmt::print("; {} {:.4g}", baseline.name, baseline.value);
    }
    fmt::print("\n");
  }
  fmt::print("checkpoint {}\n", result.checkpoint);
  if (result.reason == "interrupted") {
    fmt::print("interrupted; continue with: coterie train --out {} --resume\n", config.out);
  }
}

void run_train(CLI::App& verb, TrainVerb& options) {
  train::Config& config = options.config;
  if (options.resume) read_resumed_config(verb, config.out);
  const std::unique_ptr<train::Task> task = train::make_task(config);
  if (config.out.empty()) config.out = free_folder(config);
  Progress progress;
  train::TrainHooks hooks;
  hooks.progress = [&](const train::ProgressLine& line) { progress.show(line); };
  hooks.warn = [&](const std::string& line) { progress.warn(line); };
  hooks.interrupted = &catch_interrupts();
  const train::TrainResult result = train::train(config, *task, options.resume, hooks);
  progress.clear();
  print_result(config, *task, result);
}

const char* const kExamples =
    "The folder of a run contains config.toml (all options, for --config), log.jsonl (one JSON "
    "object\n"
    "per line) and checkpoints/. Ctrl-C finishes the step, saves a checkpoint and exits; --resume\n"
    "continues exactly from the last checkpoint.\n"
    "\n"
    "Examples:\n"
    "  coterie train --task copy\n"
    "  coterie train --task copy --attention \"i-clustered(clusters=16)\" --train.steps 500\n"
    "  coterie train --task bytes --data corpus/ --length 512 --out runs/mine \\\n"
    "    --attention \"2*local(window=64)+2*routing(clusters=8,window=64)\"\n"
    "  coterie train --out runs/mine --resume\n"
    "  coterie train --config runs/mine/config.toml --out runs/other --seed 2\n\n";

}  // namespace

void add_train(CLI::App& program) {
  CLI::App* verb = program.add_subcommand("train", "Train a model with any attention");
  const auto shared = std::make_shared<TrainVerb>();  // lives as long as the callback
  train::add_options(*verb, shared->config);
  verb->add_flag("--resume", shared->resume,
                 "Continue the run in --out; options that are not given keep their values")
      ->group("Run")
      ->configurable(false);
  verb->footer([] { return kExamples + spec_help(); });
  verb->callback([verb, shared] { run_train(*verb, *shared); });
}

}  // namespace coterie::cli
