// SPDX-License-Identifier: MIT
// A language model as a folder of Hugging Face's library `transformers`.
#pragma once

#include <cstdint>
#include <string>

#include "coterie/torch/models.h"
#include "train/task.h"

namespace coterie::train {

// Writes `folder` with the model as GPTNeoXForCausalLM: config.json, generation_config.json,
// model.safetensors and, if the task has a tokenizer, tokenizer.json and tokenizer_config.json.
// `length` is the length of the sequences it was trained on. Replaces an existing folder only if it
// has a config.json.
//
// GPT-NeoX is causal and has full attention with rotary positions in all heads. Throws Error, which
// names the layer and its heads, for any other model. Attention that was replaced after training
// (set_attention) is exported as it is now.
void write_huggingface(const std::string& folder, const torch_api::Model& model, const Task& task,
                       std::int64_t length);

}  // namespace coterie::train
