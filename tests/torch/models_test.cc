// SPDX-License-Identifier: MIT
// Models: shapes, names, padding, and overfitting one batch with every mechanism.
#include "coterie/torch/models.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>

#include <cmath>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "coterie/error.h"
#include "modules.h"
#include "tests/support/tensors.h"

namespace coterie::torch_api {
namespace {

constexpr double kLearned = 0.1;

std::set<std::string> parameter_names(const ::torch::nn::Module& module) {
  std::set<std::string> names;
  for (const auto& item : module.named_parameters()) {
    if (item.key().find("transformer.") != 0) names.insert(item.key());
  }
  return names;
}

// Trains on one batch with AdamW until the loss is near zero (below kLearned) and returns it.
// Selections change abruptly while weights move, so the loss need not stay there.
double overfit(::torch::nn::Module& model, const std::function<at::Tensor()>& loss) {
  ::torch::optim::AdamW optimizer(model.parameters(), ::torch::optim::AdamWOptions(5e-3));
  double value = 0;
  for (int step = 0; step < 250; ++step) {
    optimizer.zero_grad();
    const at::Tensor now = loss();
    value = now.item<double>();
    if (value < kLearned) break;
    now.backward();
    optimizer.step();
  }
  return value;
}

double overfit_language(const std::string& spec, bool causal) {
  at::manual_seed(1);
  LanguageModelOptions options = language_model_options(spec, causal);
  options.input.positions = EmbeddingPositions::learned;
  options.input.max_length = 24;
  LanguageModel model(options);
  const at::Tensor tokens = at::randint(0, 11, {2, 25}, at::kLong);
  const at::Tensor given = tokens.narrow(1, 0, 24), wanted = tokens.narrow(1, 1, 24);
  return overfit(*model, [&] {
    const PassOutput output = model->forward(given, {.seed = 1});
    const at::Tensor loss = bits_per_value(output.out, wanted);
    return loss + output.commitment;
  });
}

TEST(LanguageModel, LearnsABatchByHeartWithEveryMechanism) {
  for (const bool causal : {false, true}) {
    for (const std::string& spec : every_spec(causal)) {
      EXPECT_LT(overfit_language(spec, causal), kLearned) << spec << (causal ? ", causal" : "");
    }
  }
}

TEST(LanguageModel, NamesItsParameters) {
  LanguageModelOptions options = language_model_options("full", true);
  EXPECT_EQ(parameter_names(*LanguageModel(options)), (std::set<std::string>{"embedding.weight"}));
  options.tied = false;
  options.input.positions = EmbeddingPositions::learned;
  LanguageModel model(options);
  EXPECT_EQ(parameter_names(*model),
            (std::set<std::string>{"embedding.weight", "output.weight", "positions.weight"}));
  std::set<std::string> block;
  const std::string prefix = "transformer.layers.1.";
  for (const auto& item : model->named_parameters()) {
    if (item.key().find(prefix) == 0) block.insert(item.key().substr(prefix.size()));
  }
  EXPECT_EQ(block, (std::set<std::string>{
                       "attention_norm.weight", "attention_norm.bias", "attention.q.weight",
                       "attention.q.bias", "attention.k.weight", "attention.k.bias",
                       "attention.v.weight", "attention.v.bias", "attention.out.weight",
                       "attention.out.bias", "ffn_norm.weight", "ffn_norm.bias", "ffn_in.weight",
                       "ffn_in.bias", "ffn_out.weight", "ffn_out.bias"}));
}

TEST(LanguageModel, StartsNearTheUniformDistribution) {
  for (const EmbeddingPositions positions :
       {EmbeddingPositions::none, EmbeddingPositions::sinusoidal, EmbeddingPositions::learned}) {
    at::manual_seed(2);
    LanguageModelOptions options = language_model_options("full", true);
    options.input.vocabulary = 64;
    options.input.positions = positions;
    const at::Tensor tokens = at::randint(0, 64, {4, 60}, at::kLong);
    const at::Tensor bits =
        bits_per_value(LanguageModel(options)->forward(tokens).out, at::randint(0, 64, {4, 60}));
    // Logits are inner products of normalised rows of 32 elements and embeddings; their variance
    // adds half as many nats to the loss.
    const double variance = 32 * options.input.embedding_std * options.input.embedding_std;
    EXPECT_NEAR(bits.item<double>(), 6.0 + variance / 2 / std::log(2.0), 0.3);
  }
}

TEST(LanguageModel, IsCausalWhenItSaysSo) {
  for (const std::string& spec : every_spec(true)) {
    LanguageModel model(language_model_options(spec, true));
    const at::Tensor tokens = at::randint(0, 11, {1, 20}, at::kLong);
    const at::Tensor out = model->forward(tokens).out;
    const at::Tensor changed = tokens.clone();
    changed.narrow(1, 10, 10).fill_(7);
    const at::Tensor again = model->forward(changed).out;
    EXPECT_TRUE(at::allclose(again.narrow(1, 0, 10), out.narrow(1, 0, 10), 1e-5, 1e-5)) << spec;
  }
}

TEST(LanguageModel, RefusesTokensOfAnotherShape) {
  LanguageModel model(language_model_options("full", true));
  EXPECT_EQ(test::error_of([&] { model->forward(at::zeros({3}, at::kLong)); }),
            "[language_model] expected a tensor (B, N); got one with 1 dimensions");
  LanguageModelOptions options = language_model_options("full", true);
  options.input.positions = EmbeddingPositions::learned;
  options.input.max_length = 4;
  LanguageModel learned(options);
  EXPECT_NE(test::error_of([&] {
              learned->forward(at::zeros({1, 5}, at::kLong));
            }).find("at most 4 positions"),
            std::string::npos);
}

TEST(SequenceClassifier, IgnoresPadding) {
  at::manual_seed(1);
  SequenceClassifier model(SequenceClassifierOptions{
      .input = {.vocabulary = 11, .positions = EmbeddingPositions::sinusoidal},
      .classes = 3,
      .transformer = transformer_options("full", false)});
  const at::Tensor tokens = at::randint(0, 11, {2, 12}, at::kLong);
  const at::Tensor lengths = at::tensor({12, 7}, at::kLong);
  const at::Tensor out = model->forward(tokens, {.lengths = lengths}).out;
  EXPECT_EQ(out.sizes(), at::IntArrayRef({2, 3}));
  const at::Tensor alone = model->forward(tokens.slice(0, 1).narrow(1, 0, 7)).out;
  EXPECT_TRUE(at::allclose(out[1], alone[0], 1e-5, 1e-5));
}

TEST(SequenceClassifier, LearnsABatchByHeart) {
  at::manual_seed(1);
  SequenceClassifier model(SequenceClassifierOptions{
      .input = {.vocabulary = 11, .positions = EmbeddingPositions::sinusoidal},
      .classes = 3,
      .transformer = transformer_options("i-clustered(clusters=3,topk=4)", false)});
  const at::Tensor tokens = at::randint(0, 11, {6, 12}, at::kLong);
  const at::Tensor classes = at::arange(6) % 3;
  EXPECT_LT(overfit(*model, [&] { return bits_per_value(model->forward(tokens).out, classes); }),
            kLearned);
}

TEST(CtcModel, PutsFramesTogetherAndIgnoresPadding) {
  at::manual_seed(1);
  CtcModel model(CtcModelOptions{.features = 5,
                                 .symbols = 4,
                                 .subsample = 3,
                                 .transformer = transformer_options("full", false)});
  const at::Tensor frames = at::randn({2, 20, 5}), lengths = at::tensor({20, 8}, at::kLong);
  const at::Tensor out = model->forward(frames, {.lengths = lengths}).out;
  EXPECT_EQ(out.sizes(), at::IntArrayRef({2, 7, 5}));
  EXPECT_TRUE(at::equal(model->output_lengths(lengths), at::tensor({7, 3}, at::kLong)));
  EXPECT_TRUE(at::allclose(out.exp().sum(-1), at::ones({2, 7})));
  const at::Tensor alone = model->forward(frames.slice(0, 1).narrow(1, 0, 8)).out;
  EXPECT_TRUE(at::allclose(out[1].narrow(0, 0, 3), alone[0], 1e-5, 1e-5));
}

TEST(CtcModel, LearnsABatchByHeart) {
  at::manual_seed(1);
  CtcModel model(
      CtcModelOptions{.features = 5,
                      .symbols = 4,
                      .transformer = transformer_options("clustered(clusters=6)", false)});
  const at::Tensor frames = at::randn({2, 20, 5}), lengths = at::tensor({20, 15}, at::kLong);
  const at::Tensor targets = at::tensor({1, 2, 3, 4, 4, 4, 1, -100}, at::kLong).view({2, 4});
  EXPECT_LT(overfit(*model,
                    [&] {
                      const PassOutput output = model->forward(frames, {.lengths = lengths});
                      return model->nats(output.out, targets, lengths) / 7;
                    }),
            kLearned);
}

// Two frames, one target: the alignments are (blank, a), (a, blank) and (a, a).
TEST(CtcModel, CountsAllAlignments) {
  CtcModel model(CtcModelOptions{
      .features = 1, .symbols = 2, .transformer = transformer_options("full", false)});
  const at::Tensor p = at::tensor({0.5, 0.3, 0.2, 0.6, 0.1, 0.3}, at::kDouble).view({1, 2, 3});
  const at::Tensor target = at::tensor({1, -100}, at::kLong).view({1, 2});
  EXPECT_NEAR(model->nats(p.log(), target, {}).item<double>(),
              -std::log(0.5 * 0.1 + 0.3 * 0.6 + 0.3 * 0.1), 1e-12);
  // Three targets do not fit into two frames.
  EXPECT_EQ(model->nats(p.log(), at::tensor({1, 2, 1}, at::kLong).view({1, 3}), {}).item<double>(),
            0.0);
}

ImageModelOptions image_options(const std::string& spec) {
  return {.height = 4,
          .width = 3,
          .channels = 2,
          .levels = 8,
          .transformer = transformer_options(spec, true)};
}

TEST(ImageModel, SeesEarlierValuesOnly) {
  at::manual_seed(1);
  ImageModel model(image_options("full"));
  const at::Tensor images = at::randint(0, 8, {2, 4, 3, 2}, at::kLong);
  const at::Tensor out = model->forward(images).out;
  EXPECT_EQ(out.sizes(), at::IntArrayRef({2, 24, 8}));
  const at::Tensor changed = images.clone();
  changed.flatten(1).narrow(1, 10, 14).fill_(3);
  const at::Tensor again = model->forward(changed).out;
  EXPECT_TRUE(at::allclose(again.narrow(1, 0, 11), out.narrow(1, 0, 11), 1e-5, 1e-5));
  EXPECT_FALSE(at::allclose(again.narrow(1, 11, 13), out.narrow(1, 11, 13), 1e-3, 1e-3));
  EXPECT_THROW(model->forward(images.transpose(1, 2)), Error);
  // The first values alone.
  const at::Tensor first = model->forward(images.flatten(1).narrow(1, 0, 10)).out;
  EXPECT_TRUE(at::allclose(first, out.narrow(1, 0, 10), 1e-5, 1e-5));
  EXPECT_THROW(model->forward(at::zeros({2, 25}, at::kLong)), Error);
}

TEST(ImageModel, LearnsABatchByHeart) {
  at::manual_seed(1);
  ImageModel model(image_options("2*local(window=6)+2*routing(clusters=2,window=8,share_qk=true)"));
  const at::Tensor images = at::randint(0, 8, {2, 4, 3, 2}, at::kLong);
  EXPECT_LT(overfit(*model,
                    [&] { return bits_per_value(model->forward(images).out, images.flatten(1)); }),
            kLearned);
}

TEST(BitsPerValue, AreTheMeanNegativeLogarithmToBaseTwo) {
  const at::Tensor logits = at::log(at::tensor({0.5, 0.25, 0.25})).expand({2, 2, 3});
  const at::Tensor targets = at::tensor({0, 1, 2, 0}, at::kInt).view({2, 2});
  EXPECT_NEAR(bits_per_value(logits, targets).item<double>(), 1.5, 1e-6);
}

}  // namespace
}  // namespace coterie::torch_api
