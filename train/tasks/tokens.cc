// SPDX-License-Identifier: MIT
// Language modelling of the tokens of a byte-pair encoding, which is loaded (text.tokenizer) or
// learnt from the training part.
#include <fmt/core.h>

#include <cmath>
#include <functional>
#include <utility>

#include "coterie/error.h"
#include "train/bpe.h"
#include "train/tasks/tasks.h"
#include "train/tasks/text.h"

namespace coterie::train {
namespace {

constexpr std::int64_t kDefaultVocabulary = 4096;
constexpr const char* kTokenizerFile = "tokenizer.json";

class TokensTask final : public TextTask {
 public:
  TokensTask(const Config& config, BpeTokenizer tokenizer, std::function<TextParts()> read_parts)
      : TextTask(config.seed, config.length),
        tokenizer_(std::move(tokenizer)),
        text_([this, read_parts = std::move(read_parts)] { return encoded(read_parts()); }) {}

  // Reads the text, which must be long enough.
  void load() const { check_parts(); }

  std::string name() const override { return "tokens"; }
  std::int64_t vocabulary() const override { return tokenizer_.vocabulary(); }
  Metric metric() const override { return Metric::perplexity; }
  std::vector<Baseline> baselines() const override {
    return {{"tokens by frequency",
             std::exp(frequency_loss(counts(Split::train), counts(Split::valid)))}};
  }

  std::string tokenizer_text() const override { return tokenizer_.text(); }
  TaskFiles files() const override { return {{kTokenizerFile, tokenizer_.text()}}; }
  DataFacts data() const override { return text_.get().facts; }
  std::vector<std::string> notes() const override {
    return {fmt::format(
        "{:.3g} bytes per token",
        static_cast<double>(text_.get().facts.bytes) /
            static_cast<double>(size(Split::train) + size(Split::valid) + size(Split::test)))};
  }

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
    return static_cast<std::int64_t>(text_.get()[split].size());
  }
  std::int64_t token(Split split, std::int64_t i) const override {
    return text_.get()[split][static_cast<std::size_t>(i)];
  }

 private:
  EncodedText encoded(const TextParts& parts) const {
    EncodedText text;
    text.facts = facts_of(parts);
    for (const Split split : {Split::train, Split::valid, Split::test}) {
      text.tokens[static_cast<std::size_t>(split)] = tokenizer_.encode(parts[split]);
    }
    return text;
  }

  std::vector<std::int64_t> counts(Split split) const {
    return text_.get().counts(split, vocabulary());
  }

  BpeTokenizer tokenizer_;
  Lazy<EncodedText> text_;
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

std::unique_ptr<Task> make_tokens_task(const Config& config, const TaskFiles* stored) {
  const auto read = [config] { return read_text(config, CutAt::line); };
  if (stored != nullptr) {
    const auto file = stored->find(kTokenizerFile);
    if (file == stored->end()) {
      throw Error(fmt::format("[tokens] the checkpoint has no {}: train again", kTokenizerFile));
    }
    return std::make_unique<TokensTask>(config, BpeTokenizer::parse(file->second, kTokenizerFile),
                                        read);
  }
  TextParts parts = read();
  BpeTokenizer tokenizer = make_tokenizer(config, parts.train);
  auto task = std::make_unique<TokensTask>(config, std::move(tokenizer),
                                           [parts = std::move(parts)] { return parts; });
  task->load();
  return task;
}

}  // namespace coterie::train
