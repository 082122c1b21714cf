// SPDX-License-Identifier: MIT
// coterie export: runs in the formats of other programs.
#include "apps/coterie/export.h"

#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <cmath>
#include <filesystem>
#include <memory>
#include <string>

#include "coterie/error.h"
#include "formats/files.h"
#include "report/log_table.h"
#include "verbs.h"

namespace coterie::cli {
namespace {

namespace fs = std::filesystem;

struct ExportOptions {
  std::string run, format, out, attention;
};

void make_folder(const fs::path& path) {
  std::error_code error;
  if (!path.empty()) fs::create_directories(path, error);
  if (error) {
    throw Error(fmt::format("[files] cannot create folder {}: {}", path.string(), error.message()));
  }
}

void export_csv(const ExportOptions& options) {
  const std::string text = train::log_csv(train::read_log_table(options.run));
  if (options.out.empty()) {
    fmt::print("{}", text);
    return;
  }
  make_folder(fs::path(options.out).parent_path());
  train::write_file(options.out, text);
  fmt::print("{}\n", options.out);
}

// The name depends on the run's start only, so exporting again replaces the file. TensorBoard would
// show both.
void export_tensorboard(const ExportOptions& options) {
  const train::LogTable table = train::read_log_table(options.run);
  make_folder(options.out);
  const std::string path =
      fmt::format("{}/events.out.tfevents.{:010.0f}.coterie", options.out, std::floor(table.start));
  train::write_file(path, train::event_file(table.start, train::log_events(table)));
  fmt::print("{}\n", path);
}

void run_export(ExportOptions options) {
  while (options.out.size() > 1 && options.out.back() == '/') options.out.pop_back();
  if (!options.attention.empty() && options.format != "huggingface") {
    throw Error("[export] expected --attention with --to huggingface only; got it with --to " +
                options.format);
  }
  if (options.format == "csv") return export_csv(options);
  if (options.out.empty()) {
    throw Error("[export] expected a folder in --out for --to " + options.format + "; got none");
  }
  if (options.format == "tensorboard") return export_tensorboard(options);
  make_folder(fs::path(options.out).parent_path());
  export_huggingface(options.run, options.attention, options.out);
}

const char* const kExportExamples =
    R"help(csv: one row for every step and eval line of the log, to the file --out or
standard output.
  kind          step (training) or eval (validation)
  step, split   optimiser steps done; split: of eval rows
  loss          in nats; metric: the score in the unit of the task (eval)
  accuracy      fraction of correct answers (eval)
  lr, grad_norm, commitment, tokens_per_s, memory_bytes   as in log.jsonl (step)
  seconds       of training so far (step), of the evaluation (eval)
  strata.NAME   score of a part of the data (eval)
  share         part of the validation data that was used (eval)
tensorboard: an events file in the folder --out, with the same numbers as
scalars train/loss, train/lr, valid/perplexity and so on, and kept mass and
empty clusters of head groups.
huggingface: a folder that transformers loads as GPTNeoXForCausalLM, with the
tokenizer of tokens and bytes. All heads must have full attention and rotary
positions; --attention full exports weights trained with another attention for
full attention.

Examples:
  coterie export runs/tokens-full-1 --to csv --out curves.csv
  coterie export runs/tokens-full-1 --to tensorboard --out logs/full
  coterie export runs/tokens-full-1 --to huggingface --out hf/
  coterie export runs/local --to huggingface --attention full --out hf-local/
)help";

}  // namespace

void add_export(CLI::App& program) {
  CLI::App* verb = program.add_subcommand(
      "export", "Write a run for other programs: CSV, TensorBoard, Hugging Face");
  const auto shared = std::make_shared<ExportOptions>();  // lives as long as the callback
  ExportOptions& options = *shared;
  verb->add_option("run", options.run, "Run folder; for huggingface also a checkpoint")
      ->type_name("RUN")
      ->required();
  const auto check = [](std::string& text) {
    const bool known = text == "csv" || text == "tensorboard" || text == "huggingface";
    return known ? std::string()
                 : "expected one of csv, tensorboard, huggingface; got \"" + text + "\"";
  };
  verb->add_option("--to", options.format, "Format")
      ->type_name(kExportsHuggingFace ? "csv|tensorboard|huggingface" : "csv|tensorboard")
      ->check(CLI::Validator("").operation(check))
      ->required();
  verb->add_option("--out", options.out, "Output file (csv) or folder")->type_name("PATH");
  verb->add_option("--attention", options.attention,
                   "huggingface: attention to export with, instead of the trained one")
      ->type_name("SPEC");
  verb->footer(std::string(kExportsHuggingFace
                               ? ""
                               : "huggingface is not in this build: it needs torch.\n\n") +
               kExportExamples);
  verb->callback([shared] { run_export(*shared); });
}

}  // namespace coterie::cli
