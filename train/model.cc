// SPDX-License-Identifier: MIT
// Builds the model of a config.
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <fmt/core.h>

#include <algorithm>
#include <charconv>

#include "coterie/error.h"
#include "coterie/runtime.h"
#include "train/options.h"
#include "train/trainer.h"

namespace coterie::train {
namespace {

using torch_api::EmbeddingPositions;

struct LayerRange {
  std::int64_t first = 0, last = 0;
};

// "2" or "0-3", both ends included.
LayerRange parse_range(const std::string& text, std::int64_t layers) {
  const char* const end = text.data() + text.size();
  LayerRange range;
  auto read = std::from_chars(text.data(), end, range.first);
  range.last = range.first;
  if (read.ec == std::errc() && read.ptr != end && *read.ptr == '-') {
    read = std::from_chars(read.ptr + 1, end, range.last);
  }
  const bool good = read.ec == std::errc() && read.ptr == end && range.first >= 0 &&
                    range.first <= range.last && range.last < layers;
  if (!good) {
    throw Error(fmt::format(
        "[train] expected layers of --attention-at from 0 to {}, like 0 or 0-{}; got \"{}\"",
        layers - 1, layers - 1, text));
  }
  return range;
}

AttentionSpec parse_spec(const std::string& text, std::int64_t heads) {
  AttentionSpec spec = AttentionSpec::parse(text);
  spec.head_counts(heads);  // refuses counts that do not add up
  return spec;
}

EmbeddingPositions embedding_positions(const Config& config, const Task& task) {
  const std::string& name = config.model.positions;
  if (name == "none") return EmbeddingPositions::none;
  if (name == "sinusoidal") return EmbeddingPositions::sinusoidal;
  if (name == "learned") return EmbeddingPositions::learned;
  if (name == "automatic") {
    return task.needs_positions() ? EmbeddingPositions::sinusoidal : EmbeddingPositions::none;
  }
  throw Error("[train] expected positions automatic, none, sinusoidal or learned; got \"" + name +
              "\"");
}

torch_api::TransformerOptions transformer_options(const Config& config, bool causal) {
  torch_api::TransformerOptions options;
  options.dim = config.model.dim;
  options.layers = config.model.layers;
  options.heads = config.model.heads;
  options.kv_heads = config.model.kv_heads;
  options.ffn = config.model.ffn;
  options.dropout = config.model.dropout;
  options.attention_dropout = config.model.attention_dropout;
  options.attention = layer_attention(config);
  options.causal = causal;
  options.bias = config.model.bias;
  options.recompute = config.model.recompute;
  options.seed = config.seed;
  return options;
}

torch_api::TokenInputOptions token_input(const Config& config, const Task& task) {
  torch_api::TokenInputOptions input;
  input.vocabulary = task.vocabulary();
  input.positions = embedding_positions(config, task);
  input.max_length = config.length;
  const double deviation = config.model.embedding_std;
  input.embedding_std = deviation > 0 ? deviation : task.embedding_std();
  input.position_base = config.model.position_base;
  return input;
}

torch_api::Model model_for(const TokenAnswers&, const Config& config, const Task& task) {
  torch_api::LanguageModelOptions options;
  options.input = token_input(config, task);
  options.tied = config.model.tied;
  options.transformer = transformer_options(config, task.causal());
  return std::make_shared<torch_api::LanguageModelImpl>(std::move(options));
}

torch_api::Model model_for(const ClassAnswer& answer, const Config& config, const Task& task) {
  torch_api::SequenceClassifierOptions options;
  options.input = token_input(config, task);
  options.classes = answer.classes;
  options.transformer = transformer_options(config, task.causal());
  return std::make_shared<torch_api::SequenceClassifierImpl>(std::move(options));
}

torch_api::Model model_for(const TranscriptAnswer& answer, const Config& config, const Task& task) {
  torch_api::CtcModelOptions options;
  options.features = answer.features;
  options.symbols = answer.symbols;
  options.subsample = answer.subsample;
  options.position_base = config.model.position_base;
  options.transformer = transformer_options(config, task.causal());
  return std::make_shared<torch_api::CtcModelImpl>(std::move(options));
}

torch_api::Model model_for(const ImageAnswers& answers, const Config& config, const Task& task) {
  torch_api::ImageModelOptions options;
  options.height = answers.height;
  options.width = answers.width;
  options.channels = answers.channels;
  options.levels = task.vocabulary();
  options.embedding_std = token_input(config, task).embedding_std;
  options.transformer = transformer_options(config, task.causal());
  return std::make_shared<torch_api::ImageModelImpl>(std::move(options));
}

// Options of training that need one answer per position.
void check_answers(const Config& config, const std::string& task, const Answers& answers) {
  const bool tokens = std::holds_alternative<TokenAnswers>(answers);
  if (tokens) return;
  const auto refuse = [&](const char* option, const char* why) {
    throw Error(fmt::format("[train] {} {}; got --task {}: leave it out", option, why, task));
  };
  if (config.train.context > 1) refuse("--train.context", "needs a task with an answer per token");
  if (config.train.truncate > 0 && !std::holds_alternative<ImageAnswers>(answers)) {
    refuse("--train.truncate", "needs a task with an answer per position");
  }
  if (config.model.tied) refuse("--model.tied", "needs a task whose answers are its tokens");
  if (config.model.positions != "automatic" && !std::holds_alternative<ClassAnswer>(answers)) {
    refuse("--model.positions", "is fixed for speech and for the pixels of images");
  }
}

}  // namespace

std::vector<AttentionSpec> layer_attention(const Config& config) {
  const std::int64_t layers = config.model.layers, heads = config.model.heads;
  std::vector<AttentionSpec> specs(static_cast<std::size_t>(layers),
                                   parse_spec(config.attention, heads));
  for (const auto& [text, attention] : config.attention_at) {
    const AttentionSpec spec = parse_spec(attention, heads);
    const LayerRange range = parse_range(text, layers);
    for (std::int64_t layer = range.first; layer <= range.last; ++layer) {
      specs[static_cast<std::size_t>(layer)] = spec;
    }
  }
  return specs;
}

std::string attention_text(const Config& config) {
  const std::vector<AttentionSpec> specs = layer_attention(config);
  std::string text;
  for (std::size_t first = 0, last = 0; first < specs.size(); first = last + 1) {
    const std::string spec = specs[first].to_string();
    for (last = first; last + 1 < specs.size() && specs[last + 1].to_string() == spec;) ++last;
    if (first == 0 && last + 1 == specs.size()) return spec;
    text += fmt::format("{}{}{}: {}", text.empty() ? "" : "; ", first,
                        first == last ? "" : fmt::format("-{}", last), spec);
  }
  return text;
}

c10::Device config_device(const Config& config) {
  const c10::Device device(config.device);
  if (device.is_cuda() && !built_with_cuda()) {
    throw Error(
        fmt::format("[train] expected a CUDA device for --device {}; got a program built "
                    "without CUDA (use --device cpu)",
                    config.device));
  }
  const int devices = at::hasCUDA() ? static_cast<int>(at::getNumGPUs()) : 0;
  if (device.is_cuda() && std::max<int>(device.index(), 0) >= devices) {
    throw Error(
        fmt::format("[train] expected a CUDA device for --device {}; torch finds {} device(s)",
                    config.device, devices));
  }
  if (device.is_cuda())
    at::globalContext().lazyInitDevice(device.type());  // needed by torch's allocator
  return device;
}

torch_api::Model make_model(const Config& config, const Task& task) {
  const Answers answers = task.answers();
  check_answers(config, task.name(), answers);
  at::manual_seed(config.seed);
  const torch_api::Model model =
      std::visit([&](const auto& wanted) { return model_for(wanted, config, task); }, answers);
  model->to(config_device(config));
  return model;
}

torch_api::LanguageModel language_model(const torch_api::Model& model, const Task& task) {
  auto found = std::dynamic_pointer_cast<torch_api::LanguageModelImpl>(model);
  if (found) return torch_api::LanguageModel(std::move(found));
  throw Error(fmt::format("[task] expected a task with text (bytes, words or tokens); got {}",
                          task.name()));
}

std::string leak_warning(const std::vector<AttentionSpec>& specs, bool causal) {
  for (const AttentionSpec& spec : specs) {
    for (const HeadGroup& group : spec.groups) {
      if (causal && leaks_future(group.mechanism, causal)) {
        return to_string(group.mechanism) +
               ": its selection sees the future, its scores are too good, and generate refuses it";
      }
    }
  }
  return "";
}

void use_threads(int threads) {
  if (threads > 0) set_threads(threads);
  at::set_num_threads(coterie::threads());
}

}  // namespace coterie::train
