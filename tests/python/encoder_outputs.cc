// SPDX-License-Identifier: MIT
// Prints what C++ computes of texts with a BERT encoder, for tests/python/test_encoder.py:
// encoder_outputs FOLDER tokens|pairs|embeddings [SPEC] < JSON lines, each a text or a pair
#include <ATen/core/grad_mode.h>

#include <cstdio>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "coterie/error.h"
#include "train/pretrained/encoder.h"

int main(int argc, char** argv) {
  using nlohmann::json;
  using namespace coterie;
  try {
    const std::string kind = argv[2];
    if (kind == "tokens" || kind == "pairs") {
      const auto tokenizer = train::WordPieceTokenizer::load(argv[1]);
      for (std::string line; std::getline(std::cin, line);) {
        const json value = json::parse(line);
        const train::EncodedText text =
            kind == "tokens"
                ? tokenizer.single(value.get<std::string>(), 512)
                : tokenizer.pair(value[0].get<std::string>(), value[1].get<std::string>(), 64);
        std::printf("%s\n", json({text.tokens, text.types}).dump().c_str());
      }
      return 0;
    }
    const at::NoGradGuard no_grad;
    train::PretrainedEncoder encoder = train::load_pretrained(argv[1]);
    if (argc > 3) encoder.model->set_attention({AttentionSpec::parse(argv[3])});
    std::vector<train::EncodedText> texts;
    for (std::string line; std::getline(std::cin, line);) {
      texts.push_back(encoder.tokenizer.single(json::parse(line).get<std::string>(), 128));
    }
    constexpr std::size_t kBatch = 16;
    for (std::size_t first = 0; first < texts.size(); first += kBatch) {
      std::vector<const train::EncodedText*> some;
      for (std::size_t i = first; i < std::min(texts.size(), first + kBatch); ++i) {
        some.push_back(&texts[i]);
      }
      const train::EncoderBatch batch = train::encoder_batch(some, 0, at::kCPU);
      torch_api::PassContext context;
      context.lengths = batch.lengths;
      const at::Tensor rows = encoder.model->forward(batch.tokens, batch.types, context).out;
      const at::Tensor out = train::pooled(encoder.pooling, rows, batch.lengths).contiguous();
      for (std::int64_t b = 0; b < out.size(0); ++b) {
        const float* const values = out[b].const_data_ptr<float>();
        std::printf("%s\n", json(std::vector<float>(values, values + out.size(1))).dump().c_str());
      }
    }
  } catch (const Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
  return 0;
}
