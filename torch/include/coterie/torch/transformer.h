// SPDX-License-Identifier: MIT
// A stack of pre-norm transformer blocks: x + attention(norm(x)), then x + ffn(norm(x)), and a
// final norm. An encoder, or with `causal` a decoder.
//
// Parameter names: layers.i.attention.*, layers.i.attention_norm.{weight,bias},
// layers.i.ffn_norm.*, layers.i.ffn_in.*, layers.i.ffn_out.*, norm.*.
#pragma once

#include <torch/nn/modules/normalization.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "coterie/torch/attention.h"

namespace coterie::torch_api {

struct TransformerOptions {
  std::int64_t dim = 64, layers = 2, heads = 4, kv_heads = 0;
  std::int64_t ffn = 0;            // hidden width; 0: 4 dim
  double dropout = 0.0;            // on the embeddings and on both branches' outputs, in training
  double attention_dropout = 0.0;  // on the attention weights, in training
  std::vector<AttentionSpec> attention{};  // one for all layers, or one per layer
  bool causal = false;
  bool bias = true;
  bool recompute = false;  // activation checkpointing: blocks are run again in the backward pass
  double rotary_base = 10000.0;
  std::uint64_t seed = 0;
};

// Decoding state of a batch. Copies are independent: a step on one does not change the other.
struct DecoderCache {
  DecoderCache() = default;
  DecoderCache(const DecoderCache& other);
  DecoderCache(DecoderCache&& other) = default;
  DecoderCache& operator=(DecoderCache other) noexcept;
  ~DecoderCache() = default;

  std::int64_t position = 0;  // tokens seen
  std::vector<std::shared_ptr<LayerCache>> layers;
};

class BlockImpl;

class TransformerImpl : public ::torch::nn::Module {
 public:
  explicit TransformerImpl(TransformerOptions options);

  PassOutput forward(const at::Tensor& x_BNE, const PassContext& context);

  SelfAttention attention(std::int64_t layer) const;
  void set_attention(const std::vector<AttentionSpec>& specs);  // see SelfAttention::set_spec
  void check_attention(const std::vector<AttentionSpec>& specs) const;  // throws what that would
  const TransformerOptions& options() const;
  // Like those of SelfAttention, for all layers.
  void update_centroids(const std::vector<AttentionRecord>& records);
  void update_centroids(const StepStatistics& statistics);
  void add_statistics(const std::vector<AttentionRecord>& records,
                      StepStatistics& statistics) const;
  void initialise_centroids(const std::vector<AttentionRecord>& records, std::uint64_t seed,
                            const SequenceRanks* ranks = nullptr);

  DecoderCache make_cache(std::int64_t batch) const;
  at::Tensor prefill(const at::Tensor& x_BNE, DecoderCache& cache);

 private:
  TransformerOptions options_;
  std::vector<std::shared_ptr<BlockImpl>> blocks_;
  ::torch::nn::LayerNorm norm_{nullptr};
};
TORCH_MODULE(Transformer);

}  // namespace coterie::torch_api
