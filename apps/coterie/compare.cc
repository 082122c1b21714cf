// SPDX-License-Identifier: MIT
// coterie compare: the same small model with every attention on the built-in tasks.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "apps/coterie/interrupt.h"
#include "apps/coterie/progress.h"
#include "coterie/runtime.h"
#include "formats/files.h"
#include "report/report.h"
#include "train/compare.h"
#include "train/option_values.h"
#include "train/options.h"
#include "verbs.h"

namespace coterie::cli {
namespace {

struct CompareOptions {
  std::string out = "out";
  std::string bench;
  std::vector<std::string> sections;
  std::string device = "cpu";
  int threads = 0;
};

std::vector<std::string> sections_of(const std::vector<train::PlannedRun>& plan) {
  std::vector<std::string> names;
  for (const train::PlannedRun& run : plan) {
    if (std::find(names.begin(), names.end(), run.section) == names.end()) {
      names.push_back(run.section);
    }
  }
  return names;
}

std::vector<train::PlannedRun> chosen_plan(const CompareOptions& options) {
  std::vector<train::PlannedRun> plan = train::comparison_plan(options.out);
  const std::vector<std::string> names = sections_of(plan);
  for (const std::string& section : options.sections) {
    if (std::find(names.begin(), names.end(), section) == names.end()) {
      throw CLI::ValidationError("--sections",
                                 fmt::format("expected one of \"{}\"; got \"{}\"",
                                             CLI::detail::join(names, "\", \""), section));
    }
  }
  const auto unwanted = [&](const train::PlannedRun& run) {
    const auto& wanted = options.sections;
    return !wanted.empty() && std::find(wanted.begin(), wanted.end(), run.section) == wanted.end();
  };
  plan.erase(std::remove_if(plan.begin(), plan.end(), unwanted), plan.end());
  for (train::PlannedRun& run : plan) {
    run.config.threads = options.threads;
    run.config.device = options.device;
  }
  return plan;
}

// The scores by stratum on one line: "distance 16-31 0.97, distance 32-63 0.91".
std::string strata_text(const train::RunLog& log) {
  const train::LoggedEvaluation* const best = log.best_evaluation();
  std::string text;
  for (const auto& [name, value] : best ? best->strata : train::NamedValues()) {
    text += fmt::format("{}{} {:.3f}", text.empty() ? "" : ", ", name, value);
  }
  return text;
}

void print_section(const std::string& section, const std::vector<train::ComparedRun>& runs) {
  const train::ComparedRun* first = nullptr;
  std::size_t width = 9;
  for (const train::ComparedRun& run : runs) {
    if (run.plan.section != section) continue;
    if (first == nullptr) first = &run;
    width = std::max(width, run.log.attention.size());
  }
  if (first == nullptr) return;
  fmt::print("\n{}: {}", section, first->log.metric);
  for (const auto& [name, value] : first->log.baselines) fmt::print("; {} {:.4g}", name, value);
  fmt::print("\n  {:<{}}  {:>6}  {:>8}  {:>7}  {:>8}\n", "attention", width, "tokens", "result",
             "seconds", "tokens/s");
  for (const train::ComparedRun& run : runs) {
    if (run.plan.section != section) continue;
    fmt::print("  {:<{}}  {:>6}  {:>8.4f}  {:>7.1f}  {:>8}\n", run.log.attention, width,
               run.plan.config.length, run.log.result(), run.log.seconds(),
               count_text(run.log.tokens_per_s()));
    const std::string strata = strata_text(run.log);
    if (!strata.empty()) fmt::print("      {}\n", strata);
  }
}

std::string write_report(const CompareOptions& options,
                         const std::vector<train::ComparedRun>& runs) {
  train::ReportInputs inputs;
  for (const train::ComparedRun& run : runs) inputs.runs.push_back(run.plan.config.out);
  inputs.bench = options.bench;
  const std::string path = options.out + "/report.html";
  train::write_file(path, train::make_report(inputs));
  return std::filesystem::absolute(path).lexically_normal().string();
}

void run_compare(const CompareOptions& options) {
  const std::vector<train::PlannedRun> plan = chosen_plan(options);
  Progress progress;
  std::size_t finished = 0;
  train::TrainHooks hooks;
  hooks.progress = [&](train::ProgressLine line) {
    line.label = fmt::format("{}/{} {}", finished + 1, plan.size(), line.label);
    progress.show(line);
  };
  hooks.validation = [&](std::int64_t done, std::int64_t all) {
    progress.show_parts("validation", done, all, "batches");
  };
  hooks.warn = [&](const std::string& line) { progress.warn(line); };
  hooks.interrupted = &catch_interrupts();
  const std::vector<train::ComparedRun> runs =
      train::compare(plan, hooks, [&](const train::ComparedRun&) { ++finished; });
  progress.clear();
  for (const std::string& section : sections_of(plan)) print_section(section, runs);
  if (runs.size() < plan.size()) {
    fmt::print("\nInterrupted after {} of {} runs; run the same command again to continue.\n",
               runs.size(), plan.size());
    std::fflush(stdout);
    throw Interrupted();
  }
  fmt::print("\nReport: {}\n", write_report(options, runs));
}

const char* const kCompareExamples =
    R"help(Finished runs with the same options are not trained again; interrupted ones are
resumed. Runs in --out with other options are replaced.

Examples:
  coterie compare
  coterie compare --sections bytes --out /tmp/compare
)help";
const char* const kCompareCudaExample = "  coterie compare --device cuda --out /tmp/compare-gpu\n";

}  // namespace

void add_compare(CLI::App& program) {
  CLI::App* verb = program.add_subcommand(
      "compare", "Train a small model with every attention, and write a report");
  const auto shared = std::make_shared<CompareOptions>();  // lives as long as the callback
  CompareOptions& options = *shared;
  verb->add_option("--out", options.out, "Output folder for the runs and report.html")
      ->type_name("FOLDER")
      ->capture_default_str();
  verb->add_option("--bench", options.bench,
                   "Output of coterie bench --json to include in the report")
      ->type_name("FILE");
  verb->add_option("--sections", options.sections, "Sections to run; all if not given")
      ->type_name("NAME");
  verb->add_option("--device", options.device, train::device_help())
      ->check(CLI::Validator(train::check_device, ""))
      ->type_name("DEVICE")
      ->capture_default_str();
  train::add_number(*verb, "--threads", options.threads, 0, kMaxThreads,
                    "Number of CPU threads; all cores if 0");
  verb->footer(std::string(kCompareExamples) +
               (train::built_with_cuda() ? kCompareCudaExample : ""));
  verb->callback([shared] { run_compare(*shared); });
}

}  // namespace coterie::cli
