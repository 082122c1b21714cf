// SPDX-License-Identifier: MIT
#include "train/options.h"

#include <fmt/core.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <limits>
#include <memory>
#include <type_traits>
#include <utility>

#include "coterie/error.h"
#include "coterie/runtime.h"
#include "formats/config_text.h"
#include "formats/files.h"
#include "formats/spec_file.h"
#include "train/option_values.h"

namespace coterie::train {
namespace {

constexpr std::int64_t kMany = 1'000'000'000;
constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 50;

// All fields: name, variable, allowed values, help text.
template <class Visitor>
void visit_fields(Config& config, Visitor& visit) {
  visit.group("Run");
  visit.text("task", config.task, "NAME",
             "What to learn: copy, recall, listops, pathfinder (generated), bytes, masked, words, "
             "tokens, imdb, retrieval (text), images, speech");
  visit.text("data", config.data, "PATH",
             "Data for text, images and speech: a file, folder or archive, or - for standard "
             "input; "
             "built-in text if empty, for bytes, masked and tokens");
  visit.size("data-limit", config.data_limit,
             "Limit on the text read from data, after decompression: 500M, 8G");
  visit.number("length", config.length, 2, 1 << 24, "Sequence length in tokens");
  visit.text(
      "attention", config.attention, "SPEC",
      "Attention of all layers; coterie help spec explains it. Or a file of specs per layer, "
      "FILE.json");
  visit.pairs(
      "attention-at", config.attention_at, "LAYERS SPEC",
      "Attention of some layers, counted from 0: 2 or 0-3. Repeatable; the last match wins");
  visit.text("out", config.out, "FOLDER",
             "Output folder of the run; a new one under runs/ if empty");
  visit.text("init-from", config.init_from, "FOLDER",
             "Start from the parameters of this checkpoint or run (its best), in a new run");
  visit.device("device", config.device, device_help());
  visit.number("threads", config.threads, 0, kMaxThreads, "Number of CPU threads; all cores if 0");
  visit.number("seed", config.seed, 0, std::numeric_limits<std::uint64_t>::max(),
               "Random seed of parameters, data and clusters; equal seeds give equal runs");

  visit.group("Task");
  visit.number("copy.symbols", config.copy.symbols, 2, 1 << 20, "copy: number of distinct symbols");
  visit.number("copy.mask", config.copy.mask, 0.0, 1.0,
               "copy: fraction of symbols that are masked");
  visit.number("recall.keys", config.recall.keys, 1, 1 << 20, "recall: number of distinct keys");
  visit.number("recall.values", config.recall.values, 1, 1 << 20,
               "recall: number of distinct values");
  visit.number("recall.pairs", config.recall.pairs, 1, 1 << 20,
               "recall: key-value pairs per sequence");
  visit.number("recall.queries", config.recall.queries, 1, 1 << 20, "recall: queries per sequence");
  visit.flag("recall.causal", config.recall.causal,
             "recall: causal attention, every query comes after its pair");
  visit.number("masked.share", config.masked.share, 0.0, 1.0,
               "masked: fraction of the bytes that are masked");
  visit.number("listops.shortest", config.listops.shortest, 0, 1 << 24,
               "listops: every expression has more tokens; a quarter of the length if 0");
  visit.number("listops.depth", config.listops.depth, 2, 64, "listops: depth limit");
  visit.number("listops.arguments", config.listops.arguments, 2, 1024,
               "listops: most arguments of an operator");
  visit.number("pathfinder.paddles", config.pathfinder.paddles, 2, 1024,
               "pathfinder: dashes of each of the two paths");
  visit.number("pathfinder.distractors", config.pathfinder.distractors, 0, 1024,
               "pathfinder: short paths without an end to be found");
  visit.choice("images.predict", config.images.predict, {"class", "pixels"},
               "images: the class of the grey image, or each value from those before it");
  visit.choice("speech.symbols", config.speech.symbols, {"characters", "phones"},
               "speech: what transcripts consist of; phones are those of AN4's dictionary");
  visit.number("speech.join", config.speech.join, 1, 1024,
               "speech: recordings that are joined to one example");
  visit.number("speech.subsample", config.speech.subsample, 1, 64,
               "speech: frames in one position of the model");
  visit.number("speech.beam", config.speech.beam, 1, 1024,
               "speech: prefixes kept by the decoding of scores; greedy if 1");
  visit.number("speech.masks", config.speech.masks, 0, 64,
               "speech: spans of time, and as many bands of cepstra, that are set to 0 in every "
               "recording for training (SpecAugment)");
  visit.number("speech.tempo", config.speech.tempo, 0.0, 0.5,
               "speech: recordings for training are slower or faster by up to this fraction");
  visit.number("text.valid", config.text.valid, 0.0, 0.5,
               "Fraction of the text held out for validation");
  visit.number("text.test", config.text.test, 0.0, 0.5,
               "Fraction of the text held out for testing");
  visit.number("text.vocabulary", config.text.vocabulary, 0, kMany,
               "words: vocabulary size, most frequent words first; all if 0. tokens: size of the "
               "vocabulary to learn; 4096 if 0");
  visit.text("text.tokenizer", config.text.tokenizer, "PATH",
             "tokens: tokenizer.json, or a folder or archive with one or with GPT-2's files; "
             "learnt from the training text if empty");

  visit.group("Model");
  visit.number("model.dim", config.model.dim, 1, 1 << 16,
               "Model width; a multiple of the number of heads");
  visit.number("model.layers", config.model.layers, 1, 1024, "Number of layers");
  visit.number("model.heads", config.model.heads, 1, 1024, "Query heads per layer");
  visit.number("model.kv-heads", config.model.kv_heads, 0, 1024,
               "Key/value heads per layer; as many as query heads if 0");
  visit.number("model.ffn", config.model.ffn, 0, 1 << 20,
               "Hidden width of the feed-forward layers; 4 times model.dim if 0");
  visit.number("model.dropout", config.model.dropout, 0.0, 0.99,
               "Dropout probability of embeddings and of the outputs of layers");
  visit.number("model.attention-dropout", config.model.attention_dropout, 0.0, 0.99,
               "Dropout probability of attention weights");
  visit.choice("model.positions", config.model.positions,
               {"automatic", "none", "sinusoidal", "learned"},
               "Position embeddings added to token embeddings; automatic: as the task needs");
  visit.number("model.embedding-std", config.model.embedding_std, 0.0, 100.0,
               "Initial standard deviation of token embeddings; as the task needs if 0");
  visit.number("model.position-base", config.model.position_base, 1.0, 1e9,
               "sinusoidal: longest wavelength divided by 2 pi");
  visit.flag("model.bias", config.model.bias, "Use biases in the projections");
  visit.flag("model.tied", config.model.tied, "Tie the output layer to the token embedding");
  visit.flag("model.recompute", config.model.recompute,
             "Recompute layers in the backward pass: slower, less memory");

  visit.group("Optimiser");
  visit.choice("optimizer.name", config.optimizer.name, {"adamw", "adafactor"},
               "Optimiser; adafactor keeps less state (row and column means of squared gradients)");
  visit.number("optimizer.lr", config.optimizer.lr, 0.0, 1e9,
               "Peak learning rate, reached after the warm-up");
  visit.number("optimizer.beta1", config.optimizer.beta1, 0.0, 0.9999,
               "adamw: decay rate of the gradient's moving average");
  visit.number("optimizer.beta2", config.optimizer.beta2, 0.0, 0.999999,
               "adamw: decay rate of the squared gradient's moving average");
  visit.number("optimizer.eps", config.optimizer.eps, 0.0, 1.0,
               "adamw: epsilon added to the denominator");
  visit.number("optimizer.weight-decay", config.optimizer.weight_decay, 0.0, 1e3,
               "Decoupled weight decay of matrices");
  visit.number("optimizer.clip", config.optimizer.clip, 0.0, 1e9,
               "Gradient norm to clip to; no clipping if 0");
  visit.flag("optimizer.relative", config.optimizer.relative,
             "adafactor: scale steps by the root mean square of each parameter");
  visit.flag(
      "optimizer.shard", config.optimizer.shard,
      "Several ranks: each keeps and steps the optimiser's state of some parameters (ZeRO-1)");
  visit.number("schedule.warmup", config.schedule.warmup, 0, kMany,
               "Warm-up steps, in which the learning rate rises linearly from 0");
  visit.choice(
      "schedule.decay", config.schedule.decay, {"constant", "rsqrt", "cosine"},
      "Learning-rate decay after the warm-up: none, 1/sqrt(step), or half a cosine to the last "
      "step");
  visit.number("schedule.floor", config.schedule.floor, 0.0, 1.0,
               "cosine: final learning rate as a fraction of optimizer.lr");

  visit.group("Training");
  visit.number("train.steps", config.train.steps, 1, kMany, "Number of optimiser steps");
  visit.number("train.batch", config.train.batch, 1, 1 << 20,
               "Batch size: sequences per optimiser step");
  visit.number("train.micro-batch", config.train.micro_batch, 0, 1 << 20,
               "Sequences per forward and backward pass, to save memory; the whole batch if 0");
  visit.number("train.context", config.train.context, 1, 1024,
               "Several ranks: number of them that share each sequence; heads are split in "
               "attention (context parallel)");
  visit.number("train.log-every", config.train.log_every, 1, kMany, "Steps between log lines");
  visit.number("train.eval-every", config.train.eval_every, 0, kMany,
               "Steps between validations; only at the end if 0");
  visit.number("train.eval-batches", config.train.eval_batches, 0, kMany,
               "Batches per validation; all if 0");
  visit.number("train.final-batches", config.train.final_batches, 0, kMany,
               "Batches of the validation at the end of the run; all if 0");
  visit.number("train.patience", config.train.patience, 0, kMany,
               "Early stopping: validations without improvement before stopping; never if 0");
  visit.number(
      "train.truncate", config.train.truncate, 0.0, 1.0,
      "Probability of cutting the sequences of a step to a random length; useful for routing");
  visit.choice("train.centroids", config.train.centroids, {"data", "random"},
               "routing: initialise centroids from the first batch or at random");
  visit.choice("train.dtype", config.train.dtype, {"f32", "bf16"},
               "Element type of matrix products; parameters are always f32");
  visit.flag("train.fast", config.train.fast,
             "Allow kernels whose results differ in their last bits from run to run: with bf16, "
             "cuDNN's backward pass of full attention on Hopper GPUs");
  visit.flag(
      "train.graph", config.train.graph,
      "Record the passes of a step as a CUDA graph and repeat it: faster where the GPU waits "
      "for the host, as with small models or batches");
  visit.number("checkpoint.every", config.checkpoint.every, 0, kMany,
               "Steps between checkpoints; only the best and the last if 0");
  visit.number("checkpoint.keep", config.checkpoint.keep, 1, kMany,
               "Number of latest checkpoints to keep, in addition to the best");
}

// "1000", "64k", "500M", "8G", as size_text writes it.
std::uint64_t parse_size(const std::string& option, const std::string& text) {
  std::uint64_t value = 0;
  const char* const end = text.data() + text.size();
  const auto read = std::from_chars(text.data(), end, value);
  const std::string_view unit(read.ptr, static_cast<std::size_t>(end - read.ptr));
  const std::size_t power = unit.empty() ? 0 : std::string_view("kMG").find(unit) + 1;  // npos: 0
  const bool known = unit.empty() || (unit.size() == 1 && power != 0);
  if (read.ec != std::errc() || !known || value == 0 || value > kMostBytes >> (10 * power)) {
    throw CLI::ValidationError(option, "expected a number of bytes from 1 to " +
                                           size_text(kMostBytes) +
                                           ", like 1000, 64k, 500M or 8G; got \"" + text + "\"");
  }
  return value << (10 * power);
}

// Adds an option per field.
class Binder {
 public:
  explicit Binder(CLI::App& app) : app_(app) {}

