// SPDX-License-Identifier: MIT
#include "coterie/torch/encoder.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/linspace.h>
#include <ATen/ops/relu.h>
#include <torch/nn/modules/linear.h>

#include <string>

#include "coterie/error.h"
#include "layer_norm.h"

namespace coterie::torch_api {
namespace {

void check_encoder(const EncoderOptions& options) {
  if (options.layers < 1 || options.heads < 1 || options.dim < 1 || options.ffn < 1 ||
      options.vocabulary < 1 || options.max_length < 1 || options.types < 1) {
    throw Error("[encoder] expected positive sizes; got " + std::to_string(options.layers) +
                " layers, " + std::to_string(options.heads) + " heads, width " +
                std::to_string(options.dim) + ", ffn " + std::to_string(options.ffn) +
                ", vocabulary " + std::to_string(options.vocabulary) + ", positions " +
                std::to_string(options.max_length) + ", types " + std::to_string(options.types));
  }
}

::torch::nn::LayerNorm encoder_norm(const EncoderOptions& options) {
  return ::torch::nn::LayerNorm(
      ::torch::nn::LayerNormOptions(std::vector<std::int64_t>{options.dim}).eps(options.norm_eps));
}

}  // namespace

class EncoderBlockImpl : public ::torch::nn::Module {
 public:
  explicit EncoderBlockImpl(const EncoderOptions& options)
      : activation_(options.activation), dropout_(options.dropout) {
    // BERT's heads have no positions: those of the embeddings are all.
    attention = register_module(
        "attention",
        SelfAttention(SelfAttentionOptions{.dim = options.dim,
                                           .heads = options.heads,
                                           .spec = AttentionSpec::parse("full(positions=none)")}));
    attention_norm_ = register_module("attention_norm", encoder_norm(options));
    ffn_in_ = register_module("ffn_in", ::torch::nn::Linear(options.dim, options.ffn));
    ffn_out_ = register_module("ffn_out", ::torch::nn::Linear(options.ffn, options.dim));
    ffn_norm_ = register_module("ffn_norm", encoder_norm(options));
  }

  // The block for x and the output of its attention.
  at::Tensor forward(const at::Tensor& x, const at::Tensor& attended) {
    const at::Tensor middle = layer_norm(attention_norm_, x + drop(attended));
    return layer_norm(ffn_norm_, middle + drop(ffn_out_(activated(ffn_in_(middle)))));
  }

  SelfAttention attention{nullptr};

 private:
  at::Tensor drop(const at::Tensor& x) const { return at::dropout(x, dropout_, is_training()); }
  at::Tensor activated(const at::Tensor& x) const {
    if (activation_ == Activation::relu) return at::relu(x);
    return at::gelu(x, activation_ == Activation::gelu_tanh ? "tanh" : "none");
  }

