// SPDX-License-Identifier: MIT
// The names of BERT's tensors: an optional prefix "bert.", "LayerNorm.gamma" and "beta" in old
// files.
#include "train/pretrained/encoder.h"

#include <ATen/ops/full.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <fmt/core.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>

#include "coterie/error.h"
#include "formats/files.h"
#include "formats/json_lines.h"
#include "train/named_tensors.h"

namespace coterie::train {
namespace {

using nlohmann::json;
using torch_api::Activation;
using torch_api::EncoderOptions;

[[noreturn]] void refuse_model(const std::string& file, const std::string& reason) {
  throw Error("[pretrained] " + file + ": " + reason);
}

bool exists(const std::string& path) {
  std::error_code error;
  return std::filesystem::is_regular_file(path, error);
}

json read_json(const std::string& path) {
  const std::string text = read_file(path, kSmallFile);
  check_json(text, "[pretrained] " + path);
  json parsed = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!parsed.is_object()) refuse_model(path, "expected a JSON object");
  return parsed;
}

std::string word(const json& config, const char* key, const char* otherwise) {
  const auto found = config.find(key);
  if (found == config.end() || found->is_null()) return otherwise;
  return found->is_string() ? found->get<std::string>() : found->dump();
}

bool is_true(const json& config, const char* key) {
  const auto found = config.find(key);
  return found != config.end() && found->is_boolean() && found->get<bool>();
}

std::int64_t size(const json& config, const char* key, const std::string& path) {
  constexpr std::int64_t kMost = 1 << 24;
  const auto found = config.find(key);
  if (found == config.end() || !found->is_number_integer() || *found < 1 || *found > kMost) {
    refuse_model(path, fmt::format("expected a whole number from 1 to {} as {}; got {}", kMost, key,
                                   found == config.end() ? std::string("none") : found->dump()));
  }
  return found->get<std::int64_t>();
}

double number(const json& config, const char* key, double otherwise) {
  const auto found = config.find(key);
  return found != config.end() && found->is_number() ? found->get<double>() : otherwise;
}

Activation activation_of(const std::string& name, const std::string& path) {
  if (name == "gelu") return Activation::gelu;
  if (name == "gelu_new" || name == "gelu_pytorch_tanh") return Activation::gelu_tanh;
  if (name == "relu") return Activation::relu;
  refuse_model(path, "expected hidden_act to be gelu, gelu_new or relu; got " + name);
}

void check_architecture(const json& config, const std::string& path) {
  const std::string type = word(config, "model_type", "none");
  if (is_true(config, "is_decoder") || is_true(config, "add_cross_attention")) {
    refuse_model(path,
                 "expected an encoder; got a decoder (is_decoder or add_cross_attention is true)");
  }
  if (type != "bert") {
    refuse_model(path, "expected model_type bert, an encoder with WordPiece tokens; got " + type +
                           " (coterie.hf.use in Python takes models of other architectures)");
  }
  const std::string positions = word(config, "position_embedding_type", "absolute");
  if (positions != "absolute") {
    refuse_model(path, "expected position_embedding_type absolute; got " + positions);
  }
}

EncoderOptions options_of(const json& config, const std::string& path) {
  EncoderOptions options;
  options.vocabulary = size(config, "vocab_size", path);
  options.max_length = size(config, "max_position_embeddings", path);
  options.types = size(config, "type_vocab_size", path);
  options.dim = size(config, "hidden_size", path);
  options.layers = size(config, "num_hidden_layers", path);
  options.heads = size(config, "num_attention_heads", path);
  options.ffn = size(config, "intermediate_size", path);
  if (options.layers > 1000 || options.dim % options.heads != 0) {
    refuse_model(path,
                 fmt::format("expected at most 1000 layers and a hidden_size that is a multiple of "
                             "num_attention_heads; got {} layers, {} and {}",
                             options.layers, options.dim, options.heads));
  }
  options.norm_eps = number(config, "layer_norm_eps", 1e-12);
  options.dropout = number(config, "hidden_dropout_prob", 0.1);
  if (!(options.dropout >= 0 && options.dropout < 1) || !(options.norm_eps > 0)) {
    refuse_model(path,
                 "expected hidden_dropout_prob from 0 to below 1 and a positive layer_norm_eps");
  }
  options.activation = activation_of(word(config, "hidden_act", "gelu"), path);
  return options;
}

// Our names by those of the file.
std::map<std::string, std::string> names_of(const EncoderOptions& options) {
  std::map<std::string, std::string> names = {
      {"embeddings.word_embeddings.weight", "embedding.weight"},
      {"embeddings.position_embeddings.weight", "positions.weight"},
      {"embeddings.token_type_embeddings.weight", "types.weight"}};
  const auto both = [&](const std::string& theirs, const std::string& ours) {
    for (const char* part : {".weight", ".bias"}) names[theirs + part] = ours + part;
  };
  both("embeddings.LayerNorm", "norm");
  for (std::int64_t layer = 0; layer < options.layers; ++layer) {
    const std::string theirs = fmt::format("encoder.layer.{}.", layer),
                      ours = fmt::format("layers.{}.", layer);
    both(theirs + "attention.self.query", ours + "attention.q");
    both(theirs + "attention.self.key", ours + "attention.k");
    both(theirs + "attention.self.value", ours + "attention.v");
    both(theirs + "attention.output.dense", ours + "attention.out");
    both(theirs + "attention.output.LayerNorm", ours + "attention_norm");
    both(theirs + "intermediate.dense", ours + "ffn_in");
    both(theirs + "output.dense", ours + "ffn_out");
    both(theirs + "output.LayerNorm", ours + "ffn_norm");
  }
  return names;
}

// "bert.embeddings.LayerNorm.gamma" -> "embeddings.LayerNorm.weight"
std::string plain_name(std::string name) {
  if (name.starts_with("bert.")) name.erase(0, 5);
  if (name.ends_with(".gamma")) name.replace(name.size() - 5, 5, "weight");
  if (name.ends_with(".beta")) name.replace(name.size() - 4, 4, "bias");
  return name;
}

// What other models add to the encoder, and a constant that old files store.
bool is_left_out(const std::string& name) {
  return name == "embeddings.position_ids" || name.starts_with("pooler.") ||
         name.starts_with("cls.") || name.starts_with("classifier.") ||
         name.starts_with("qa_outputs.");
}

NamedTensors renamed(const NamedTensors& stored, const EncoderOptions& options,
                     const std::string& path) {
  const std::map<std::string, std::string> names = names_of(options);
  NamedTensors tensors;
  for (const auto& [name, tensor] : stored) {
    const std::string plain = plain_name(name);
    if (is_left_out(plain)) continue;
    const auto found = names.find(plain);
    if (found == names.end()) {
      refuse_model(path,
                   "expected the tensors of a BERT encoder with the layers of config.json; got \"" +
                       name + "\"");
    }
    if (!tensor.is_floating_point()) {
      refuse_model(path, "expected floating-point numbers in \"" + name + "\"");
    }
    if (!at::isfinite(tensor).all().item<bool>()) {
      refuse_model(path,
                   "expected finite numbers; \"" + name + "\" has others (is the file damaged?)");
    }
    tensors[found->second] = tensor;
  }
  return tensors;
}

Pooling pooling_of(const std::string& folder) {
  const std::string path = folder + "/1_Pooling/config.json";
  if (!exists(path)) return Pooling::mean;
  const json config = read_json(path);
  const bool mean = is_true(config, "pooling_mode_mean_tokens"),
             first = is_true(config, "pooling_mode_cls_token");
  if (mean == first) {
    refuse_model(path, "expected pooling_mode_mean_tokens or pooling_mode_cls_token, one of them");
  }
  return mean ? Pooling::mean : Pooling::first;
}

void check_folder(const std::string& folder) {
  std::error_code error;
  if (!std::filesystem::is_directory(folder, error)) {
    refuse_model(folder,
                 "expected a folder with config.json, model.safetensors and tokenizer.json or "
                 "vocab.txt; there is no such folder");
  }
  for (const char* name : {"/config.json", "/model.safetensors"}) {
    if (exists(folder + name)) continue;
    refuse_model(folder,
                 fmt::format("expected a model of Hugging Face with {} in the folder; it is "
                             "missing{}",
                             name + 1,
                             exists(folder + "/pytorch_model.bin")
                                 ? " (pytorch_model.bin is not read: save it with "
                                   "save_pretrained of transformers)"
                                 : ""));
  }
}

}  // namespace