  void group(const char* name) { group_ = name; }

  CLI::Option* text(const char* name, std::string& field, const char* type, const char* help) {
    return app_.add_option(option(name), field, help)
        ->group(group_)
        ->type_name(type)
        ->capture_default_str()
        ->take_last();
  }

  void device(const char* name, std::string& field, const char* help) {
    text(name, field, "DEVICE", help)->check(CLI::Validator("").operation([](std::string& text) {
      return check_device(text);
    }));
  }

  void choice(const char* name, std::string& field, const std::vector<std::string>& words,
              const char* help) {
    add_choice(app_, option(name), field, words, help)->group(group_);
  }

  template <class Number>
  void number(const char* name, Number& field, std::type_identity_t<Number> low,
              std::type_identity_t<Number> high, const char* help) {
    add_number(app_, option(name), field, low, high, help)->group(group_);
  }

  void size(const char* name, std::uint64_t& field, const char* help) {
    const auto set = [this_option = option(name), &field](const std::string& text) {
      field = parse_size(this_option, text);
    };
    app_.add_option_function<std::string>(option(name), set, help)
        ->group(group_)
        ->type_name("BYTES")
        ->default_str(size_text(field))
        ->take_last();
  }

  void flag(const char* name, bool& field, const char* help) {
    add_switch(app_, option(name), field, help)->group(group_);
  }

