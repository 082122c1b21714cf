// SPDX-License-Identifier: MIT
// Sampling after a prompt: seeds, several samples, the end by `emit`, prompts in pieces.
#include "train/sample.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "coterie/error.h"
#include "coterie/runtime.h"

namespace coterie::train {
namespace {

torch_api::LanguageModel make_model(const char* spec) {
  at::manual_seed(3);
  torch_api::LanguageModelOptions options;
  options.input.vocabulary = 17;
  options.transformer.dim = 16;
  options.transformer.attention = {AttentionSpec::parse(spec)};
  options.transformer.causal = true;
  return torch_api::LanguageModel(options);
}

std::vector<std::int64_t> tokens_of(torch_api::LanguageModel& model, const ReadPrompt& prompt,
                                    const SampleOptions& options) {
  std::vector<std::int64_t> tokens;
  sample(model, prompt, options, [&](std::int64_t token) {
    tokens.push_back(token);
    return true;
  });
  return tokens;
}

TEST(Sample, ImagesAreThoseOfTheParallelPass) {
  for (const char* spec : {"full", "2*local(window=6)+2*routing(clusters=2,window=8)"}) {
    at::manual_seed(3);
    torch_api::ImageModelOptions options{.height = 4, .width = 3, .channels = 2, .levels = 256};
    options.transformer.dim = 16;
    options.transformer.attention = {AttentionSpec::parse(spec)};
    options.transformer.causal = true;
    const auto model = std::make_shared<torch_api::ImageModelImpl>(options);
    const SampleOptions sampling{.temperature = 2.0, .seed = 5};
    const Picture picture = sample_image(model, sampling);
    EXPECT_EQ(picture.height, 4);
    EXPECT_EQ(picture.width, 3);
    ASSERT_EQ(picture.values.size(), 24U);
    EXPECT_EQ(sample_image(model, sampling).values, picture.values);
    EXPECT_NE(sample_image(model, {.temperature = 2.0, .seed = 6}).values, picture.values);
    std::vector<std::int64_t> values;
    for (const char value : picture.values) values.push_back(static_cast<unsigned char>(value));
    const at::Tensor tokens = at::tensor(values, at::kLong).unsqueeze(0);
    const at::NoGradGuard no_grad;
    const at::Tensor logits = model->forward(tokens).out[0];
    torch_api::DecoderCache cache = model->make_cache(1);
    for (std::int64_t i = 0; i < 24; ++i) {
      const at::Tensor next =
          model->prefill(tokens.narrow(1, i == 0 ? 0 : i - 1, i == 0 ? 0 : 1), cache);
      EXPECT_TRUE(at::allclose(next[0], logits[i], 1e-4, 1e-5)) << spec << " value " << i;
      EXPECT_EQ(choose(next[0], sampling, static_cast<std::uint64_t>(i)), values[i]);
    }
    EXPECT_THROW(model->prefill(tokens.narrow(1, 0, 1), cache), Error);
    torch_api::DecoderCache pieces = model->make_cache(1);
    model->prefill(tokens.narrow(1, 0, 5), pieces);
    EXPECT_TRUE(
        at::allclose(model->prefill(tokens.narrow(1, 5, 3), pieces)[0], logits[8], 1e-4, 1e-5));
    EXPECT_THROW(model->prefill(tokens.narrow(1, 0, 0), pieces), Error);
  }
}

const char* const kSpecs[] = {"full",
                              "2*local(window=4)+2*routing(clusters=3,window=4,share_qk=true)"};

TEST(Sample, EqualSeedsGiveEqualTokens) {
  for (const char* spec : kSpecs) {
    torch_api::LanguageModel model = make_model(spec);
    const ReadPrompt prompt = read_prompt(model, {1, 2, 3, 4, 5, 6, 7});
    const SampleOptions options{.tokens = 40, .temperature = 2.0, .seed = 5};
    const std::vector<std::int64_t> tokens = tokens_of(model, prompt, options);
    ASSERT_EQ(tokens.size(), 40u);
    // The prompt's state is not used up, and the number of threads does not matter.
    const int before = threads();
    for (const int count : {1, 3}) {
      set_threads(count);
      EXPECT_EQ(tokens_of(model, prompt, options), tokens);
      EXPECT_EQ(tokens_of(model, read_prompt(model, {1, 2, 3, 4, 5, 6, 7}), options), tokens);
    }
    set_threads(before);
    SampleOptions other = options;
    other.number = 1;
    const std::vector<std::int64_t> second = tokens_of(model, prompt, other);
    EXPECT_NE(second, tokens);
    EXPECT_EQ(tokens_of(model, prompt, other), second);
    other = options;
    other.seed = 6;
    EXPECT_NE(tokens_of(model, prompt, other), tokens);
  }
}

TEST(Sample, EndsWhenToldTo) {
  torch_api::LanguageModel model = make_model("full");
  const ReadPrompt prompt = read_prompt(model, {1});
  int calls = 0;
  sample(model, prompt, {.tokens = 40}, [&](std::int64_t) { return ++calls < 3; });
  EXPECT_EQ(calls, 3);
}

// A prompt of several chunks ends with the logits of single steps.
TEST(Sample, ReadsLongPromptsInChunks) {
  for (const char* spec : kSpecs) {
    torch_api::LanguageModel model = make_model(spec);
    const std::int64_t N = 2 * kPrefillChunk + 5;
    const at::Tensor tokens = at::randint(0, 17, {N}, at::kLong);
    std::vector<std::int64_t> progress;
    const ReadPrompt read =
        read_prompt(model, {tokens.data_ptr<std::int64_t>(), tokens.data_ptr<std::int64_t>() + N},
                    [&](std::int64_t n) { progress.push_back(n); });
    EXPECT_EQ(progress, (std::vector<std::int64_t>{kPrefillChunk, 2 * kPrefillChunk, N}));
    EXPECT_EQ(read.cache.position, N);
    const at::NoGradGuard no_grad;
    model->eval();
    const at::Tensor expected = model->forward(tokens.unsqueeze(0)).out[0][N - 1];
    EXPECT_LT((read.logits - expected).abs().max().item<double>(), 1e-3) << spec;
  }
}

TEST(Sample, RefusesWhatItCannotDo) {
  torch_api::LanguageModel model = make_model("full");
  EXPECT_THROW(read_prompt(model, {}), Error);
  const ReadPrompt prompt = read_prompt(model, {1});
  const auto emit = [](std::int64_t) { return true; };
  EXPECT_THROW(sample(model, prompt, {.temperature = -1}, emit), Error);
  EXPECT_THROW(sample(model, prompt, {.top_p = 0}, emit), Error);
  torch_api::LanguageModel leaking = make_model("routing(clusters=3,window=4,causal=paper)");
  EXPECT_THROW(read_prompt(leaking, {1}), Error);
}

}  // namespace
}  // namespace coterie::train
