// SPDX-License-Identifier: MIT
// The stack: gradients by finite differences, recomputation, autocasting.
#include "coterie/torch/transformer.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "coterie/error.h"
#include "modules.h"
#include "tests/support/tensors.h"

namespace coterie::torch_api {
namespace {

using ::torch::autograd::grad;

Transformer make_transformer(const TransformerOptions& options) {
  at::manual_seed(3);
  return Transformer(options);
}

// A number that depends on all outputs.
at::Tensor loss_of(const PassOutput& output) {
  const at::Tensor weights =
      at::sin(at::arange(output.out.numel(), output.out.options())).view_as(output.out);
  const at::Tensor loss = (output.out * weights).sum();
  return loss + output.commitment * 100;
}

// Central differences with step h in double have two errors: rounding of the loss, about 1e-14 / h
// = 1e-8, and h^2 times a third derivative. Both are far below 1e-5 of a gradient of order one.
void expect_derivatives(const std::string& spec, bool causal) {
  TransformerOptions options = transformer_options(spec, causal);
  options.layers = 1;
  options.kv_heads = spec.find('+') == std::string::npos ? 2 : 0;
  Transformer model = make_transformer(options);
  model->to(at::kDouble);
  const at::Tensor x = at::randn({1, 14, 32}, at::kDouble).requires_grad_();
  const auto loss = [&] { return loss_of(model->forward(x, {.seed = 2})); };
  loss().backward();
  std::vector<at::Tensor> inputs = model->parameters();
  inputs.push_back(x);
  const at::NoGradGuard no_grad;
  for (const at::Tensor& input : inputs) {
    ASSERT_TRUE(input.grad().defined());
    const at::Tensor gradient = input.grad().reshape({-1});
    for (const std::int64_t i : {std::int64_t{0}, input.numel() / 2, input.numel() - 1}) {
      constexpr double kStep = 1e-6;
      double* const element = input.data_ptr<double>() + i;
      const double value = *element;
      *element = value + kStep;
      const double above = loss().item<double>();
      *element = value - kStep;
      const double below = loss().item<double>();
      *element = value;
      const double expected = gradient[i].item<double>();
      EXPECT_NEAR((above - below) / (2 * kStep), expected, 1e-5 * (1 + std::abs(expected)))
          << "input of shape " << input.sizes() << ", element " << i;
    }
  }
}

TEST(Derivatives, OfABlockWithEveryMechanism) {
  for (const bool causal : {false, true}) {
    for (const std::string& spec : every_spec(causal)) {
      SCOPED_TRACE(spec + (causal ? ", causal" : ""));
      expect_derivatives(spec, causal);
    }
  }
}

struct Pass {
  at::Tensor out;
  std::vector<at::Tensor> gradients;
  std::vector<AttentionRecord> records;
};

Pass run(Transformer model, const at::Tensor& x) {
  Pass pass;
  at::manual_seed(8);  // for dropout
  const PassContext context{
      .lengths = at::tensor({20, 12}, at::kInt), .seed = 6, .records = &pass.records};
  const PassOutput output = model->forward(x, context);
  pass.out = output.out.detach();
  std::vector<at::Tensor> inputs = model->parameters();
  inputs.push_back(x);
  pass.gradients = grad({loss_of(output)}, inputs);
  return pass;
}

void expect_equal(const Pass& a, const Pass& b) {
  EXPECT_TRUE(at::equal(a.out, b.out));
  for (std::size_t i = 0; i < a.gradients.size(); ++i) {
    EXPECT_TRUE(at::equal(a.gradients[i], b.gradients[i])) << "gradient " << i;
  }
  ASSERT_EQ(a.records.size(), b.records.size());
  for (std::size_t i = 0; i < a.records.size(); ++i) {
    const auto details = [](const AttentionRecord& r) {
      return attention_details(r.q, r.k, r.v, r.mechanism, r.options);
    };
    const AttentionDetails ours = details(a.records[i]), theirs = details(b.records[i]);
    for (std::size_t s = 0; s < ours.saved.size(); ++s) {
      EXPECT_TRUE(at::equal(ours.saved[s].tensor, theirs.saved[s].tensor)) << ours.saved[s].name;
    }
  }
}

TEST(Recompute, GivesTheSameBitsClustersAndDropout) {
  std::vector<std::string> specs = every_spec(false);
  specs.push_back("i-clustered(clusters=4,topk=3,clustering=hamming)");
  for (const std::string& spec : specs) {
    SCOPED_TRACE(spec);
    TransformerOptions options = transformer_options(spec, false);
    options.dropout = 0.2;
    options.attention_dropout = 0.3;
    Transformer kept = make_transformer(options);
    options.recompute = true;
    Transformer recomputed = make_transformer(options);
    const at::Tensor x = at::randn({2, 20, 32}).requires_grad_();
    expect_equal(run(kept, x), run(recomputed, x));
  }
}

TEST(AttentionDropout, IsThatOfTheSeedInTrainingAndNoneInEvaluation) {
  for (const std::string& spec : every_spec(false)) {
    SCOPED_TRACE(spec);
    TransformerOptions options = transformer_options(spec, false);
    Transformer plain = make_transformer(options);
    options.attention_dropout = 0.5;
    Transformer dropping = make_transformer(options);
    const at::Tensor x = at::randn({2, 20, 32});
    const auto out = [&](Transformer& model, std::uint64_t seed) {
      return model->forward(x, {.seed = 6, .dropout_seed = seed}).out;
    };
    EXPECT_TRUE(at::equal(out(dropping, 1), out(dropping, 1)));
    EXPECT_FALSE(at::equal(out(dropping, 1), out(dropping, 2)));
    dropping->eval();
    EXPECT_TRUE(at::equal(out(dropping, 1), out(plain, 1)));
  }
}

TEST(AttentionDropout, RefusesOtherProbabilities) {
  TransformerOptions options = transformer_options("full", true);
  options.attention_dropout = 1.0;
  const std::string error = test::error_of([&] { make_transformer(options); });
  EXPECT_NE(error.find("expected dropout from 0 to below 1; got 1"), std::string::npos) << error;
}

TEST(Recompute, LeavesTheGeneratorWhereItWas) {
  TransformerOptions options = transformer_options("full", true);
  options.dropout = 0.2;
  options.recompute = true;
  Transformer model = make_transformer(options);
  const at::Tensor loss = loss_of(model->forward(at::randn({1, 9, 32}), {}));
  at::manual_seed(1);
  const at::Tensor expected = at::randn({3});
  at::manual_seed(1);
  loss.backward();
  EXPECT_TRUE(at::equal(at::randn({3}), expected));
}

TEST(Recompute, WorksForInputsWithoutGradient) {
  TransformerOptions options = transformer_options("routing(clusters=3,window=6)", true);
  options.recompute = true;
  Transformer model = make_transformer(options);
  loss_of(model->forward(at::randn({1, 9, 32}), {})).backward();
  for (const at::Tensor& parameter : model->parameters()) EXPECT_TRUE(parameter.grad().defined());
}

// State that a block reads and that may change between its two runs. If it were not refused, the
// second run would give gradients of another function.
TEST(Recompute, RefusesAModelThatChangedSinceTheForwardPass) {
  using Change = std::function<void(Transformer&, const std::vector<AttentionRecord>&)>;
  const std::vector<std::pair<Change, const char*>> changes = {
      {[](auto& model, const auto& records) { model->update_centroids(records); },
       "parameters or centroids changed after the forward pass"},
      {[](auto& model, const auto& records) { model->initialise_centroids(records, 1); },
       "parameters or centroids changed after the forward pass"},
      {[](auto& model, const auto&) {
         const at::NoGradGuard no_grad;
         model->parameters()[3].mul_(2);
       },
       "parameters or centroids changed after the forward pass"},
      {[](auto& model, const auto&) { model->eval(); },
       "mode or attention changed after the forward pass"},
      {[](auto& model, const auto&) {
         model->set_attention({AttentionSpec::parse("routing(clusters=3,window=2)")});
       },
       "mode or attention changed after the forward pass"}};
  for (const auto& [change, words] : changes) {
    TransformerOptions options = transformer_options("routing(clusters=3,window=6)", true);
    options.recompute = true;
    options.dropout = 0.1;
    Transformer model = make_transformer(options);
    std::vector<AttentionRecord> records;
    const at::Tensor loss = loss_of(model->forward(at::randn({1, 9, 32}), {.records = &records}));
    change(model, records);
    const std::string error = test::error_of([&] { loss.backward(); });
    EXPECT_NE(error.find(words), std::string::npos) << error;
  }
}

TEST(Recompute, RefusesHigherDerivatives) {
  TransformerOptions options = transformer_options("full", true);
  options.recompute = true;
  Transformer model = make_transformer(options);
  const at::Tensor x = at::randn({1, 9, 32}).requires_grad_();
  const at::Tensor loss = loss_of(model->forward(x, {}));
  const std::string error = test::error_of([&] { grad({loss}, {x}, {}, true, true); });
  EXPECT_EQ(error, "[recompute] double backward is not supported; set create_graph to false");
}

// Enables torch's autocast to bfloat16 on the CPU in a scope.
struct Autocast {
  Autocast() {
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    at::autocast::set_autocast_enabled(at::kCPU, true);
  }
  ~Autocast() {
    at::autocast::set_autocast_enabled(at::kCPU, false);
    at::autocast::clear_cache();
  }
};

TEST(Autocast, RunsAttentionInBfloat16) {
  for (const std::string& spec : every_spec(false)) {
    SCOPED_TRACE(spec);
    Transformer model = make_transformer(transformer_options(spec, false));
    const at::Tensor x = at::randn({2, 20, 32}).requires_grad_();
    std::vector<AttentionRecord> records;
    PassOutput output;
    {
      const Autocast autocast;
      output = model->forward(x, {.records = &records});
    }
    for (const AttentionRecord& record : records) {
      EXPECT_EQ(record.q.scalar_type(), at::kBFloat16);
      EXPECT_EQ(record.v.scalar_type(), at::kBFloat16);
    }
    for (const at::Tensor& buffer : model->buffers()) EXPECT_EQ(buffer.scalar_type(), at::kFloat);
    loss_of(output).backward();
    for (const at::Tensor& parameter : model->parameters()) {
      ASSERT_TRUE(parameter.grad().defined());
      EXPECT_TRUE(at::isfinite(parameter.grad()).all().item<bool>());
    }
  }
}

// bfloat16 has 8 bits: each of about twenty successive roundings changes numbers of order one by up
// to 2^-9, outputs are normalised, and full attention has no selection that could change.
TEST(Autocast, StaysNearFloat) {
  Transformer model = make_transformer(transformer_options("full(positions=relative)", true));
  const at::Tensor x = at::randn({2, 20, 32});
  const at::Tensor exact = model->forward(x, {}).out;
  const Autocast autocast;
  const at::Tensor near = model->forward(x, {}).out.to(at::kFloat);
  EXPECT_LT((near - exact).abs().max().item<float>(), 20.0f / 512);
  EXPECT_FALSE(at::equal(near, exact));
}

TEST(Autocast, IsRepeatedByRecomputation) {
  TransformerOptions options = transformer_options("2*full+2*routing(clusters=3,window=6)", false);
  Transformer kept = make_transformer(options);
  options.recompute = true;
  Transformer recomputed = make_transformer(options);
  const at::Tensor x = at::randn({2, 20, 32}).requires_grad_();
  Pass a, b;
  {
    const Autocast autocast;
    a = run(kept, x);
  }
  {
    const Autocast autocast;
    b = run(recomputed, x);
  }
  expect_equal(a, b);
}

TEST(Transformer, TakesOneSpecOrOnePerLayer) {
  TransformerOptions options = transformer_options("full", false);
  options.attention.push_back(AttentionSpec::parse("local(window=3)"));
  Transformer model = make_transformer(options);
  std::vector<AttentionRecord> records;
  model->forward(at::randn({1, 9, 32}), {.records = &records});
  ASSERT_EQ(records.size(), 2u);
  EXPECT_EQ(to_string(records[1].mechanism), "local(window=3)");
  EXPECT_EQ(records[1].layer, 1);
  options.attention.push_back(AttentionSpec::parse("full"));
  EXPECT_EQ(test::error_of([&] { make_transformer(options); }),
            "[transformer] expected one attention spec, or one for each of 2 layers; got 3");
  EXPECT_THROW(model->set_attention(options.attention), Error);
}

TEST(Transformer, ChangesAllLayersOrNone) {
  TransformerOptions options = transformer_options("routing(clusters=3,window=4)", false);
  options.attention.push_back(AttentionSpec::parse("full"));
  Transformer model = make_transformer(options);
  const at::Tensor x = at::randn({1, 9, 32}), out = model->forward(x, {}).out;
  EXPECT_THROW(model->set_attention({AttentionSpec::parse("routing(clusters=3,window=5)")}), Error);
  EXPECT_TRUE(at::equal(model->forward(x, {}).out, out));
  model->set_attention({AttentionSpec::parse("full")});
  EXPECT_EQ(model->options().attention.size(), 1u);
}

TEST(Transformer, MovesTheCentroidsOfEachLayer) {
  TransformerOptions options = transformer_options("routing(clusters=3,window=4)", false);
  Transformer model = make_transformer(options);
  std::vector<at::Tensor> before;
  for (const at::Tensor& buffer : model->buffers()) before.push_back(buffer.clone());
  std::vector<AttentionRecord> records;
  model->forward(at::randn({2, 30, 32}), {.records = &records});
  model->update_centroids({records[1]});  // of the second layer
  const std::vector<at::Tensor> after = model->buffers();
  ASSERT_EQ(after.size(), 6u);
  EXPECT_TRUE(at::equal(after[0], before[0]));
  EXPECT_FALSE(at::equal(after[3], before[3]));
  model->initialise_centroids(records, 4);
  EXPECT_FALSE(at::equal(model->buffers()[0], before[0]));
}

TEST(Transformer, IsTheSameForTheSameSeeds) {
  const TransformerOptions options = transformer_options("cast(clusters=3,size=4)", false);
  const std::vector<at::Tensor> a = make_transformer(options)->parameters(),
                                b = make_transformer(options)->parameters();
  for (std::size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(at::equal(a[i], b[i]));
}

}  // namespace
}  // namespace coterie::torch_api
