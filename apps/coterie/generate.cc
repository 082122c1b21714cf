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

// Bytes of a multi-byte character come one by one: the terminal puts them together.
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
    "The model must be causal and its attention exact: full, local, strided, oracle-top or strict\n"
    "routing. Modes whose selection sees the future cannot generate.\n"
    "\n"
    "Examples:\n"
    "  coterie generate runs/bytes-full --prompt \"namespace \"\n"
    "  coterie generate runs/bytes-full/checkpoints/step-00000200 --temperature 0.7 --top-p 0.9\n"
    "  coterie generate runs/bytes-full --temperature 0 --tokens 80\n";

}  // namespace

void add_generate(CLI::App& program) {
  CLI::App* verb = program.add_subcommand("generate", "Write text with a trained model");
  const auto shared = std::make_shared<GenerateOptions>();  // lives as long as the callback
  GenerateOptions& options = *shared;
  verb->add_option("checkpoint", options.checkpoint,
                   "Folder of a run (its best checkpoint is taken) or of a checkpoint")
      ->required()
      ->type_name("FOLDER");
  verb->add_option("--prompt", options.prompt,
                   "What the text begins with; a line break if not given")
      ->type_name("TEXT");
  verb->add_option("--tokens", options.sample.tokens, "Tokens to write")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 30).description(""))
      ->type_name("N")
      ->capture_default_str();
  verb->add_option("--temperature", options.sample.temperature,
                   "Below 1: likelier tokens; 0: always the likeliest")
      ->check(CLI::NonNegativeNumber.description(""))
      ->type_name("NUMBER")
      ->capture_default_str();
  verb->add_option("--top-k", options.sample.top_k, "Only the k likeliest tokens; 0: all")
      ->check(CLI::NonNegativeNumber.description(""))
      ->type_name("K")
      ->capture_default_str();
  verb->add_option("--top-p", options.sample.top_p,
                   "Only the likeliest tokens that have this probability together")
      ->check(CLI::Range(1e-9, 1.0).description(""))
      ->type_name("P")
      ->capture_default_str();
  verb->add_option("--seed", options.sample.seed, "Equal seeds write equal texts")
      ->type_name("N")
      ->capture_default_str();
  verb->footer(kExamples);
  verb->callback([shared] { run_generate(*shared); });
}

}  // namespace coterie::cli
