// SPDX-License-Identifier: MIT
// Samples of causal models: text from a language model that reads a prompt first, then token by
// token, and images value by value.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "coterie/torch/models.h"
#include "train/pictures.h"

namespace coterie::train {

struct SampleOptions {
  std::int64_t tokens = 256;
  double temperature = 1.0;  // 0: the most likely token
  std::int64_t top_k = 0;    // 0: all
  double top_p = 1.0;        // the smallest set of tokens with this probability
  std::uint64_t seed = 1;
  std::uint32_t number = 0;  // of several samples with one seed
};

// The state of a model that has read a prompt. Several samples may start from it.
struct ReadPrompt {
  torch_api::DecoderCache cache;
  at::Tensor logits;  // (V), of the next token
};

// Reads `prompt` (not empty) by parallel passes over up to kPrefillChunk tokens; calls `progress`
// with the number of tokens read after each.
constexpr std::int64_t kPrefillChunk = 2048;
ReadPrompt read_prompt(torch_api::LanguageModel& model, const std::vector<std::int64_t>& prompt,
                       const std::function<void(std::int64_t)>& progress = {});

// Calls `emit` with each new token until it returns false. Equal options give equal tokens, for any
// number of threads.
void sample(torch_api::LanguageModel& model, const ReadPrompt& prompt, const SampleOptions& options,
            const std::function<bool(std::int64_t)>& emit);

// An image; options.tokens has no meaning.
Picture sample_image(const std::shared_ptr<torch_api::ImageModelImpl>& model,
                     const SampleOptions& options);

// Token number `index` of a sample, from logits (V).
std::int64_t choose(const at::Tensor& logits, const SampleOptions& options, std::uint64_t index);

}  // namespace coterie::train