PretrainedEncoder load_pretrained(const std::string& folder) {
  check_folder(folder);
  const std::string config_path = folder + "/config.json", weights = folder + "/model.safetensors";
  const json config = read_json(config_path);
  check_architecture(config, config_path);
  const EncoderOptions options = options_of(config, config_path);
  WordPieceTokenizer tokenizer = WordPieceTokenizer::load(folder);
  if (tokenizer.vocabulary() > options.vocabulary) {
    refuse_model(folder, fmt::format("expected token ids below vocab_size {}; the tokenizer has {}",
                                     options.vocabulary, tokenizer.vocabulary()));
  }
  const NamedTensors tensors =
      renamed(from_safetensors(read_safetensors(weights)), options, weights);
  torch_api::Encoder model(options);
  load_module(*model, tensors, weights);
  model->eval();
  return {model, std::move(tokenizer), pooling_of(folder), folder};
}

EncoderBatch encoder_batch(const std::vector<const EncodedText*>& texts, std::int32_t padding,
                           c10::Device device) {
  std::size_t longest = 1;
  for (const EncodedText* text : texts) longest = std::max(longest, text->tokens.size());
  const auto B = static_cast<std::int64_t>(texts.size()), N = static_cast<std::int64_t>(longest);
  const at::Tensor tokens = at::full({B, N}, padding, at::kLong),
                   types = at::zeros({B, N}, at::kLong), lengths = at::zeros({B}, at::kLong);
  for (std::int64_t b = 0; b < B; ++b) {
    const EncodedText& text = *texts[static_cast<std::size_t>(b)];
    std::copy(text.tokens.begin(), text.tokens.end(),
              tokens.mutable_data_ptr<std::int64_t>() + b * N);
    std::copy(text.types.begin(), text.types.end(), types.mutable_data_ptr<std::int64_t>() + b * N);
    lengths.mutable_data_ptr<std::int64_t>()[b] = static_cast<std::int64_t>(text.tokens.size());
  }
  const bool padded = std::any_of(texts.begin(), texts.end(), [&](const EncodedText* text) {
    return text->tokens.size() != longest;
  });
  return {tokens.to(device), types.to(device), lengths.to(device), padded};
}

at::Tensor pooled(Pooling pooling, const at::Tensor& rows, const at::Tensor& lengths) {
  return pooling == Pooling::mean ? torch_api::mean_rows(rows, lengths)
                                  : rows.select(1, 0).to(at::kFloat);
}

}  // namespace coterie::train
