// SPDX-License-Identifier: MIT
#include "coterie/torch/models.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/ctc_loss.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/embedding_dense_backward.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/randn.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cmath>
#include <string>

#include "coterie/error.h"
#include "deterministic.h"
#include "positions.h"

namespace coterie::torch_api {
namespace {

using ::torch::autograd::AutogradContext;
using ::torch::autograd::variable_list;

// Rows of a table. On a GPU torch adds up their gradients by atomics unless it is told otherwise.
struct EmbedFunction : ::torch::autograd::Function<EmbedFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& table,
                            const at::Tensor& tokens) {
    ctx->save_for_backward({tokens});
    ctx->saved_data["rows"] = table.size(0);
    return at::embedding(table, tokens);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grad_outputs) {
    const Deterministic deterministic;
    return {at::embedding_dense_backward(grad_outputs[0], ctx->get_saved_variables()[0],
                                         ctx->saved_data["rows"].toInt(), /*padding_idx=*/-1,
                                         /*scale_grad_by_freq=*/false),
            {}};
  }
};

at::Tensor embedded(const ::torch::nn::Embedding& embedding, const at::Tensor& tokens) {
  return tokens.is_cuda() ? EmbedFunction::apply(embedding->weight, tokens)
                          : at::embedding(embedding->weight, tokens);
}

::torch::nn::Embedding make_embedding(std::int64_t rows, std::int64_t dim, double deviation) {
  return ::torch::nn::Embedding(
      ::torch::nn::EmbeddingOptions(rows, dim)._weight(at::randn({rows, dim}) * deviation));
}

TokenInput make_input(::torch::nn::Module& owner, std::int64_t dim,
                      const TokenInputOptions& options) {
  TokenInput input;
  input.options = options;
  input.embedding = owner.register_module(
      "embedding", make_embedding(options.vocabulary, dim, options.embedding_std));
  if (options.positions == EmbeddingPositions::learned) {
    input.positions = owner.register_module(
        "positions", make_embedding(options.max_length, dim, options.embedding_std));
  }
  return input;
}

// Sinusoids of unit variance.
at::Tensor position_waves(std::int64_t first, double base, const at::Tensor& x_BNE) {
  const std::int64_t E = x_BNE.size(2);
  if (E % 2 != 0) {
    throw Error("[model] expected an even width for sinusoidal positions; got " +
                std::to_string(E));
  }
  // Sines first.
  return waves(x_BNE.size(1), E, {first, base}, x_BNE).squeeze(0).roll(E / 2, -1) * std::sqrt(2.0);
}

void check_rank(const char* op, const char* shape, const at::Tensor& tensor, std::int64_t rank) {
  if (tensor.dim() == rank) return;
  throw Error(std::string("[") + op + "] expected a tensor " + shape + "; got one with " +
              std::to_string(tensor.dim()) + " dimensions");
}

// (B, N, 1): 1 at valid positions, 0 in padding.
at::Tensor valid_positions(const at::Tensor& lengths, std::int64_t N, const at::Tensor& like) {
  const at::Tensor positions = at::arange(N, lengths.options());
  return (positions < lengths.unsqueeze(1)).unsqueeze(2).to(like.scalar_type());
}

}  // namespace

at::Tensor ModelImpl::nats(const at::Tensor& out, const at::Tensor& targets,
                           const at::Tensor& /*lengths*/) const {
  const at::ScalarType wide = c10::promoteTypes(out.scalar_type(), at::kFloat);
  return at::cross_entropy_loss(out.flatten(0, -2).to(wide), targets.flatten(), {},
                                at::Reduction::Sum, kNoTarget);
}

at::Tensor TokenInput::embed(const at::Tensor& tokens_BN, std::int64_t first) {
  const std::int64_t N = tokens_BN.size(1);
  const at::Tensor x = embedded(embedding, tokens_BN);
  if (options.positions == EmbeddingPositions::none) return x;
  if (options.positions == EmbeddingPositions::sinusoidal) {
    return x + position_waves(first, options.position_base, x);
  }
  if (first + N > positions->weight.size(0)) {
    throw Error("[model] expected at most " + std::to_string(positions->weight.size(0)) +
                " positions; got " + std::to_string(first + N) + ". Raise max_length");
  }
  return x + positions->weight.narrow(0, first, N);
}

LanguageModelImpl::LanguageModelImpl(LanguageModelOptions options) : options_(std::move(options)) {
  const std::int64_t E = options_.transformer.dim, V = options_.input.vocabulary;
  input_ = make_input(*this, E, options_.input);
  transformer_ = register_module("transformer", Transformer(options_.transformer));
  if (options_.tied) return;
  output_ =
      register_module("output", ::torch::nn::Linear(::torch::nn::LinearOptions(E, V).bias(false)));
}

