// SPDX-License-Identifier: MIT
// coterie generate: text from a trained causal model.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <string>
#include <vector>

#include "apps/coterie/loaded_model.h"
#include "train/option_values.h"
#include "train/sample.h"
#include "verbs.h"

namespace coterie::cli {
namespace {

struct GenerateOptions {
  ModelOptions model;
  std::string prompt = "\n";
  train::SampleOptions sample;
};

// A multi-byte character is written byte by byte; the terminal assembles it.
void run_generate(const GenerateOptions& options) {
  LoadedModel loaded = load_model(options.model, UsesData::no);
  const std::vector<std::int64_t> prompt = loaded.task->encode(options.prompt);
  const auto show = [&](const std::vector<std::int64_t>& tokens) {
    const std::string text = loaded.task->decode(tokens);
    std::fwrite(text.data(), 1, text.size(), stdout);
    std::fflush(stdout);
  };
  show(prompt);
  train::sample(loaded.model, prompt, options.sample, [&](std::int64_t token) { show({token}); });
  fmt::print("\n");
}

const char* const kExamples =
    "The model must be causal, with full, local, strided, oracle-top or strict routing attention.\n"
    "Attentions whose selection sees future tokens cannot generate.\n"
    "\n"
    "Examples:\n"
    "  coterie generate runs/bytes-full --prompt \"namespace \"\n"
    "  coterie generate runs/bytes-full/checkpoints/step-00000200 --temperature 0.7 --top-p 0.9\n"
    "  coterie generate runs/bytes-full --temperature 0 --tokens 80\n";

}  // namespace

void add_generate(CLI::App& program) {
  CLI::App* verb = program.add_subcommand("generate", "Generate text with a trained model");
  const auto shared = std::make_shared<GenerateOptions>();  // lives as long as the callback
  GenerateOptions& options = *shared;
  add_model_options(*verb, options.model, UsesData::no);
  verb->add_option("--prompt", options.prompt, "Start of the text; a line break if not given")
      ->type_name("TEXT");
  train::add_number(*verb, "--tokens", options.sample.tokens, 1, 1 << 30,
                    "Number of tokens to generate");
  train::add_number(
      *verb, "--temperature", options.sample.temperature, 0.0, 1e6,
      "Sampling temperature; below 1 favours likely tokens, 0 always takes the likeliest");
  train::add_number(*verb, "--top-k", options.sample.top_k, 0, 1 << 30,
                    "Sample from the k likeliest tokens only; all if 0");
  train::add_number(*verb, "--top-p", options.sample.top_p, 1e-9, 1.0,
                    "Sample from the smallest set of likeliest tokens with this total probability");
  train::add_number(*verb, "--seed", options.sample.seed, 0,
                    std::numeric_limits<std::uint64_t>::max(),
                    "Random seed; equal seeds give equal texts");
  verb->footer(kExamples);
  verb->callback([shared] { run_generate(*shared); });
}

}  // namespace coterie::cli
