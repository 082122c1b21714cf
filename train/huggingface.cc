// SPDX-License-Identifier: MIT
// Names and layout of GPT-NeoX. Its block is ours: x + attention(norm(x)), then x + ffn(norm(x))
// with exact GELU, if use_parallel_residual is false; rotations turn elements d and d + D/2 in
// both. Queries, keys and values of a head are adjacent rows of one projection. Every head has its
// keys there, so key/value heads that are shared are repeated; missing biases are zeros.
#include "train/huggingface.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <fmt/core.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "coterie/error.h"
#include "formats/files.h"
#include "train/named_tensors.h"
#include "train/trainer.h"

namespace coterie::train {
namespace {

using nlohmann::ordered_json;
using torch_api::TransformerOptions;

constexpr double kNormEps = 1e-5;  // torch's default

[[noreturn]] void refuse(const std::string& reason) {
  throw Error(
      "[export] expected a model that GPT-NeoX can express: causal, with full attention and rotary "
      "positions in all heads; " +
      reason);
}

const AttentionSpec& spec_of(const std::vector<AttentionSpec>& specs, std::size_t layer) {
  return specs.size() == 1 ? specs[0] : specs.at(layer);
}

bool is_rotary(const HeadGroup& now, const HeadGroup& trained) {
  return now.positions == Positions::automatic ? trained.rotary() : now.rotary();
}

// `trained`: the attention that the model was made with, which tells positions that a later
// attention does not name.
void check_attention(const TransformerOptions& options, const std::vector<AttentionSpec>& trained) {
  for (std::size_t layer = 0; layer < static_cast<std::size_t>(options.layers); ++layer) {
    const AttentionSpec& spec = spec_of(options.attention, layer);
    for (std::size_t group = 0; group < spec.groups.size(); ++group) {
      const HeadGroup& now = spec.groups[group];
      const std::string place = fmt::format("layer {} has \"{}\"", layer, spec.to_string());
      if (!std::holds_alternative<FullParams>(now.mechanism)) {
        refuse(place +
               " (--attention full exports the weights for full attention; coterie eval "
               "--attention full tells how good they are)");
      }
      if (!is_rotary(now, spec_of(trained, layer).groups.at(group))) {
        refuse(place + ", whose heads were trained without rotary positions");
      }
    }
  }
}

void check_model(const torch_api::LanguageModel& model) {
  using torch_api::EmbeddingPositions;
  const torch_api::LanguageModelOptions& options = model->options();
  if (!options.transformer.causal) refuse("got one that is not causal");
  if (options.input.positions != EmbeddingPositions::none) {
    refuse(options.input.positions == EmbeddingPositions::learned
               ? "got one with learned positions in its embeddings"
               : "got one with sinusoidal positions in its embeddings");
  }
  check_attention(model->transformer()->options(), options.transformer.attention);
}

// The tensors of a model by its own names, with what may be missing.
class Source {
 public:
  explicit Source(const ::torch::nn::Module& model) : tensors_(module_tensors(model)) {}

  const at::Tensor& operator[](const std::string& name) const { return tensors_.at(name); }

  // A bias of the given size, zeros if the model has none.
  at::Tensor bias(const std::string& name, std::int64_t size) const {
    const auto found = tensors_.find(name);
    return found == tensors_.end() ? at::zeros({size}) : found->second;
  }

