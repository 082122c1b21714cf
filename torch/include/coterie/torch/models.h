// SPDX-License-Identifier: MIT
// Models: a transformer between an input and an output layer.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <cstdint>
#include <memory>

#include "coterie/torch/transformer.h"

namespace coterie::torch_api {

constexpr std::int64_t kNoTarget = -100;  // in targets: no loss here

// What training and evaluation need of a model.
class ModelImpl : public ::torch::nn::Module {
 public:
  // Logits for an input whose first dimensions are (B, N).
  virtual PassOutput forward(const at::Tensor& input, const PassContext& context = {}) = 0;
  // Sum of the negative log-probabilities of all targets, in nats. `lengths` are those of the
  // inputs; undefined: all positions are valid.
  virtual at::Tensor nats(const at::Tensor& out, const at::Tensor& targets,
                          const at::Tensor& lengths) const;
  virtual Transformer transformer() const = 0;
};
using Model = std::shared_ptr<ModelImpl>;

// Absolute positions added to the embeddings.
enum class EmbeddingPositions : std::uint8_t { none, sinusoidal, learned };

struct TokenInputOptions {
  std::int64_t vocabulary = 256;
  double embedding_std = 0.1;  // of the initial embeddings
  EmbeddingPositions positions = EmbeddingPositions::none;
  double position_base = 100.0;    // sinusoidal: wavelengths grow from 2 pi to this times 2 pi
  std::int64_t max_length = 1024;  // of learned positions
};

// Tokens as vectors: embeddings plus positions. Sinusoids have unit variance.
struct TokenInput {
  TokenInputOptions options;
  ::torch::nn::Embedding embedding{nullptr}, positions{nullptr};  // the latter: learned positions

  // (B, N, E) for tokens (B, N) that begin at position `first`.
  at::Tensor embed(const at::Tensor& tokens_BN, std::int64_t first);
};

struct LanguageModelOptions {
  TokenInputOptions input{};
  bool tied = true;                  // the output layer is the embedding
  TransformerOptions transformer{};  // causal: a language model; otherwise a token classifier
};

// Maps tokens (B, N) to logits (B, N, V) of the token at each position or, if causal, after it.
// With PassContext::ranks all ranks give the same tokens and get the logits of their positions.
// Parameter names: embedding.weight, positions.weight, transformer.*, output.weight.
class LanguageModelImpl : public ModelImpl {
 public:
  explicit LanguageModelImpl(LanguageModelOptions options);
  PassOutput forward(const at::Tensor& tokens_BN, const PassContext& context = {}) override;
  Transformer transformer() const override;
  const LanguageModelOptions& options() const;

  // Decoding: prefill takes the tokens of the next positions (at least one), step those of the next
  // one. Both return the logits (B, V) after the last, equal to those of the parallel pass up to
  // rounding. Memory of prefill grows with N: cut long prompts into several calls. make_cache
  // throws for models that are not causal and for mechanisms that look ahead.
  DecoderCache make_cache(std::int64_t batch) const;
  at::Tensor prefill(const at::Tensor& tokens_BN, DecoderCache& cache);
  at::Tensor step(const at::Tensor& tokens_B, DecoderCache& cache);

 private:
  at::Tensor logits(const at::Tensor& x);

  LanguageModelOptions options_;
  TokenInput input_;
  Transformer transformer_{nullptr};
  ::torch::nn::Linear output_{nullptr};  // absent when tied
};
TORCH_MODULE(LanguageModel);

struct SequenceClassifierOptions {
  TokenInputOptions input{.positions = EmbeddingPositions::sinusoidal};
  std::int64_t classes = 2;
  TransformerOptions transformer{};
};

// Maps tokens (B, N) to logits (B, classes) from the mean over the valid positions.
class SequenceClassifierImpl : public ModelImpl {
 public:
  explicit SequenceClassifierImpl(SequenceClassifierOptions options);
  PassOutput forward(const at::Tensor& tokens_BN, const PassContext& context = {}) override;
  Transformer transformer() const override;

 private:
  TokenInput input_;
  Transformer transformer_{nullptr};
  ::torch::nn::Linear output_{nullptr};
};
TORCH_MODULE(SequenceClassifier);

struct CtcModelOptions {
  std::int64_t features = 40, symbols = 27;  // class 0 is the blank, 1..symbols the symbols
  std::int64_t subsample = 1;                // frames concatenated into one position
  double position_base = 1000.0;             // as in TokenInputOptions
  TransformerOptions transformer{};
};

// Maps frames (B, T, F) to log-probabilities (B, T', symbols + 1); T' = ceil(T / subsample).
// Targets (B, L) are symbols, filled up with kNoTarget.
class CtcModelImpl : public ModelImpl {
 public:
  explicit CtcModelImpl(CtcModelOptions options);
  PassOutput forward(const at::Tensor& frames_BTF, const PassContext& context = {}) override;
  // Over all alignments, computed on the CPU: torch's loss on a GPU does not repeat its bits. An
  // item that has no alignment, because its targets are too many, counts 0.
  at::Tensor nats(const at::Tensor& out, const at::Tensor& targets_BL,
                  const at::Tensor& frame_lengths) const override;
  Transformer transformer() const override;
  // Output lengths for input lengths.
  at::Tensor output_lengths(const at::Tensor& lengths) const;

 private:
  CtcModelOptions options_;
  ::torch::nn::Linear input_{nullptr}, output_{nullptr};
  Transformer transformer_{nullptr};
};
TORCH_MODULE(CtcModel);

struct ImageModelOptions {
  std::int64_t height = 28, width = 28, channels = 1;
  std::int64_t levels = 256;
  double embedding_std = 0.1;
  TransformerOptions transformer{};  // causal
};

// Maps images (B, height, width, channels) of levels, or the first N of their values (B, N), to
// logits (B, N, levels) of each value given those before it; rows, columns and channels have
// learned embeddings.
class ImageModelImpl : public ModelImpl {
 public:
  explicit ImageModelImpl(ImageModelOptions options);
  PassOutput forward(const at::Tensor& images_BHWC, const PassContext& context = {}) override;
  Transformer transformer() const override;
  const ImageModelOptions& options() const;

  // Decoding: prefill takes the next M values (B, M) of images, none at their start, and returns
  // the logits (B, levels) of the value after them. make_cache throws as in LanguageModel.
  DecoderCache make_cache(std::int64_t batch) const;
  at::Tensor prefill(const at::Tensor& values_BM, DecoderCache& cache);

 private:
  at::Tensor places() const;  // (height * width * channels, E), of all values

  ImageModelOptions options_;
  ::torch::nn::Embedding embedding_{nullptr}, rows_{nullptr}, columns_{nullptr}, channels_{nullptr};
  at::Tensor start_;  // input of the first position, which follows no value
  Transformer transformer_{nullptr};
  ::torch::nn::Linear output_{nullptr};
};
TORCH_MODULE(ImageModel);

// Mean bits per value of logits (..., V) for targets (...).
at::Tensor bits_per_value(const at::Tensor& logits, const at::Tensor& targets);

}  // namespace coterie::torch_api
