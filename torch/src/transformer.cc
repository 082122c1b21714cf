// SPDX-License-Identifier: MIT
#include "coterie/torch/transformer.h"

#include <ATen/ops/dropout.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/linear.h>

#include <algorithm>
#include <string>

#include "block_ops.h"
#include "coterie/error.h"
#include "decode.h"
#include "head_group.h"
#include "layer_norm.h"
#include "recompute.h"

namespace coterie::torch_api {

namespace {

at::Tensor sum_of(const Residual& stream) {
  if (!stream.branch.defined()) return stream.x;
  const at::Tensor sum = stream.x + stream.branch;
  return stream.branch_bias.defined() ? sum + stream.branch_bias : sum;
}

}  // namespace

// x + attention(norm(x)), then x + ffn(norm(x)).
class BlockImpl : public ::torch::nn::Module {
 public:
  BlockImpl(const TransformerOptions& options, std::int64_t layer);

  struct Output {
    Residual stream;
    at::Tensor commitment;
  };
  Output forward(const Residual& stream, const PassContext& context) {
    if (const auto type = fused_type(stream.x)) return forward_fused(stream, context, *type);
    const at::Tensor in = sum_of(stream);
    const PassOutput attended = attention->forward(layer_norm(attention_norm_, in), context);
    const at::Tensor x = in + drop(attended.out);
    return {{x + drop(feed(x)), {}, {}}, attended.commitment};
  }
  at::Tensor prefill(const at::Tensor& x_BNE, LayerCache& cache) {
    const at::Tensor x = x_BNE + attention->prefill(layer_norm(attention_norm_, x_BNE), cache);
    return x + feed(x);
  }

  SelfAttention attention{nullptr};

 private:
  // The same with the sums, norms and biases of block_ops.h.
  Output forward_fused(const Residual& stream, const PassContext& context, at::ScalarType type) {
    const NormedSum in = add_norm(attention_norm_, stream, type);
    const PassOutput attended = attention->forward_without_bias(in.normed, context);
    const NormedSum x =
        add_norm(ffn_norm_, branch(in.sum, attended.out, attention->output_bias()), type);
    const at::Tensor hidden = bias_gelu(at::linear(x.normed, ffn_in_->weight), ffn_in_->bias);
    return {branch(x.sum, at::linear(hidden, ffn_out_->weight), ffn_out_->bias),
            attended.commitment};
  }

  // Dropout comes after the bias.
  Residual branch(const at::Tensor& x, const at::Tensor& out, const at::Tensor& bias) const {
    if (dropout_ == 0 || !is_training()) return {x, out, bias};
    return {x, drop(bias.defined() ? out + bias.to(out.scalar_type()) : out), {}};
  }

  at::Tensor drop(const at::Tensor& x) const { return at::dropout(x, dropout_, is_training()); }
  at::Tensor feed(const at::Tensor& x) {
    return ffn_out_(at::gelu(ffn_in_(layer_norm(ffn_norm_, x))));
  }