 private:
  NamedTensors tensors_;
};

// (kv_heads D, ...) as (heads, D, ...).
at::Tensor by_head(const at::Tensor& rows, std::int64_t heads, std::int64_t D) {
  const std::int64_t own = rows.size(0) / D;
  return rows.detach().cpu().unflatten(0, {own, D}).repeat_interleave(heads / own, 0);
}

at::Tensor fused(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                 const TransformerOptions& options) {
  const std::int64_t H = options.heads, D = options.dim / H;
  return at::stack({by_head(q, H, D), by_head(k, H, D), by_head(v, H, D)}, 1).flatten(0, 2);
}

void add_layer(const Source& source, const TransformerOptions& options, std::int64_t layer,
               NamedTensors& out) {
  const std::string from = fmt::format("transformer.layers.{}.", layer),
                    to = fmt::format("gpt_neox.layers.{}.", layer);
  const std::int64_t E = options.dim, hidden = options.ffn == 0 ? 4 * E : options.ffn;
  const auto linear = [&](const std::string& own, const std::string& name, std::int64_t size) {
    out[to + name + ".weight"] = source[from + own + ".weight"];
    out[to + name + ".bias"] = source.bias(from + own + ".bias", size);
  };
  linear("attention_norm", "input_layernorm", E);
  linear("ffn_norm", "post_attention_layernorm", E);
  linear("attention.out", "attention.dense", E);
  linear("ffn_in", "mlp.dense_h_to_4h", hidden);
  linear("ffn_out", "mlp.dense_4h_to_h", E);
  const std::string q = from + "attention.q", k = from + "attention.k", v = from + "attention.v";
  const auto bias = [&](const std::string& name) {
    return source.bias(name + ".bias", source[name + ".weight"].size(0));
  };
  const std::string name = to + "attention.query_key_value";
  out[name + ".weight"] =
      fused(source[q + ".weight"], source[k + ".weight"], source[v + ".weight"], options);
  out[name + ".bias"] = fused(bias(q), bias(k), bias(v), options);
}

NamedTensors gpt_neox_tensors(const torch_api::LanguageModel& model) {
  const Source source(*model);
  const torch_api::LanguageModelOptions& options = model->options();
  NamedTensors out;
  out["gpt_neox.embed_in.weight"] = source["embedding.weight"];
  for (std::int64_t layer = 0; layer < options.transformer.layers; ++layer) {
    add_layer(source, options.transformer, layer, out);
  }
  out["gpt_neox.final_layer_norm.weight"] = source["transformer.norm.weight"];
  out["gpt_neox.final_layer_norm.bias"] = source["transformer.norm.bias"];
  if (!options.tied) out["embed_out.weight"] = source["output.weight"];
  return out;
}

ordered_json gpt_neox_config(const torch_api::LanguageModelOptions& options, std::int64_t length) {
  const TransformerOptions& transformer = options.transformer;
  return {{"architectures", {"GPTNeoXForCausalLM"}},
          {"model_type", "gpt_neox"},
          {"vocab_size", options.input.vocabulary},
          {"hidden_size", transformer.dim},
          {"num_hidden_layers", transformer.layers},
          {"num_attention_heads", transformer.heads},
          {"intermediate_size", transformer.ffn == 0 ? 4 * transformer.dim : transformer.ffn},
          {"hidden_act", "gelu"},
          {"hidden_dropout", transformer.dropout},
          {"attention_dropout", transformer.attention_dropout},
          {"layer_norm_eps", kNormEps},
          {"rotary_pct", 1.0},
          {"rotary_emb_base", transformer.rotary_base},
          {"max_position_embeddings", length},
          {"use_parallel_residual", false},
          {"tie_word_embeddings", options.tied},
          {"attention_bias", true},
          {"bos_token_id", nullptr},
          {"eos_token_id", nullptr},
          {"torch_dtype", "float32"}};
}

void write_json(const std::string& path, const ordered_json& content) {
  write_file(path, content.dump(2) + "\n");
}

// Renaming over it would remove a folder with other files.
void check_target(const std::string& folder) {
  namespace fs = std::filesystem;
  std::error_code error;
  if (!fs::exists(folder, error) || fs::is_regular_file(folder + "/config.json", error)) return;
  if (fs::is_directory(folder, error) && fs::is_empty(folder, error)) return;
  throw Error(
      "[export] expected a new folder, or one of an earlier export (with config.json); got " +
      folder);
}

}  // namespace

void write_huggingface(const std::string& folder, const torch_api::Model& any_model,
                       const Task& task, std::int64_t length) {
  const torch_api::LanguageModel model = language_model(any_model, task);
  check_model(model);
  check_target(folder);
  SafeTensors tensors = to_safetensors(gpt_neox_tensors(model));
  tensors.metadata["format"] = "pt";
  const std::string tokenizer = task.tokenizer_text();
  write_folder(folder, [&](const std::string& out) {
    write_json(out + "/config.json", gpt_neox_config(model->options(), length));
    write_json(out + "/generation_config.json", {{"do_sample", true}, {"max_length", length}});
    write_safetensors(out + "/model.safetensors", tensors);
    if (tokenizer.empty()) return;
    write_file(out + "/tokenizer.json", tokenizer);
    write_json(out + "/tokenizer_config.json", {{"tokenizer_class", "PreTrainedTokenizerFast"},
                                                {"model_max_length", length},
                                                {"clean_up_tokenization_spaces", false}});
  });
}

}  // namespace coterie::train