at::Tensor LanguageModelImpl::logits(const at::Tensor& x) {
  return output_ ? output_(x) : at::linear(x, input_.embedding->weight);
}

PassOutput LanguageModelImpl::forward(const at::Tensor& tokens_BN, const PassContext& context) {
  check_rank("language_model", "(B, N)", tokens_BN, 2);
  PassContext own = context;
  own.length = tokens_BN.size(1);
  const SequenceSlice slice =
      context.ranks == nullptr
          ? SequenceSlice{0, own.length}
          : sequence_slice(own.length, context.ranks->rank, context.ranks->size);
  const at::Tensor x = input_.embed(tokens_BN.narrow(1, slice.first, slice.count), slice.first);
  PassOutput output = transformer_->forward(x, own);
  output.out = logits(output.out);
  return output;
}

Transformer LanguageModelImpl::transformer() const { return transformer_; }

const LanguageModelOptions& LanguageModelImpl::options() const { return options_; }

DecoderCache LanguageModelImpl::make_cache(std::int64_t batch) const {
  return transformer_->make_cache(batch);
}

at::Tensor LanguageModelImpl::prefill(const at::Tensor& tokens_BN, DecoderCache& cache) {
  check_rank("language_model", "(B, N)", tokens_BN, 2);
  const std::int64_t N = tokens_BN.size(1);
  if (N == 0) throw Error("[language_model] expected at least one token; got none");
  const at::NoGradGuard no_grad;
  const at::Tensor x = transformer_->prefill(input_.embed(tokens_BN, cache.position), cache);
  return logits(x.select(1, N - 1));
}

at::Tensor LanguageModelImpl::step(const at::Tensor& tokens_B, DecoderCache& cache) {
  check_rank("language_model", "(B)", tokens_B, 1);
  return prefill(tokens_B.unsqueeze(1), cache);
}

SequenceClassifierImpl::SequenceClassifierImpl(SequenceClassifierOptions options) {
  const std::int64_t E = options.transformer.dim;
  input_ = make_input(*this, E, options.input);
  transformer_ = register_module("transformer", Transformer(options.transformer));
  output_ = register_module("output", ::torch::nn::Linear(E, options.classes));
}

PassOutput SequenceClassifierImpl::forward(const at::Tensor& tokens_BN,
                                           const PassContext& context) {
  check_rank("sequence_classifier", "(B, N)", tokens_BN, 2);
  PassOutput output = transformer_->forward(input_.embed(tokens_BN, 0), context);
  output.out = output.out.to(c10::promoteTypes(output.out.scalar_type(), at::kFloat));
  if (context.lengths.defined()) {
    const at::Tensor valid = valid_positions(context.lengths, tokens_BN.size(1), output.out);
    output.out = (output.out * valid).sum(1) / valid.sum(1).clamp_min(1);
  } else {
    output.out = output.out.mean(1);
  }
  output.out = output_(output.out);
  return output;
}

Transformer SequenceClassifierImpl::transformer() const { return transformer_; }

CtcModelImpl::CtcModelImpl(CtcModelOptions options) : options_(std::move(options)) {
  if (options_.subsample < 1 || options_.features < 1 || options_.symbols < 1) {
    throw Error("[ctc_model] expected at least one feature, symbol and frame per position; got " +
                std::to_string(options_.features) + ", " + std::to_string(options_.symbols) +
                " and " + std::to_string(options_.subsample));
  }
  const std::int64_t E = options_.transformer.dim;
  input_ = register_module("input", ::torch::nn::Linear(options_.features * options_.subsample, E));
  transformer_ = register_module("transformer", Transformer(options_.transformer));
  output_ = register_module("output", ::torch::nn::Linear(E, options_.symbols + 1));
}

PassOutput CtcModelImpl::forward(const at::Tensor& frames_BTF, const PassContext& context) {
  check_rank("ctc_model", "(B, T, F)", frames_BTF, 3);
  const std::int64_t T = frames_BTF.size(1), s = options_.subsample;
  at::Tensor frames = frames_BTF;
  PassContext own = context;
  if (context.lengths.defined()) {
    // The last position of an item may contain padding frames.
    frames = frames * valid_positions(context.lengths, T, frames);
    own.lengths = output_lengths(context.lengths);
  }
  frames = at::constant_pad_nd(frames, {0, 0, 0, (s - T % s) % s});
  const at::Tensor x = input_(frames.unflatten(1, {-1, s}).flatten(2));
  PassOutput output = transformer_->forward(x + position_waves(0, options_.position_base, x), own);
  output.out = at::log_softmax(output_(output.out), -1);
  return output;
}

at::Tensor CtcModelImpl::output_lengths(const at::Tensor& lengths) const {
  return (lengths + (options_.subsample - 1)).div(options_.subsample, "floor");
}

