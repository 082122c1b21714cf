// SPDX-License-Identifier: MIT
// coterie train: trains a model with any attention and writes it into a folder.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "apps/coterie/interrupt.h"
#include "apps/coterie/processes.h"
#include "apps/coterie/progress.h"
#include "coterie/error.h"
#include "coterie/spec.h"
#include "formats/files.h"
#include "formats/spec_file.h"
#include "train/checkpoint.h"
#include "train/corpus.h"
#include "train/option_values.h"
#include "train/options.h"
#include "train/trainer.h"
#include "verbs.h"

namespace coterie::cli {
namespace {

struct TrainVerb {
  train::Config config;
  bool resume = false, dry_run = false, profile = false;
  int processes = 0, timeout = 600;
};

// "runs/copy-full-1": task, names of the mechanisms, and the first free number.
std::string free_folder(const train::Config& config) {
  std::string name = "runs/" + config.task;
  std::vector<std::string> names;
  for (const AttentionSpec& spec : train::layer_attention(config)) {
    for (const HeadGroup& group : spec.groups) {
      const std::string mechanism = mechanism_name(group.mechanism);
      if (std::find(names.begin(), names.end(), mechanism) != names.end()) continue;
      names.push_back(mechanism);
      name += "-" + mechanism;
    }
  }
  int number = 1;
  while (std::filesystem::exists(fmt::format("{}-{}", name, number))) ++number;
  return fmt::format("{}-{}", name, number);
}

// Reads the options of the resumed run, except those given on the command line, which must be ones
// that a resumed run may change.
void read_resumed_config(CLI::App& verb, train::Config& config) {
  if (config.out.empty()) {
    throw CLI::ValidationError("--resume", "expected --out FOLDER, the run to resume; got none");
  }
  const std::string path = config.out + "/config.toml";
  if (!std::filesystem::exists(path)) {
    throw CLI::ValidationError("--resume",
                               "no run to resume in " + config.out + ": there is no config.toml");
  }
  const std::string text = train::read_file(path, train::kConfigFile);
  const bool data_given = verb.count("--data") > 0;
  train::apply_config(verb, text, path);
  for (const train::OptionChange& change :
       train::option_changes(train::parse_config(text, path), config)) {
    if (change.may_change || change.name == "out") continue;
    // Parameters of another model or vocabulary do not fit.
    const bool fits = !change.name.starts_with("model.") && !change.name.starts_with("text.") &&
                      change.name != "task";
    throw CLI::ValidationError(
        "--" + change.name,
        fmt::format("a resumed run keeps its {}: expected {}; got {}. For a new run{}: coterie "
                    "train{} --out FOLDER --{} ...",
                    change.name, change.before, change.after, fits ? " with its parameters" : "",
                    fits ? " --init-from " + config.out : "", change.name));
  }
  if (config.data == train::kStandardInput && !data_given) {
    throw CLI::ValidationError("--data",
                               "expected the text of the run, which it read from "
                               "standard input and did not keep: give it with --data FILE");
  }
}

// "bits per byte 2.376 on all validation data; bytes by frequency 4.93"
void print_scores(const train::Config& config, const train::Task& task,
                  const train::TrainResult& result) {
  const char* const metric = train::metric_name(task.metric());
  if (!result.evaluation) return;
  const train::Evaluation& last = *result.evaluation;
  fmt::print("{} {:.4g} on {} validation data ({} targets)", metric, last.metric,
             last.share == 1.0 ? "all" : fmt::format("{:.2g} % of the", 100 * last.share),
             last.score.count);
  for (const train::Baseline& baseline : task.baselines()) {
    fmt::print("; {} {:.4g}", baseline.name, baseline.value);
  }
  for (const auto& [name, score] : last.strata) {
    if (score.count > 0 && task.metric() == train::Metric::perplexity) {
      fmt::print("; {} {:.4g}", name, metric_value(task.metric(), score));
    }
  }
  for (const std::string& note : task.notes()) fmt::print("; {}", note);
  fmt::print("\n");
  if (!result.state.best) return;
  fmt::print("best {} during training {:.4g} at step {}{}\n", metric, *result.state.best,
             result.state.best_step,
             config.train.eval_batches > 0
                 ? fmt::format(", on the first {} batches", config.train.eval_batches)
                 : "");
}

void print_result(const train::Config& config, const train::Task& task,
                  const train::TrainResult& result) {
  if (result.reason == "finished") {
    fmt::print(
        "{} has finished its {} steps: nothing to do (--train.steps with a larger number "
        "continues it)\ncheckpoint {}\n",
        config.out, result.state.step, result.checkpoint);
    return;
  }
  fmt::print("{} with {}: {} of {} steps in {}", config.task, train::attention_text(config),
             result.state.step, config.train.steps, duration_text(result.state.seconds));
  if (result.reason == "patience") {
    fmt::print(", stopped after {} validations without improvement", config.train.patience);
  }
  fmt::print("\n");
  print_scores(config, task, result);
  if (!result.checkpoint.empty()) fmt::print("checkpoint {}\n", result.checkpoint);
  if (result.reason == "interrupted") {
    const bool piped = config.data == train::kStandardInput;
    fmt::print("interrupted; continue with: coterie train --out {} --resume{}\n", config.out,
               piped ? " --data FILE, which has the text of standard input" : "");
    std::fflush(stdout);
  }
}

void print_profile(const train::StepProfile& profile) {
  const auto print = [](const train::ProfileRow& row) {
    fmt::print("{:>10.3f} ms{:>8.0f}  {}\n", row.milliseconds, row.calls, row.name);
  };
  fmt::print("\n{:>10.3f} ms of a step while profiled, by part, with the number of kernels\n",
             profile.milliseconds);
  std::for_each(profile.parts.begin(), profile.parts.end(), print);
  constexpr std::size_t kMost = 40;
  fmt::print("by kernel\n");
  for (std::size_t i = 0; i < std::min(kMost, profile.kernels.size()); ++i) {
    print(profile.kernels[i]);
  }
}

void print_dry_run(const train::Config& config, const train::Task& task, bool profile,
                   train::Ranks* ranks) {
  const int timed = profile ? 20 : 2;
  const train::DryRun found = train::dry_run(config, task, timed, profile, ranks);
  if (ranks != nullptr && !ranks->first()) return;
  const auto steps = static_cast<double>(config.train.steps);
  const double seconds = steps * found.step_seconds + found.evaluation_seconds;
  fmt::print("{} with {}\n", config.task, train::attention_text(config));
  fmt::print("  parameters  {}\n", found.parameters);
  fmt::print("  memory      {:.0f} MiB at the peak, measured over {} steps on {}\n",
             static_cast<double>(found.peak_bytes) / (1 << 20), timed + 1, config.device);
  fmt::print("  speed       {} tokens/s, {:.3g} s per step of {} tokens\n",
             count_text(static_cast<double>(found.batch_tokens) / found.step_seconds),
             found.step_seconds, found.batch_tokens);
  fmt::print("  processor   {:.3g} s per step, all threads together\n", found.step_cpu_seconds);
  if (found.centroid_seconds > 0) {
    fmt::print("  centroids   {:.3g} s to initialise them from the first batch\n",
               found.centroid_seconds);
  }
  fmt::print("  time        {} for {} steps, {} of it for validation\n", duration_text(seconds),
             config.train.steps, duration_text(found.evaluation_seconds));
  if (profile) print_profile(found.profile);
  fmt::print("nothing was written\n");
}

// Relative paths would depend on where later commands are run.
void make_absolute(std::string& path) {
  if (path.empty() || path == train::kStandardInput) return;
  path = std::filesystem::absolute(path).lexically_normal().string();
}

// With the vocabulary of the run that the parameters come from.
std::unique_ptr<train::Task> task_of(const train::Config& config, bool resume) {
  const std::string& source = resume ? config.out : config.init_from;
  if (source.empty() || (resume && train::Checkpoints(source).steps().empty())) {
    return train::make_task(config);
  }
  const train::TaskFiles files =
      train::load_checkpoint(train::find_checkpoint(source, !resume, nullptr)).files;
  return files.empty() ? train::make_task(config) : train::make_task(config, &files);
}

// Trains alone (`ranks` is null) or as one of several ranks, of which the first one reports.
void train_and_report(TrainVerb& options, train::Ranks* ranks) {
  train::Config& config = options.config;
  const std::unique_ptr<train::Task> task = task_of(config, options.resume);
  if (options.dry_run || options.profile) {
    config.out.clear();
    print_dry_run(config, *task, options.profile, ranks);
    return;
  }
  const bool first = ranks == nullptr || ranks->first();
  if (config.out.empty() && first) config.out = free_folder(config);
  if (ranks != nullptr) config.out = ranks->from_first(config.out);
  Progress progress;
  train::TrainHooks hooks;
  hooks.ranks = ranks;
  if (first) {
    hooks.progress = [&](const train::ProgressLine& line) { progress.show(line); };
    hooks.validation = [&](std::int64_t done, std::int64_t all) {
      progress.show_parts("validation", done, all, "batches");
    };
    hooks.warn = [&](const std::string& line) { progress.warn(line); };
  }
  hooks.interrupted = &catch_interrupts(ranks == nullptr ? Interrupts::alone
                                        : first          ? Interrupts::first_rank
                                                         : Interrupts::other_rank);
  const train::TrainResult result = train::train(config, *task, options.resume, hooks);
  progress.clear();
  if (first) print_result(config, *task, result);
  if (result.reason == "interrupted") throw Interrupted();
}

// A restarted run continues from its last checkpoint.
void resume_if_restarted(const train::Place& place, TrainVerb& options) {
  const std::string& out = options.config.out;
  if (place.restarts_allowed && out.empty() && !options.dry_run && !options.profile) {
    throw CLI::ValidationError("--out",
                               "expected a folder, in which a restarted run continues; got none");
  }
  if (place.restarts > 0 && std::filesystem::exists(out + "/config.toml")) options.resume = true;
}

void run_train(CLI::App& verb, TrainVerb& options) {
  train::Config& config = options.config;
  if (options.processes > 0) start_processes(options.processes);
  const std::optional<train::Place> place = own_place();
  if (place) resume_if_restarted(*place, options);
  if (options.resume) read_resumed_config(verb, config);
  if (train::is_spec_file(config.attention)) {
    const auto later = config.attention_at;  // overrides the file
    train::set_attention(config, config.attention);
    config.attention_at.insert(config.attention_at.end(), later.begin(), later.end());
  }
  make_absolute(config.data);
  make_absolute(config.init_from);
  make_absolute(config.text.tokenizer);
  train::check_task_options(config);
  if (!place) {
    if (config.train.context > 1) {
      throw CLI::ValidationError(
          "--train.context", fmt::format("expected ranks that {} divides; got one process: start "
                                         "more with --processes or torchrun",
                                         config.train.context));
    }
    return train_and_report(options, nullptr);
  }
  const std::unique_ptr<train::Ranks> ranks = meet_ranks(*place, config, options.timeout);
  try {
    train_and_report(options, ranks.get());
  } catch (const std::exception& error) {
    const std::string message = ranks->explain(error);
    const bool known = dynamic_cast<const Error*>(&error) != nullptr;
    if (known || message.starts_with("[ranks]")) throw Error(message);
    throw std::runtime_error(message);
  }
}

const char* const kTrainExamples =
    R"help(The folder of a run contains config.toml (all options, for --config), log.jsonl
(one JSON object per line) and checkpoints/. Ctrl-C finishes the step, saves a
checkpoint and exits; --resume continues exactly from the last checkpoint.
Started by torchrun or srun, processes train together (docs/scaling.md).

Examples:
  coterie train --task copy
  coterie train --task copy --attention "i-clustered(clusters=16)" --seed 2
  coterie train --task bytes --data corpus/ --length 512 --out runs/mine \
    --attention "2*local(window=64)+2*routing(clusters=8,window=64)"
  coterie train --out runs/mine --resume
  coterie train --config runs/mine/config.toml --out runs/other --seed 2
  coterie train --processes 2 --task copy
  torchrun --nproc-per-node 8 --no-python coterie train --device cuda \
    --out runs/large

)help";

}  // namespace

void add_train(CLI::App& program) {
  CLI::App* verb = program.add_subcommand("train", "Train a model with any attention");
  const auto shared = std::make_shared<TrainVerb>();  // lives as long as the callback
  train::add_options(*verb, shared->config);
  verb->add_flag("--resume", shared->resume,
                 "Continue the run in --out; options that are not given keep their values")
      ->group("Run")
      ->configurable(false);
  verb->add_flag("--dry-run", shared->dry_run,
                 "Train three steps, print parameters, memory, speed and time, write nothing")
      ->group("Run")
      ->configurable(false);
  verb->add_flag("--profile", shared->profile,
                 "Like --dry-run with 20 steps, then print where the time of a step goes")
      ->group("Run")
      ->configurable(false);
  train::add_number(*verb, "--processes", shared->processes, 0, 1024,
                    "Number of processes to start on this machine with torchrun; this one if 0")
      ->group("Run")
      ->configurable(false);
  train::add_number(*verb, "--timeout", shared->timeout, 1, 1 << 20,
                    "Seconds to wait for a rank that does not answer")
      ->group("Run")
      ->configurable(false);
  verb->footer(kTrainExamples);
  verb->callback([verb, shared] { run_train(*verb, *shared); });
}

}  // namespace coterie::cli
