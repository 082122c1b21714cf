// SPDX-License-Identifier: MIT
// The encoder of BERT (Devlin et al. 2019): embeddings of tokens, positions and segments, then
// blocks with the norm after the sum: x = norm(x + attention(x)), x = norm(x + ffn(x)).
//
// Parameter names: embedding.weight, positions.weight, types.weight, norm.*, layers.i.attention.*,
// layers.i.attention_norm.*, layers.i.ffn_in.*, layers.i.ffn_out.*, layers.i.ffn_norm.*.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/normalization.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "coterie/torch/attention.h"

namespace coterie::torch_api {

enum class Activation : std::uint8_t { gelu, gelu_tanh, relu };

struct EncoderOptions {
  std::int64_t vocabulary = 30522, max_length = 512, types = 2;
  std::int64_t dim = 384, layers = 6, heads = 12, ffn = 1536;
  double norm_eps = 1e-12;
  Activation activation = Activation::gelu;
  double dropout = 0.0;  // on the embeddings and on both branches' outputs, in training
  // Sequences longer than max_length stretch the learned positions: position i of n is row
  // i (max_length - 1) / (n - 1), rows between two are their weighted mean. Otherwise refused.
  bool stretch_positions = false;
};

class EncoderBlockImpl;

class EncoderImpl : public ::torch::nn::Module {
 public:
  explicit EncoderImpl(EncoderOptions options);

  // Rows (B, N, E) of tokens (B, N) and their types (B, N), all 0 if undefined.
  PassOutput forward(const at::Tensor& tokens_BN, const at::Tensor& types_BN,
                     const PassContext& context = {});
  // The same with `attend(layer, x)` in place of the attention layers, for comparisons.
  using Attend = std::function<at::Tensor(std::int64_t layer, const at::Tensor& x_BNE)>;
  at::Tensor forward_with(const at::Tensor& tokens_BN, const at::Tensor& types_BN,
                          const Attend& attend);

  SelfAttention attention(std::int64_t layer) const;
  // One spec for all layers, or one per layer; see SelfAttention::set_spec. Not between a forward
  // and its backward pass.
  void set_attention(const std::vector<AttentionSpec>& specs);
  void check_attention(const std::vector<AttentionSpec>& specs) const;
  std::vector<AttentionSpec> attention_specs() const;  // one per layer
  const EncoderOptions& options() const { return options_; }
  void stretch_positions(bool wanted) { options_.stretch_positions = wanted; }

 private:
  at::Tensor embed(const at::Tensor& tokens_BN, const at::Tensor& types_BN);
  at::Tensor position_rows(std::int64_t N) const;

  EncoderOptions options_;
  ::torch::nn::Embedding embedding_{nullptr}, positions_{nullptr}, types_{nullptr};
  ::torch::nn::LayerNorm norm_{nullptr};
  std::vector<std::shared_ptr<EncoderBlockImpl>> blocks_;
};
TORCH_MODULE(Encoder);

// Mean of the valid rows of each sequence (B, E), in f32; `lengths` (B), or undefined: all rows.
at::Tensor mean_rows(const at::Tensor& rows_BNE, const at::Tensor& lengths);

}  // namespace coterie::torch_api