  Activation activation_;
  double dropout_;
  ::torch::nn::LayerNorm attention_norm_{nullptr}, ffn_norm_{nullptr};
  ::torch::nn::Linear ffn_in_{nullptr}, ffn_out_{nullptr};
};

EncoderImpl::EncoderImpl(EncoderOptions options) : options_(options) {
  check_encoder(options_);
  const auto table = [&](const char* name, std::int64_t rows) {
    return register_module(name, ::torch::nn::Embedding(rows, options_.dim));
  };
  embedding_ = table("embedding", options_.vocabulary);
  positions_ = table("positions", options_.max_length);
  types_ = table("types", options_.types);
  norm_ = register_module("norm", encoder_norm(options_));
  const auto layers = register_module("layers", std::make_shared<::torch::nn::Module>("layers"));
  for (std::int64_t layer = 0; layer < options_.layers; ++layer) {
    blocks_.push_back(std::make_shared<EncoderBlockImpl>(options_));
    layers->register_module(std::to_string(layer), blocks_.back());
  }
}

at::Tensor EncoderImpl::position_rows(std::int64_t N) const {
  const at::Tensor& table = positions_->weight;
  if (N <= options_.max_length) return table.narrow(0, 0, N);
  if (!options_.stretch_positions) {
    throw Error("[encoder] expected at most " + std::to_string(options_.max_length) +
                " tokens, the learned positions; got " + std::to_string(N) +
                " (cut the text, or set stretch_positions)");
  }
  const double last = static_cast<double>(options_.max_length - 1);
  const at::Tensor places = at::linspace(0, last, N, table.options().dtype(at::kDouble));
  const at::Tensor below = places.floor().clamp_max(last - 1);
  const at::Tensor share = (places - below).unsqueeze(1).to(table.scalar_type());
  const at::Tensor row = below.to(at::kLong);
  return table.index_select(0, row) * (1 - share) + table.index_select(0, row + 1) * share;
}

at::Tensor EncoderImpl::embed(const at::Tensor& tokens_BN, const at::Tensor& types_BN) {
  if (tokens_BN.dim() != 2 || tokens_BN.size(1) < 1) {
    throw Error("[encoder] expected tokens of shape (B, N) with N of at least 1");
  }
  at::Tensor x = embedding_(tokens_BN) + position_rows(tokens_BN.size(1));
  x = x + (types_BN.defined() ? types_(types_BN) : types_->weight[0]);
  return at::dropout(layer_norm(norm_, x), options_.dropout, is_training());
}

PassOutput EncoderImpl::forward(const at::Tensor& tokens_BN, const at::Tensor& types_BN,
                                const PassContext& context) {
  PassContext own = context;
  at::Tensor commitment;
  const auto attend = [&](std::int64_t layer, const at::Tensor& x) {
    own.layer = layer;
    if (context.before_layer) context.before_layer();
    const PassOutput attended = attention(layer)->forward(x, own);
    commitment = commitment.defined() ? commitment + attended.commitment : attended.commitment;
    return attended.out;
  };
  const at::Tensor out = forward_with(tokens_BN, types_BN, attend);
  return {out, commitment};
}

at::Tensor EncoderImpl::forward_with(const at::Tensor& tokens_BN, const at::Tensor& types_BN,
                                     const Attend& attend) {
  at::Tensor x = embed(tokens_BN, types_BN);
  for (std::size_t layer = 0; layer < blocks_.size(); ++layer) {
    x = blocks_[layer]->forward(x, attend(static_cast<std::int64_t>(layer), x));
  }
  return x;
}

SelfAttention EncoderImpl::attention(std::int64_t layer) const {
  return blocks_.at(static_cast<std::size_t>(layer))->attention;
}

void EncoderImpl::check_attention(const std::vector<AttentionSpec>& specs) const {
  if (specs.size() != 1 && specs.size() != blocks_.size()) {
    throw Error("[encoder] expected one attention spec, or one for each of " +
                std::to_string(blocks_.size()) + " layers; got " + std::to_string(specs.size()));
  }
  for (std::size_t layer = 0; layer < blocks_.size(); ++layer) {
    blocks_[layer]->attention->check_spec(specs.size() == 1 ? specs[0] : specs[layer]);
  }
}

void EncoderImpl::set_attention(const std::vector<AttentionSpec>& specs) {
  check_attention(specs);
  for (std::size_t layer = 0; layer < blocks_.size(); ++layer) {
    blocks_[layer]->attention->set_spec(specs.size() == 1 ? specs[0] : specs[layer]);
  }
}

std::vector<AttentionSpec> EncoderImpl::attention_specs() const {
  std::vector<AttentionSpec> specs;
  for (const auto& block : blocks_) specs.push_back(block->attention->spec());
  return specs;
}

at::Tensor mean_rows(const at::Tensor& rows_BNE, const at::Tensor& lengths) {
  const at::Tensor rows = rows_BNE.to(at::kFloat);
  if (!lengths.defined()) return rows.mean(1);
  const at::Tensor places = at::arange(rows.size(1), lengths.options());
  const at::Tensor valid = (places < lengths.unsqueeze(1)).unsqueeze(2).to(at::kFloat);
  return (rows * valid).sum(1) / valid.sum(1).clamp_min(1);
}

}  // namespace coterie::torch_api