  using Pairs = std::vector<std::pair<std::string, std::string>>;
  void pairs(const char* name, Pairs& field, const char* type, const char* help) {
    app_.add_option(option(name), field, help)->group(group_)->option_text(type);
  }

 private:
  static std::string option(const char* name) { return std::string("--") + name; }

  CLI::App& app_;
  std::string group_;
};

// Writes the fields as text.
class Writer {
 public:
  std::string text() && { return std::move(text_); }

  void group(const char*) {}
  void text(const char* name, const std::string& field, const char*, const char*) {
    add_text(name, field);
  }
  void device(const char* name, const std::string& field, const char*) { add_text(name, field); }
  void choice(const char* name, const std::string& field, const std::vector<std::string>&,
              const char*) {
    add_text(name, field);
  }
  // fmt writes as many digits as give the same number back. TOML's integers end at 2^63 - 1; larger
  // ones are quoted, as options take them.
  template <class Number>
  void number(const char* name, const Number& field, std::type_identity_t<Number>,
              std::type_identity_t<Number>, const char*) {
    const std::string text = fmt::format("{}", field);
    bool fits = true;
    if constexpr (std::is_integral_v<Number>) fits = std::in_range<std::int64_t>(field);
    add(name, fits ? text : quoted_text(text));
  }
  void size(const char* name, const std::uint64_t& field, const char*) {
    add(name, quoted_text(size_text(field)));
  }
  void flag(const char* name, const bool& field, const char*) {
    add(name, field ? "true" : "false");
  }
  void pairs(const char* name, const Binder::Pairs& field, const char*, const char*) {
    std::string list;
    for (const auto& [layers, spec] : field) {
      list += (list.empty() ? "" : ", ") + quoted(name, layers) + ", " + quoted(name, spec);
    }
    add(name, "[" + list + "]");
  }

