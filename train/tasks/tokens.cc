// SPDX-License-Identifier: MIT
// Language modelling of the tokens of a byte-pair encoding, which is loaded (text.tokenizer) or
// learnt from the training part.
#include <fmt/core.h>

#include <cmath>
#include <utility>

#include "coterie/error.h"
#include "train/bpe.h"
#include "train/tasks/tasks.h"
#include "train/tasks/text.h"

namespace coterie::train {
namespace {

constexpr std::int64_t kDefaultVocabulary = 4096;

class TokensTask final : public TextTask {
 public:
  TokensTask(const Config& config, const TextParts& text, BpeTokenizer tokenizer)
      : TextTask(config.seed, config.length), tokenizer_(std::move(tokenizer)) {
    for (const Split split : {Split::train, Split::valid, Split::test}) {
      tokens_[index(split)] = tokenizer_.encode(text[split]);
    }
    check_parts();
  }

  std::string name() const override { return "tokens"; }
  std::int64_t vocabulary() const override { return tokenizer_.vocabulary(); }
  Metric metric() const override { return Metric::perplexity; }
  std::vector<Baseline> baselines() const override {
    return {{"tokens by frequency",
             std::exp(frequency_loss(counts(Split::train), counts(Split::valid)))}};
  }

  std::string tokenizer_text() const override { return tokenizer_.text(); }

  std::vector<std::int64_t> encode(const std::string& text) const override {
    const std::vector<std::int32_t> ids = tokenizer_.encode(text);
    return {ids.begin(), ids.end()};
  }
  std::string decode(const std::vector<std::int64_t>& tokens) const override {
    std::string text;
    for (const std::int64_t token : tokens) text += tokenizer_.token(token);
    return text;
  }

 protected:
  std::int64_t size(Split split) const override {
    return static_cast<std::int64_t>(tokens_[index(split)].size());
  }
  std::int64_t token(Split split, std::int64_t i) const override {
    return tokens_[index(split)][static_cast<std::size_t>(i)];
  }

 private:
  static std::size_t index(Split split) { return static_cast<std::size_t>(split); }

  std::vector<std::int64_t> counts(Split split) const {
    std::vector<std::int64_t> counts(static_cast<std::size_t>(vocabulary()));
    for (const std::int32_t token : tokens_[index(split)])
      ++counts[static_cast<std::size_t>(token)];
    return counts;
  }

  BpeTokenizer tokenizer_;
  std::vector<std::int32_t> tokens_[3];  // by Split
};

BpeTokenizer make_tokenizer(const Config& config, const std::string& training_text) {
  const TextConfig& text = config.text;
  if (text.tokenizer.empty()) {
    return BpeTokenizer::train(training_text,
                               text.vocabulary == 0 ? kDefaultVocabulary : text.vocabulary);
  }
  if (text.vocabulary != 0) {
    throw Error(fmt::format(
        "[tokens] expected either text.vocabulary, to learn a tokenizer, or text.tokenizer; got {} "
        "and {}",
        text.vocabulary, text.tokenizer));
  }
  return BpeTokenizer::load(text.tokenizer);
}

}  // namespace

std::unique_ptr<Task> make_tokens_task(const Config& config) {
  const TextParts text = read_text(config, CutAt::line);
  return std::make_unique<TokensTask>(config, text, make_tokenizer(config, text.train));
}

}  // namespace coterie::train
