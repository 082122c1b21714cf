// SPDX-License-Identifier: MIT
// coterie generate: text from a trained causal model.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <string>
#include <vector>

#include "apps/coterie/loaded_model.h"
#include "train/sample.h"
#include "verbs.h"

namespace coterie::cli {
namespace {

struct GenerateOptions {
  std::string checkpoint;
  std::string prompt = "\n";
  train::SampleOptions sample;
};

// A multi-byte character is written byte by byte; the terminal assembles it.
void run_generate(const GenerateOptions& options) {
  LoadedModel loaded = load_model(options.checkpoint);
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
  verb->add_option("checkpoint", options.checkpoint,
                   "Checkpoint folder, or folder of a run (uses its best checkpoint)")
      ->required()
      ->type_name("FOLDER");
  verb->add_option("--prompt", options.prompt, "Start of the text; a line break if not given")
      ->type_name("TEXT");
  verb->add_option("--tokens", options.sample.tokens, "Number of tokens to generate")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 30).description(""))
      ->type_name("N")
      ->capture_default_str();
  verb->add_option(
          "--temperature", options.sample.temperature,
          "Sampling temperature; below 1 favours likely tokens, 0 always takes the likeliest")
      ->check(CLI::NonNegativeNumber.description(""))
      ->type_name("NUMBER")
      ->capture_default_str();
  verb->add_option("--top-k", options.sample.top_k,
                   "Sample from the k likeliest tokens only; all if 0")
      ->check(CLI::NonNegativeNumber.description(""))
      ->type_name("K")
      ->capture_default_str();
  verb->add_option("--top-p", options.sample.top_p,
                   "Sample from the smallest set of likeliest tokens with this total probability")
      ->check(CLI::Range(1e-9, 1.0).description(""))
      ->type_name("P")
      ->capture_default_str();
  verb->add_option("--seed", options.sample.seed, "Random seed; equal seeds give equal texts")
      ->type_name("N")
      ->capture_default_str();
  verb->footer(kExamples);
  verb->callback([shared] { run_generate(*shared); });
}

}  // namespace coterie::cli
