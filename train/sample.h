// SPDX-License-Identifier: MIT
// Generates text from a causal language model, token by token with a cache.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "coterie/torch/models.h"

namespace coterie::train {

struct SampleOptions {
  std::int64_t tokens = 256;
  double temperature = 1.0;  // 0: the most likely token
  std::int64_t top_k = 0;    // 0: all
  double top_p = 1.0;        // the smallest set of tokens with this probability
  std::uint64_t seed = 1;
};

// Continues `prompt` (not empty); calls `emit` with each new token.
void sample(torch_api::LanguageModel& model, const std::vector<std::int64_t>& prompt,
            const SampleOptions& options, const std::function<void(std::int64_t)>& emit);

// One token from logits (V).
std::int64_t choose(const at::Tensor& logits, const SampleOptions& options, std::uint64_t index);

}  // namespace coterie::train