  double dropout_;
  ::torch::nn::LayerNorm attention_norm_{nullptr}, ffn_norm_{nullptr};
  ::torch::nn::Linear ffn_in_{nullptr}, ffn_out_{nullptr};
};

namespace {

::torch::nn::LayerNorm make_norm(const TransformerOptions& options) {
  return ::torch::nn::LayerNorm(std::vector<std::int64_t>{options.dim});
}

const AttentionSpec& spec_of(const std::vector<AttentionSpec>& specs, std::int64_t layer) {
  return specs.size() == 1 ? specs[0] : specs[static_cast<std::size_t>(layer)];
}

void check_specs(const std::vector<AttentionSpec>& specs, std::int64_t layers) {
  if (specs.size() == 1 || specs.size() == static_cast<std::size_t>(layers)) return;
  throw Error("[transformer] expected one attention spec, or one for each of " +
              std::to_string(layers) + " layers; got " + std::to_string(specs.size()));
}

void check_options(const TransformerOptions& options) {
  if (options.layers < 1 || options.dim < 1 || options.ffn < 0) {
    throw Error("[transformer] expected at least one layer and positive widths; got " +
                std::to_string(options.layers) + " layers, dim " + std::to_string(options.dim) +
                ", ffn " + std::to_string(options.ffn));
  }
  if (!(options.dropout >= 0 && options.dropout < 1)) {
    throw Error("[transformer] expected dropout from 0 to below 1; got " +
                std::to_string(options.dropout));
  }
  check_specs(options.attention, options.layers);
}

}  // namespace

BlockImpl::BlockImpl(const TransformerOptions& options, std::int64_t layer)
    : dropout_(options.dropout) {
  const std::int64_t E = options.dim, hidden = options.ffn == 0 ? 4 * E : options.ffn;
  const auto linear = [&](std::int64_t in, std::int64_t out) {
    return ::torch::nn::Linear(::torch::nn::LinearOptions(in, out).bias(options.bias));
  };
  attention_norm_ = register_module("attention_norm", make_norm(options));
  attention = register_module(
      "attention", SelfAttention(SelfAttentionOptions{.dim = E,
                                                      .heads = options.heads,
                                                      .kv_heads = options.kv_heads,
                                                      .spec = spec_of(options.attention, layer),
                                                      .causal = options.causal,
                                                      .bias = options.bias,
                                                      .rotary_base = options.rotary_base,
                                                      .dropout = options.attention_dropout,
                                                      .seed = group_seed(options.seed, layer, 0)}));
  ffn_norm_ = register_module("ffn_norm", make_norm(options));
  ffn_in_ = register_module("ffn_in", linear(E, hidden));
  ffn_out_ = register_module("ffn_out", linear(hidden, E));
}

TransformerImpl::TransformerImpl(TransformerOptions options) : options_(std::move(options)) {
  check_options(options_);
  const auto layers = register_module("layers", std::make_shared<::torch::nn::Module>("layers"));
  for (std::int64_t layer = 0; layer < options_.layers; ++layer) {
    blocks_.push_back(std::make_shared<BlockImpl>(options_, layer));
    layers->register_module(std::to_string(layer), blocks_.back());
  }
  norm_ = register_module("norm", make_norm(options_));
}

namespace {

// The tensors of a stream that are defined: x, then the branch and its bias.
std::vector<at::Tensor> tensors_of(const Residual& stream) {
  std::vector<at::Tensor> tensors = {stream.x};
  if (stream.branch.defined()) tensors.push_back(stream.branch);
  if (stream.branch_bias.defined()) tensors.push_back(stream.branch_bias);
  return tensors;
}

Residual stream_of(const std::vector<at::Tensor>& tensors) {
  return {tensors[0], tensors.size() > 1 ? tensors[1] : at::Tensor(),
          tensors.size() > 2 ? tensors[2] : at::Tensor()};
}

BlockImpl::Output run_recomputed(const std::shared_ptr<BlockImpl>& block, const Residual& stream,
                                 const PassContext& context, bool random) {
  using Tensors = RecomputedPart::Tensors;
  PassContext again = context;
  again.records = nullptr;  // collected in the first run
  again.statistics = nullptr;
  RecomputedPart part;
  part.state = block->parameters();
  for (const at::Tensor& buffer : block->buffers()) part.state.push_back(buffer);
  // The commitment, x and the branch; the bias of the branch is a parameter, not a result.
  const auto results = [](const BlockImpl::Output& output) {
    Tensors all = {output.commitment, output.stream.x};
    if (output.stream.branch.defined()) all.push_back(output.stream.branch);
    return all;
  };
  at::Tensor bias;
  part.first = [&](const Tensors& inputs) {
    const BlockImpl::Output output = block->forward(stream_of(inputs), context);
    bias = output.stream.branch_bias;
    return results(output);
  };
  part.again = [block, results, again, training = block->is_training(),
                spec = block->attention->spec()](const Tensors& inputs) {
    if (block->is_training() != training ||
        block->attention->spec().to_string() != spec.to_string()) {
      throw Error(
          "[recompute] mode or attention changed after the forward pass; call train, eval and "
          "set_attention after backward");
    }
    return results(block->forward(stream_of(inputs), again));
  };
  part.random = random;
  for (const at::Tensor& parameter : block->parameters()) {
    if (parameter.requires_grad()) part.parameters.push_back(parameter);
  }
  const Tensors found = recompute(part, tensors_of(stream));
  return {{found[1], found.size() > 2 ? found[2] : at::Tensor(), bias}, found[0]};
}

}  // namespace

PassOutput TransformerImpl::forward(const at::Tensor& x_BNE, const PassContext& context) {
  if (context.ranks != nullptr && context.length == 0) {
    throw Error("[transformer] sequences can be split over ranks in LanguageModel only");
  }
  Residual stream{at::dropout(x_BNE, options_.dropout, is_training()), {}, {}};
  at::Tensor commitment;
  PassContext own = context;
  for (std::size_t layer = 0; layer < blocks_.size(); ++layer) {
    own.layer = static_cast<std::int64_t>(layer);
    if (context.before_layer) {
      context.before_layer();
      if (stream.x.requires_grad()) {
        stream.x.register_hook([call = context.before_layer](at::Tensor gradient) {
          call();
          return gradient;
        });
      }
    }
    const bool random = is_training() && options_.dropout > 0;
    const bool again = options_.recompute && at::GradMode::is_enabled();
    const BlockImpl::Output next = again ? run_recomputed(blocks_[layer], stream, own, random)
                                         : blocks_[layer]->forward(stream, own);
    stream = next.stream;
    commitment = layer == 0 ? next.commitment : commitment + next.commitment;
  }
  const auto type = fused_type(stream.x);
  return {type ? add_norm(norm_, stream, *type).normed : layer_norm(norm_, sum_of(stream)),
          commitment};
}

SelfAttention TransformerImpl::attention(std::int64_t layer) const {
  return blocks_.at(static_cast<std::size_t>(layer))->attention;
}

void TransformerImpl::check_attention(const std::vector<AttentionSpec>& specs) const {
  check_specs(specs, options_.layers);
  for (std::int64_t layer = 0; layer < options_.layers; ++layer) {
    blocks_[static_cast<std::size_t>(layer)]->attention->check_spec(spec_of(specs, layer));
  }
}

void TransformerImpl::set_attention(const std::vector<AttentionSpec>& specs) {
  check_attention(specs);
  for (std::int64_t layer = 0; layer < options_.layers; ++layer) {
    blocks_[static_cast<std::size_t>(layer)]->attention->set_spec(spec_of(specs, layer));
  }
  options_.attention = specs;
}

const TransformerOptions& TransformerImpl::options() const { return options_; }

namespace {

std::vector<AttentionRecord> records_of(const std::vector<AttentionRecord>& records,
                                        std::int64_t layer) {
  std::vector<AttentionRecord> own;
  std::copy_if(records.begin(), records.end(), std::back_inserter(own),
               [&](const AttentionRecord& record) { return record.layer == layer; });
  return own;
}

}  // namespace

void TransformerImpl::add_statistics(const std::vector<AttentionRecord>& records,
                                     StepStatistics& statistics) const {
  for (const AttentionRecord& record : records) {
    const SelfAttention& attention = blocks_.at(static_cast<std::size_t>(record.layer))->attention;
    attention->add_statistics({record}, statistics);
  }
}

void TransformerImpl::update_centroids(const StepStatistics& statistics) {
  for (const auto& item : statistics) {
    blocks_.at(static_cast<std::size_t>(item.first.first))
        ->attention->update_centroids(StepStatistics{item});
  }
}

void TransformerImpl::update_centroids(const std::vector<AttentionRecord>& records) {
  StepStatistics statistics;
  add_statistics(records, statistics);
  update_centroids(statistics);
}

void TransformerImpl::initialise_centroids(const std::vector<AttentionRecord>& records,
                                           std::uint64_t seed, const SequenceRanks* ranks) {
  for (std::int64_t layer = 0; layer < options_.layers; ++layer) {
    SelfAttention& attention = blocks_[static_cast<std::size_t>(layer)]->attention;
    attention->initialise_centroids(records_of(records, layer), group_seed(seed, layer, 0), ranks);
  }
}

DecoderCache::DecoderCache(const DecoderCache& other) : position(other.position) {
  for (const auto& layer : other.layers) layers.push_back(std::make_shared<LayerCache>(*layer));
}

DecoderCache& DecoderCache::operator=(DecoderCache other) noexcept {
  position = other.position;
  layers.swap(other.layers);
  return *this;
}

DecoderCache TransformerImpl::make_cache(std::int64_t batch) const {
  DecoderCache cache;
  for (const auto& block : blocks_) cache.layers.push_back(block->attention->make_cache(batch));
  return cache;
}

at::Tensor TransformerImpl::prefill(const at::Tensor& x_BNE, DecoderCache& cache) {
  if (cache.layers.size() != blocks_.size()) {
    throw Error("[transformer] expected a cache of " + std::to_string(blocks_.size()) +
                " layers; got one of " + std::to_string(cache.layers.size()));
  }
  const at::NoGradGuard no_grad;
  at::Tensor x = x_BNE;
  for (std::size_t layer = 0; layer < blocks_.size(); ++layer) {
    x = blocks_[layer]->prefill(x, *cache.layers[layer]);
  }
  cache.position += x.size(1);
  return layer_norm(norm_, x);
}

}  // namespace coterie::torch_api