 private:
  static std::string quoted(const std::string& name, const std::string& field) {
    try {
      return quoted_text(field);
    } catch (const Error& error) {
      throw Error("[config] --" + name + ": " + error.what());
    }
  }
  void add_text(const std::string& name, const std::string& field) {
    add(name, quoted(name, field));
  }
  void add(const std::string& name, const std::string& value) {
    const std::size_t dot = name.find('.');
    const std::string section = dot == std::string::npos ? "" : name.substr(0, dot);
    if (section != section_) text_ += "\n[" + section + "]\n";
    section_ = section;
    text_ += name.substr(dot + 1) + " = " + value + "\n";  // npos + 1 is 0
  }

  std::string text_, section_;
};

// Lists the fields as (name, text).
class Lister {
 public:
  std::vector<std::pair<std::string, std::string>> fields;

  void group(const char*) {}
  void text(const char* name, const std::string& field, const char*, const char*) {
    fields.emplace_back(name, field);
  }
  void device(const char* name, const std::string& field, const char*) {
    fields.emplace_back(name, field);
  }
  void choice(const char* name, const std::string& field, const std::vector<std::string>&,
              const char*) {
    fields.emplace_back(name, field);
  }
  template <class Number>
  void number(const char* name, const Number& field, std::type_identity_t<Number>,
              std::type_identity_t<Number>, const char*) {
    fields.emplace_back(name, fmt::format("{}", field));
  }
  void size(const char* name, const std::uint64_t& field, const char*) {
    fields.emplace_back(name, size_text(field));
  }
  void flag(const char* name, const bool& field, const char*) {
    fields.emplace_back(name, field ? "true" : "false");
  }
  void pairs(const char* name, const Binder::Pairs& field, const char*, const char*) {
    std::string list;
    for (const auto& [layers, spec] : field) list += layers + " " + spec + " ";
    fields.emplace_back(name, list);
  }
};

std::vector<std::pair<std::string, std::string>> field_texts(const Config& config) {
  Config copy = config;  // visit_fields needs mutable fields
  Lister lister;
  visit_fields(copy, lister);
  return std::move(lister.fields);
}

// Options that a resumed run may change. Its numbers then stay those of an uninterrupted run, up to
// rounding; only train.steps changes a cosine schedule. Data may move, but not change.
constexpr std::string_view kMayChange[] = {"out",
                                           "data",
                                           "data-limit",
                                           "device",
                                           "threads",
                                           "train.steps",
                                           "train.fast",
                                           "train.graph",
                                           "train.micro-batch",
                                           "train.context",
                                           "optimizer.shard",
                                           "train.log-every",
                                           "train.patience",
                                           "train.eval-every",
                                           "train.eval-batches",
                                           "train.final-batches",
                                           "model.recompute",
                                           "checkpoint.every",
                                           "checkpoint.keep"};

// Options by the tasks that use them.
struct TaskOptions {
  std::string_view prefix;  // of option names
  std::vector<std::string_view> tasks;
};
const TaskOptions kTaskOptions[] = {
    {"copy.", {"copy"}},
    {"recall.", {"recall"}},
    {"masked.", {"masked"}},
    {"listops.", {"listops"}},
    {"pathfinder.", {"pathfinder"}},
    {"images.", {"images"}},
    {"speech.", {"speech"}},
    {"text.vocabulary", {"tokens", "words"}},
    {"text.tokenizer", {"tokens"}},
    {"text.", {"bytes", "masked", "tokens", "words", "retrieval"}},
    {"data", {"bytes", "masked", "tokens", "words", "imdb", "retrieval", "images", "speech"}}};

// The keys that share the section of `key`, for a message.
std::string known_keys(const CLI::App& app, const std::string& key) {
  const std::string section = key.substr(0, key.find('.') + 1);
  std::string list;
  for (const CLI::Option* option : app.get_options()) {
    const std::string name = option->get_single_name();
    const bool inside = name.substr(0, name.find('.') + 1) == section;
    if (option->get_configurable() && inside) list += (list.empty() ? "" : ", ") + name;
  }
  return list.empty() ? "a key of a known section such as model or train" : "one of " + list;
}

void apply_line(CLI::App& app, const ConfigLine& line, const std::string& name) {
  const std::string place = config_place(name, line.number);
  CLI::Option* option = app.get_option_no_throw("--" + line.key);
  if (option == nullptr || !option->get_configurable()) {
    throw Error(place + "expected " + known_keys(app, line.key) + "; got " + line.key);
  }
  const auto together = static_cast<std::size_t>(std::max(1, option->get_type_size()));
  if (line.values.size() % together != 0) {
    throw Error(fmt::format("{}expected a multiple of {} values; got {}", place, together,
                            line.values.size()));
  }
  const bool single = option->get_multi_option_policy() == CLI::MultiOptionPolicy::TakeLast;
  if (single && line.values.size() > 1) {
    throw Error(
        fmt::format("{}expected one value for {}; got {}", place, line.key, line.values.size()));
  }
  if (option->count() > 0 || line.values.empty()) return;  // []: the default
  try {
    option->add_result(line.values);
    option->run_callback();
  } catch (const CLI::Error& error) {
    throw Error(place + error.what());
  }
}

}  // namespace

std::vector<OptionChange> option_changes(const Config& before, const Config& after) {
  const auto old_fields = field_texts(before), new_fields = field_texts(after);
  std::vector<OptionChange> changes;
  for (std::size_t i = 0; i < old_fields.size(); ++i) {
    const auto& [name, text] = old_fields[i];
    if (text == new_fields[i].second) continue;
    const bool may =
        std::find(std::begin(kMayChange), std::end(kMayChange), name) != std::end(kMayChange);
    changes.push_back({name, text, new_fields[i].second, may});
  }
  return changes;
}

void check_task_options(const Config& config) {
  Config standard;
  standard.task = config.task;
  for (const OptionChange& change : option_changes(standard, config)) {
    const auto own = std::find_if(std::begin(kTaskOptions), std::end(kTaskOptions),
                                  [&](const auto& o) { return change.name.starts_with(o.prefix); });
    if (own == std::end(kTaskOptions)) continue;
    if (std::find(own->tasks.begin(), own->tasks.end(), config.task) != own->tasks.end()) continue;
    throw Error(fmt::format("[task] --{} is an option of {}; got {} with --task {}: leave it out",
                            change.name, fmt::join(own->tasks, " and "), change.after,
                            config.task));
  }
}

void set_attention(Config& config, const std::string& text) {
  config.attention = text;
  config.attention_at.clear();
  if (!is_spec_file(text)) return;
  const std::vector<std::string> specs = read_spec_file(text);
  if (static_cast<std::int64_t>(specs.size()) != config.model.layers) {
    throw Error(fmt::format("[train] {}: expected specs of {} layers; got {}", text,
                            config.model.layers, specs.size()));
  }
  config.attention = specs[0];
  for (std::size_t layer = 1; layer < specs.size(); ++layer) {
    if (specs[layer] != specs[0]) {
      config.attention_at.emplace_back(fmt::format("{}", layer), specs[layer]);
    }
  }
}

bool built_with_cuda() { return build_info().cuda_toolkit != "none"; }

const char* device_help() {
  return built_with_cuda() ? "Device: cpu, cuda or cuda:1"
                           : "Device: cpu (this program was built without CUDA)";
}

std::string check_device(const std::string& text) {
  const bool numbered = text.size() > 5 && text.size() < 9 && text.starts_with("cuda:") &&
                        text.find_first_not_of("0123456789", 5) == std::string::npos;
  if (text == "cpu" || text == "cuda" || numbered) return "";
  return "expected cpu, cuda or cuda:N; got \"" + text + "\"";
}

void add_options(CLI::App& app, Config& config) {
  const auto file = std::make_shared<std::string>();  // lives as long as the callback
  app.add_option("--config", *file,
                 "Config file with options: [model] dim = 64 means --model.dim 64")
      ->type_name("FILE")
      ->group("Run")
      ->configurable(false);
  Binder binder(app);
  visit_fields(config, binder);
  app.parse_complete_callback([&app, file] {
    if (!file->empty()) apply_config(app, read_file(*file, kConfigFile), *file);
  });
}

void apply_config(CLI::App& app, const std::string& text, const std::string& name) {
  for (const ConfigLine& line : read_config_lines(text, name)) apply_line(app, line, name);
}

std::string config_text(const Config& config) {
  Config copy = config;  // visit_fields needs mutable fields
  Writer writer;
  visit_fields(copy, writer);
  std::string text = std::move(writer).text();
  if (text.size() > kConfigFile.bytes) {  // could not be read back
    throw Error(fmt::format("[config] expected options of at most {} bytes of text; got {}",
                            size_text(kConfigFile.bytes), text.size()));
  }
  return text;
}

Config parse_config(const std::string& text, const std::string& name) {
  Config config;
  CLI::App app;
  add_options(app, config);
  apply_config(app, text, name);
  return config;
}

}  // namespace coterie::train
