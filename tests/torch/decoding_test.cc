// SPDX-License-Identifier: MIT
// Decoding, one token at a time or after a prompt read at once, gives the logits of the parallel
// pass.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <string>

#include "coterie/error.h"
#include "modules.h"
#include "tests/support/tensors.h"
#include "torch/src/decode.h"

namespace coterie::torch_api {
namespace {

// A model in double, with centroids that attract tokens.
LanguageModel make_model(const std::string& spec, LanguageModelOptions options) {
  at::manual_seed(4);
  options.transformer.attention = {AttentionSpec::parse(spec)};
  options.transformer.causal = true;
  LanguageModel model(options);
  model->to(at::kDouble);
  model->eval();
  const at::NoGradGuard no_grad;
  for (const at::Tensor& parameter : model->parameters()) at::Tensor(parameter).mul_(1.7);
  return model;
}

// Both passes add the same terms in different orders, about a hundred operations deep, with numbers
// of order ten. 1e-10 is 1e5 units in the last place of these.
void expect_same_logits(LanguageModel model, std::int64_t N) {
  const at::NoGradGuard no_grad;
  const at::Tensor tokens = at::randint(0, 11, {3, N}, at::kLong);
  const at::Tensor parallel = model->forward(tokens).out;
  DecoderCache cache = model->make_cache(3);
  for (std::int64_t t = 0; t < N; ++t) {
    const at::Tensor logits = model->step(tokens.select(1, t), cache);
    ASSERT_EQ(cache.position, t + 1);
    ASSERT_LT((logits - parallel.select(1, t)).abs().max().item<double>(), 1e-10) << "token " << t;
  }
}

// Prompts read at once or in pieces, then single steps.
void expect_same_prefill(LanguageModel model, std::int64_t N) {
  const at::NoGradGuard no_grad;
  const at::Tensor tokens = at::randint(0, 11, {3, N}, at::kLong);
  const at::Tensor parallel = model->forward(tokens).out;
  for (const std::vector<std::int64_t>& pieces :
       {std::vector<std::int64_t>{1}, {2, 3}, {N}, {N - 6}, {N / 2, 1, N / 3}, {1, N / 2, 7}}) {
    DecoderCache cache = model->make_cache(3);
    const auto expect_logits = [&](const at::Tensor& logits) {
      ASSERT_EQ(logits.sizes(), (std::vector<std::int64_t>{3, 11}));
      const at::Tensor expected = parallel.select(1, cache.position - 1);
      ASSERT_LT((logits - expected).abs().max().item<double>(), 1e-10)
          << "after " << cache.position << " tokens, first piece " << pieces[0];
    };
    for (const std::int64_t piece : pieces) {
      expect_logits(model->prefill(tokens.narrow(1, cache.position, piece), cache));
    }
    while (cache.position < N) {
      expect_logits(model->step(tokens.select(1, cache.position), cache));
    }
  }
}

std::vector<std::string> decodable_specs() {
  std::vector<std::string> specs = every_spec(true);
  specs.insert(specs.end(),
               {"local(window=7,kind=blocked,flange=2,positions=none)",
                "local(window=3,kind=blocked,flange=0)", "local(window=1)",
                "strided(stride=4,positions=rotary)", "strided(stride=3,positions=relative)",
                "local(window=6,positions=relative)", "full(positions=none)", "oracle-top(topk=3)",
                "routing(clusters=1,window=50)", "routing(clusters=5,window=1,share_qk=true)",
                "routing(clusters=3,window=2,queries_in=9,share_qk=true,self=keep)",
                "routing(clusters=3,window=4,queries_in=2,include_self=true,self=demote)",
                "routing(clusters=4,window=3,positions=rotary)",
                "2*full(positions=relative)+1*local(window=3)+1*routing(clusters=3,window=4)"});
  return specs;
}

TEST(Decoding, EqualsTheParallelPass) {
  for (const std::string& spec : decodable_specs()) {
    SCOPED_TRACE(spec);
    expect_same_logits(make_model(spec, language_model_options(spec, true)), 45);
  }
}

TEST(Decoding, PrefillEqualsTheParallelPass) {
  for (const std::string& spec : decodable_specs()) {
    SCOPED_TRACE(spec);
    expect_same_prefill(make_model(spec, language_model_options(spec, true)), 45);
  }
}

// A local window far shorter than the prompt: rows that nothing sees any more are dropped.
TEST(Decoding, PrefillKeepsTheRowsOfAWindow) {
  const char* spec = "2*local(window=5)+2*local(window=8,kind=blocked)";
  LanguageModel model = make_model(spec, language_model_options(spec, true));
  expect_same_prefill(model, 300);
  DecoderCache cache = model->make_cache(1);
  model->prefill(at::zeros({1, 500}, at::kLong), cache);
  for (const GroupCache& group : cache.layers[0]->groups) {
    EXPECT_LE(std::get<RowCache>(group).k.size(2), 64);
  }
}

TEST(Decoding, EqualsTheParallelPassWithSharedKeyHeads) {
  for (const char* spec :
       {"full", "2*local(window=4)+2*routing(clusters=3,window=3)",
        "routing(clusters=3,window=4,share_qk=true,queries_in=2)",
        "routing(clusters=3,window=2,queries_in=2,include_self=true,self=demote)"}) {
    SCOPED_TRACE(spec);
    LanguageModelOptions options = language_model_options(spec, true);
    options.transformer.kv_heads = 2;
    expect_same_logits(make_model(spec, options), 30);
    expect_same_prefill(make_model(spec, options), 30);
  }
}

TEST(Decoding, EqualsTheParallelPassWithPositionsOfTheEmbedding) {
  for (const EmbeddingPositions positions :
       {EmbeddingPositions::sinusoidal, EmbeddingPositions::learned}) {
    LanguageModelOptions options = language_model_options("full", true);
    options.input.positions = positions;
    options.input.max_length = 20;
    options.tied = false;
    LanguageModel model = make_model("full", options);
    expect_same_logits(model, 20);
    expect_same_prefill(model, 20);
    if (positions == EmbeddingPositions::learned) {
      EXPECT_THROW(expect_same_logits(model, 21), Error);
    }
  }
}

TEST(Decoding, LeavesCopiesOfACacheAlone) {
  for (const char* spec : {"full", "local(window=3)", "routing(clusters=3,window=4)"}) {
    SCOPED_TRACE(spec);
    at::manual_seed(4);
    SelfAttention layer(SelfAttentionOptions{
        .dim = 8, .heads = 2, .spec = AttentionSpec::parse(spec), .causal = true});
    const auto cache = layer->make_cache(2);
    layer->prefill(at::randn({2, 5, 8}), *cache);
    for (const std::int64_t N : {1, 4}) {
      LayerCache copy = *cache;
      const at::Tensor x = at::randn({2, N, 8}), expected = layer->prefill(x, copy);
      LayerCache other = *cache;
      layer->prefill(at::randn({2, N, 8}), other);
      EXPECT_TRUE(at::equal(layer->prefill(x, *cache), expected));
    }
  }
}

// Copies of a model's cache, constructed and assigned, are independent of each other.
TEST(Decoding, CopiesOfADecoderCacheGoOnByThemselves) {
  for (const std::string& spec : every_spec(true)) {
    SCOPED_TRACE(spec);
    LanguageModelOptions options = language_model_options(spec, true);
    options.input.positions = EmbeddingPositions::sinusoidal;  // makes the position matter
    LanguageModel model = make_model(spec, options);
    const at::NoGradGuard no_grad;
    const at::Tensor tokens = at::randint(0, 11, {3, 2, 12}, at::kLong);  // three continuations
    const auto step = [&](DecoderCache& cache, std::int64_t sequence, std::int64_t t) {
      return model->step(tokens[sequence].select(1, t), cache);
    };
    const auto alone = [&](std::int64_t sequence) {
      DecoderCache cache = model->make_cache(2);
      for (std::int64_t t = 0; t < 5; ++t) step(cache, 0, t);
      at::Tensor logits;
      for (std::int64_t t = 5; t < 12; ++t) logits = step(cache, sequence, t);
      return logits;
    };
    DecoderCache first = model->make_cache(2);
    for (std::int64_t t = 0; t < 5; ++t) step(first, 0, t);
    DecoderCache second = first, third = model->make_cache(2);
    third = first;
    std::vector<at::Tensor> logits(3);
    for (std::int64_t t = 5; t < 12; ++t) {
      logits[0] = step(first, 0, t);
      logits[1] = step(second, 1, t);
      logits[2] = step(third, 2, t);
    }
    for (std::int64_t i = 0; i < 3; ++i) {
      EXPECT_TRUE(at::equal(logits[static_cast<std::size_t>(i)], alone(i))) << i;
    }
    EXPECT_EQ(first.position, 12);
    EXPECT_EQ(second.position, 12);
  }
}

TEST(Decoding, RefusesWhatLooksAheadByName) {
  const auto refusal = [](const std::string& spec, bool causal) {
    LanguageModel model(language_model_options(spec, causal));
    return test::error_of([&] { model->make_cache(1); });
  };
  const auto expect_refusal = [&](const std::string& spec, bool causal, const char* words) {
    const std::string error = refusal(spec, causal);
    EXPECT_NE(error.find(words), std::string::npos) << error;
  };
  expect_refusal("routing(clusters=3,window=4,causal=paper)", true,
                 "[routing] expected a mechanism");
  expect_refusal("i-clustered(clusters=3,causal=reference)", true, "[i-clustered] ");
  expect_refusal("2*full+2*lsh", true, "[lsh] ");
  expect_refusal("full", false, "expected a causal layer");
}

TEST(Decoding, RefusesAnotherBatch) {
  LanguageModel model(language_model_options("full", true));
  DecoderCache cache = model->make_cache(2);
  EXPECT_THROW(model->step(at::zeros({3}, at::kLong), cache), Error);
  EXPECT_THROW(model->step(at::zeros({2, 1}, at::kLong), cache), Error);
  EXPECT_THROW(model->prefill(at::zeros({3, 4}, at::kLong), cache), Error);
  EXPECT_THROW(model->prefill(at::zeros({2, 0}, at::kLong), cache), Error);
  EXPECT_EQ(cache.position, 0);
}

}  // namespace
}  // namespace coterie::torch_api