at::Tensor CtcModelImpl::nats(const at::Tensor& out, const at::Tensor& targets_BL,
                              const at::Tensor& frame_lengths) const {
  constexpr std::int64_t kBlank = 0;
  const at::Tensor targets = targets_BL.to(at::kCPU);
  const at::Tensor lengths = frame_lengths.defined()
                                 ? output_lengths(frame_lengths).to(at::kCPU)
                                 : at::full({out.size(0)}, out.size(1), targets.options());
  const at::Tensor wide = out.to(at::kCPU, c10::promoteTypes(out.scalar_type(), at::kFloat));
  const at::Tensor sum = at::ctc_loss(wide.transpose(0, 1), targets.clamp_min(0), lengths,
                                      (targets != kNoTarget).sum(1), kBlank, at::Reduction::Sum,
                                      /*zero_infinity=*/true);
  return sum.to(out.device());
}

Transformer CtcModelImpl::transformer() const { return transformer_; }

ImageModelImpl::ImageModelImpl(ImageModelOptions options) : options_(std::move(options)) {
  const std::int64_t E = options_.transformer.dim;
  embedding_ =
      register_module("embedding", make_embedding(options_.levels, E, options_.embedding_std));
  rows_ = register_module("rows", make_embedding(options_.height, E, options_.embedding_std));
  columns_ = register_module("columns", make_embedding(options_.width, E, options_.embedding_std));
  channels_ =
      register_module("channels", make_embedding(options_.channels, E, options_.embedding_std));
  start_ = register_parameter("start", at::randn({E}) * options_.embedding_std);
  transformer_ = register_module("transformer", Transformer(options_.transformer));
  output_ = register_module("output", ::torch::nn::Linear(E, options_.levels));
}

PassOutput ImageModelImpl::forward(const at::Tensor& images_BHWC, const PassContext& context) {
  const std::int64_t H = options_.height, W = options_.width, C = options_.channels;
  const bool rows = images_BHWC.dim() == 2;
  const std::int64_t N = rows ? images_BHWC.size(1) : H * W * C;
  if (!rows) check_rank("image_model", "(B, height, width, channels)", images_BHWC, 4);
  if (rows ? N < 1 || N > H * W * C : images_BHWC.sizes().slice(1) != at::IntArrayRef({H, W, C})) {
    throw Error("[image_model] expected images of " + std::to_string(H) + " x " +
                std::to_string(W) + " x " + std::to_string(C) + "; got another shape");
  }
  const at::Tensor before = embedded(embedding_, images_BHWC.flatten(1).narrow(1, 0, N - 1));
  const at::Tensor start = start_.expand({images_BHWC.size(0), 1, -1});
  const at::Tensor x = at::cat({start, before}, 1) + places().narrow(0, 0, N);
  PassOutput output = transformer_->forward(x, context);
  output.out = output_(output.out);
  return output;
}

Transformer ImageModelImpl::transformer() const { return transformer_; }

const ImageModelOptions& ImageModelImpl::options() const { return options_; }

at::Tensor ImageModelImpl::places() const {
  const at::Tensor rows = rows_->weight.unsqueeze(1).unsqueeze(1);
  const at::Tensor columns = columns_->weight.unsqueeze(1);
  return (rows + columns + channels_->weight).flatten(0, 2);
}

DecoderCache ImageModelImpl::make_cache(std::int64_t batch) const {
  return transformer_->make_cache(batch);
}

at::Tensor ImageModelImpl::prefill(const at::Tensor& values_BM, DecoderCache& cache) {
  check_rank("image_model", "(B, values)", values_BM, 2);
  const std::int64_t all = options_.height * options_.width * options_.channels;
  const std::int64_t first = cache.position, start = first == 0 ? 1 : 0;
  const std::int64_t positions = values_BM.size(1) + start;
  if (positions < 1 || first + positions > all) {
    throw Error("[image_model] expected " + std::to_string(1 - start) + " to " +
                std::to_string(all - first - start) + " further values of an image; got " +
                std::to_string(values_BM.size(1)));
  }
  const at::NoGradGuard no_grad;
  at::Tensor x = embedded(embedding_, values_BM);
  if (start == 1) x = at::cat({start_.expand({values_BM.size(0), 1, -1}), x}, 1);
  x = transformer_->prefill(x + places().narrow(0, first, positions), cache);
  return output_(x.select(1, positions - 1));
}

at::Tensor bits_per_value(const at::Tensor& logits, const at::Tensor& targets) {
  const at::Tensor nats =
      at::cross_entropy_loss(logits.flatten(0, -2), targets.flatten().to(at::kLong));
  return nats / std::log(2.0);
}

}  // namespace coterie::torch_api
