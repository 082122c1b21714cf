// SPDX-License-Identifier: MIT
// Folders for transformers: layout and refusals. tests/python/test_export.py compares logits.
#include "train/huggingface.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "coterie/error.h"
#include "formats/files.h"
#include "tests/train/runs.h"
#include "tests/train/temporary_folder.h"
#include "train/named_tensors.h"

namespace coterie::train {
namespace {

Config bytes_config() {
  Config config = tiny_config("bytes");
  config.model.heads = 4;
  config.model.kv_heads = 2;
  return config;
}

std::string export_error(const Config& config, const std::string& attention = "") {
  const TemporaryFolder folder;
  const auto task = make_task(config);
  torch_api::Model model = make_model(config, *task);
  try {
    if (!attention.empty()) {
      model->transformer()->set_attention({AttentionSpec::parse(attention)});
    }
    write_huggingface(folder.path("hf"), model, *task, config.length);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(HuggingFace, HeadsHaveTheirRowsTogether) {
  const TemporaryFolder folder;
  const Config config = bytes_config();
  const auto task = make_task(config);
  torch_api::Model model = make_model(config, *task);
  write_huggingface(folder.path("hf"), model, *task, config.length);

  const NamedTensors own = module_tensors(*model),
                     out = from_safetensors(read_safetensors(folder.path("hf/model.safetensors")));
  const std::int64_t D = 4;
  const auto rows = [&](const std::string& name, std::int64_t head) {
    return own.at("transformer.layers.1.attention." + name).narrow(0, head * D, D);
  };
  const at::Tensor weight = out.at("gpt_neox.layers.1.attention.query_key_value.weight"),
                   bias = out.at("gpt_neox.layers.1.attention.query_key_value.bias");
  for (std::int64_t head = 0; head < 4; ++head) {
    const std::int64_t shared = head / 2, first = head * 3 * D;
    EXPECT_TRUE(weight.narrow(0, first, D).equal(rows("q.weight", head)));
    EXPECT_TRUE(weight.narrow(0, first + D, D).equal(rows("k.weight", shared)));
    EXPECT_TRUE(weight.narrow(0, first + 2 * D, D).equal(rows("v.weight", shared)));
    EXPECT_TRUE(bias.narrow(0, first + D, D).equal(rows("k.bias", shared)));
  }
  EXPECT_TRUE(out.at("embed_out.weight").equal(own.at("output.weight")));
  EXPECT_EQ(out.size(), 1 + 2 * 12 + 2 + 1u);
  const auto settings = nlohmann::json::parse(read_file(folder.path("hf/config.json")));
  EXPECT_EQ(settings["num_hidden_layers"], 2);
  EXPECT_EQ(settings["architectures"], nlohmann::json::array({"GPTNeoXForCausalLM"}));
  EXPECT_TRUE(std::filesystem::exists(folder.path("hf/tokenizer.json")));
}

TEST(HuggingFace, MissingBiasesAreZerosAndATiedOutputIsLeftOut) {
  const TemporaryFolder folder;
  Config config = bytes_config();
  config.model.bias = false;
  config.model.tied = true;
  const auto task = make_task(config);
  write_huggingface(folder.path("hf"), make_model(config, *task), *task, config.length);
  const NamedTensors out = from_safetensors(read_safetensors(folder.path("hf/model.safetensors")));
  EXPECT_FALSE(out.contains("embed_out.weight"));
  EXPECT_EQ(out.at("gpt_neox.layers.0.mlp.dense_h_to_4h.bias").abs().sum().item<double>(), 0.0);
  EXPECT_EQ(out.at("gpt_neox.layers.0.mlp.dense_h_to_4h.bias").size(0), 64);
}

TEST(HuggingFace, OtherModelsAreRefused) {
  Config config = bytes_config();
  EXPECT_EQ(export_error(config), "");
  const std::pair<const char*, const char*> attentions[] = {
      {"local(window=8)", "layer 0 has \"local(window=8)\""},
      {"2*full+2*local(window=8)", "layer 0 has \"2*full+2*local(window=8)\""},
      {"full(positions=none)", "trained without rotary positions"},
      {"full(positions=relative)", "trained without rotary positions"}};
  for (const auto& [attention, message] : attentions) {
    config.attention = attention;
    EXPECT_NE(export_error(config).find(message), std::string::npos) << export_error(config);
  }
  config.attention = "full";
  config.attention_at = {{"1", "local(window=8)"}};
  EXPECT_NE(export_error(config).find("layer 1 has"), std::string::npos);
  config.attention_at.clear();
  for (const char* const positions : {"sinusoidal", "learned"}) {
    config.model.positions = positions;
    EXPECT_NE(export_error(config).find(positions), std::string::npos);
  }
  EXPECT_NE(export_error(tiny_config("copy")).find("not causal"), std::string::npos);
}

TEST(HuggingFace, AnotherAttentionCanBeExportedAsFull) {
  Config config = bytes_config();
  config.attention = "local(window=8)";
  EXPECT_EQ(export_error(config, "full"), "");
  config.attention = "2*full+2*local(window=8)";
  EXPECT_EQ(export_error(config, "2*full+2*full"), "");
  config.attention = "oracle-top(topk=4)";  // no positions
  EXPECT_NE(export_error(config, "full").find("without rotary positions"), std::string::npos);
}

TEST(HuggingFace, OnlyAFolderOfAnExportIsReplaced) {
  const TemporaryFolder folder;
  const Config config = bytes_config();
  const auto task = make_task(config);
  const torch_api::Model model = make_model(config, *task);
  std::filesystem::create_directories(folder.path("hf"));
  write_huggingface(folder.path("hf"), model, *task, config.length);
  write_huggingface(folder.path("hf"), model, *task, config.length);
  std::filesystem::create_directories(folder.path("mine"));
  write_file(folder.path("mine/notes"), "text");
  EXPECT_THROW(write_huggingface(folder.path("mine"), model, *task, config.length), Error);
  EXPECT_EQ(read_file(folder.path("mine/notes")), "text");
}

}  // namespace
}  // namespace coterie::train
