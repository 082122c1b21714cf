// SPDX-License-Identifier: MIT
// coterie generate: text or images from a trained causal model.
#include <fmt/core.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "apps/coterie/loaded_model.h"
#include "apps/coterie/progress.h"
#include "coterie/error.h"
#include "formats/files.h"
#include "train/option_values.h"
#include "train/pictures.h"
#include "train/sample.h"
#include "train/text_stream.h"
#include "train/trainer.h"
#include "verbs.h"

namespace coterie::cli {
namespace {

struct GenerateOptions {
  ModelOptions model;
  std::optional<std::string> prompt, prompt_file;
  std::vector<std::string> stops;
  std::string out;  // picture
  std::uint32_t samples = 1;
  bool stats = false;
  train::SampleOptions sample;
};

using Clock = std::chrono::steady_clock;

double seconds_from(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

std::string read_standard_input() {
  constexpr std::uint64_t kMost = train::kAnyFile.bytes;
  std::string text, block(1 << 16, '\0');
  while (const std::size_t count = std::fread(block.data(), 1, block.size(), stdin)) {
    text.append(block, 0, count);
    if (text.size() > kMost) {
      throw Error(fmt::format("[generate] the prompt on standard input has more than {} bytes",
                              train::size_text(kMost)));
    }
  }
  if (std::ferror(stdin) != 0) throw Error("[generate] cannot read the prompt from standard input");
  return text;
}

std::string prompt_text(const GenerateOptions& options) {
  if (options.prompt && options.prompt_file) {
    throw Error("[generate] --prompt and --prompt-file both give a prompt; use one of them");
  }
  if (!options.prompt_file) return options.prompt.value_or("\n");
  return *options.prompt_file == "-" ? read_standard_input()
                                     : train::read_file(*options.prompt_file);
}

// "8000 tokens in 0.4 s, 20.1k tokens/s"
std::string speed_text(std::int64_t tokens, double seconds) {
  return fmt::format("{} token{} in {:.3f} s, {} tokens/s", tokens, tokens == 1 ? "" : "s", seconds,
                     count_text(static_cast<double>(tokens) / std::max(seconds, 1e-9)));
}

train::ReadPrompt read_prompt(torch_api::LanguageModel& model,
                              const std::vector<std::int64_t>& prompt) {
  Progress progress;
  const auto show = [&](std::int64_t done) {
    progress.show_parts("reading the prompt", done, static_cast<std::int64_t>(prompt.size()),
                        "tokens");
  };
  show(0);
  return train::read_prompt(model, prompt, show);
}

void write_text(const std::string& text) {
  std::fwrite(text.data(), 1, text.size(), stdout);
  std::fflush(stdout);
}

// Prints the prompt and its continuation; returns the number of new tokens.
std::int64_t show_sample(const train::Task& task, torch_api::LanguageModel& model,
                         const std::string& prompt, const train::ReadPrompt& read,
                         const GenerateOptions& options, std::uint32_t number) {
  train::StopFilter stops(options.stops);
  train::Utf8Filter characters;
  train::SampleOptions own = options.sample;
  own.number = number;
  std::int64_t tokens = 0;
  write_text(characters.push(prompt));
  train::sample(model, read, own, [&](std::int64_t token) {
    ++tokens;
    write_text(characters.push(stops.push(task.decode({token}))));
    return !stops.stopped();
  });
  write_text(characters.push(stops.finish()) + "\n");
  return tokens;
}

void draw_samples(const std::shared_ptr<torch_api::ImageModelImpl>& model,
                  const GenerateOptions& options) {
  constexpr std::int64_t kColumns = 8, kScale = 3;
  Progress progress;
  std::vector<train::Picture> pictures;
  train::SampleOptions own = options.sample;
  progress.show_parts("drawing", 0, options.samples, "images");
  for (own.number = 0; own.number < options.samples; ++own.number) {
    pictures.push_back(train::sample_image(model, own));
    progress.show_parts("drawing", own.number + 1, options.samples, "images");
  }
  const std::int64_t columns = std::min<std::int64_t>(kColumns, options.samples);
  train::write_file(options.out, train::encode_png(contact_sheet(pictures, columns, kScale)));
  fmt::print("{}\n", options.out);
}

// Options given on the command line that do not go with the model.
void refuse_options(const CLI::App& verb, const std::vector<const char*>& names,
                    const char* reason) {
  for (const char* const name : names) {
    if (verb.count(name) == 0) continue;
    throw Error(fmt::format("[generate] {} {}; leave it out", name, reason));
  }
}

void run_generate(const GenerateOptions& options, const CLI::App& verb) {
  const std::string text = prompt_text(options);
  const train::StopFilter checked(options.stops);  // before the model is loaded
  LoadedModel loaded = load_model(options.model, UsesData::no);
  if (auto images = std::dynamic_pointer_cast<torch_api::ImageModelImpl>(loaded.model)) {
    refuse_options(verb, {"--prompt", "--prompt-file", "--stop", "--tokens", "--stats"},
                   "is for text; got a model of images");
    if (options.out.empty()) {
      throw Error("[generate] expected --out FILE.png, the picture to write; got none");
    }
    return draw_samples(images, options);
  }
  refuse_options(verb, {"--out"}, "is for models of images; got a model of text");
  const std::vector<std::int64_t> prompt = loaded.task->encode(text);
  if (prompt.empty()) throw Error("[generate] the prompt is empty; give at least one character");
  torch_api::LanguageModel model = train::language_model(loaded.model, *loaded.task);
  const Clock::time_point start = Clock::now();
  const train::ReadPrompt read = read_prompt(model, prompt);
  const double reading = seconds_from(start);
  const Clock::time_point begin = Clock::now();
  std::int64_t tokens = 0;
  for (std::uint32_t i = 0; i < options.samples; ++i) {
    if (options.samples > 1) {
      write_text(fmt::format("--- sample {} of {} ---\n", i + 1, options.samples));
    }
    tokens += show_sample(*loaded.task, model, loaded.task->decode(prompt), read, options, i);
  }
  if (!options.stats && ::isatty(STDERR_FILENO) == 0) return;
  fmt::print(stderr, "prompt: {}\ngenerated: {}\n",
             speed_text(static_cast<std::int64_t>(prompt.size()), reading),
             speed_text(tokens, seconds_from(begin)));
}

const char* const kGenerateExamples =
    R"help(The model must be causal, with full, local, strided, oracle-top or strict
routing attention. Attentions whose selection sees future tokens cannot
generate.

Text goes to standard output, progress and speed to standard error. Images
(--task images --images.predict pixels) are drawn into one PNG file. The report
shows samples.png in the run's folder.

Examples:
  coterie generate runs/bytes-full --prompt "namespace "
  coterie generate runs/bytes-full --temperature 0.7 --top-p 0.9
  coterie generate runs/bytes-full/checkpoints/step-00000200 --tokens 80
  coterie generate runs/bytes-full --prompt-file chapter.txt --samples 3
  git log -1 | coterie generate runs/bytes-full --prompt-file - --stop "commit "
  coterie generate runs/digits --samples 16 --out runs/digits/samples.png
)help";

}  // namespace

void add_generate(CLI::App& program) {
  CLI::App* verb =
      program.add_subcommand("generate", "Generate text or images with a trained model");
  const auto shared = std::make_shared<GenerateOptions>();  // lives as long as the callback
  GenerateOptions& options = *shared;
  add_model_options(*verb, options.model, UsesData::no);
  verb->add_option("--prompt", options.prompt, "Start of the text; a line break if not given")
      ->type_name("TEXT");
  verb->add_option("--prompt-file", options.prompt_file,
                   "File with the start of the text, all of its bytes; - is standard input")
      ->type_name("FILE");
  train::add_number(*verb, "--tokens", options.sample.tokens, 1, 1 << 30,
                    "Number of tokens to generate");
  verb->add_option("--stop", options.stops,
                   "Text before which generation ends; may be given several times")
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
      ->allow_extra_args(false)
      ->type_name("TEXT");
  train::add_number(*verb, "--samples", options.samples, 1, 1 << 20,
                    "Number of texts from the same prompt, or of images");
  verb->add_option("--out", options.out, "Images: the PNG file to write")->type_name("FILE");
  train::add_number(
      *verb, "--temperature", options.sample.temperature, 0.0, 1e6,
      "Sampling temperature; below 1 favours likely tokens, 0 always takes the likeliest");
  train::add_number(*verb, "--top-k", options.sample.top_k, 0, 1 << 30,
                    "Sample from the k likeliest tokens only; all if 0");
  train::add_number(*verb, "--top-p", options.sample.top_p, 1e-9, 1.0,
                    "Sample from the smallest set of likeliest tokens with this total probability");
  train::add_number(*verb, "--seed", options.sample.seed, 0,
                    std::numeric_limits<std::uint64_t>::max(),
                    "Random seed; equal seeds give equal texts and images");
  verb->add_flag("--stats", options.stats,
                 "Show the speed of prompt and generation also if stderr is not a terminal");
  verb->footer(kGenerateExamples);
  verb->callback([shared, verb] { run_generate(*shared, *verb); });
}

}  // namespace coterie::cli
