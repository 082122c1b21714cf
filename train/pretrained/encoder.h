// SPDX-License-Identifier: MIT
// A BERT encoder from a folder of Hugging Face's library `transformers`: config.json,
// model.safetensors, and tokenizer.json or vocab.txt.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "coterie/torch/encoder.h"
#include "train/pretrained/wordpiece.h"

namespace coterie::train {

enum class Pooling : std::uint8_t { mean, first };  // over the valid tokens; or [CLS]

struct PretrainedEncoder {
  torch_api::Encoder model = nullptr;  // in evaluation mode, f32, on the CPU
  WordPieceTokenizer tokenizer;
  Pooling pooling = Pooling::mean;  // that of 1_Pooling/config.json; mean without it
  std::string folder;
};

// Throws Error, which names the file and what is wrong with it: a folder of something else, a model
// of another architecture, a decoder, tensors that are missing, have other shapes or are not
// finite. Pooler and output layers of the file are left out.
PretrainedEncoder load_pretrained(const std::string& folder);

// Texts as tensors on the model's device: tokens and types (B, N), and lengths (B). Texts of
// different lengths are padded.
struct EncoderBatch {
  at::Tensor tokens, types, lengths;
  bool padded = false;
};
EncoderBatch encoder_batch(const std::vector<const EncodedText*>& texts, std::int32_t padding,
                           c10::Device device);

// Embeddings (B, E) of rows (B, N, E), in f32.
at::Tensor pooled(Pooling pooling, const at::Tensor& rows, const at::Tensor& lengths);

}  // namespace coterie::train
