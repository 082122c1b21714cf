// SPDX-License-Identifier: MIT
// Word-level language modelling of text whose words are separated by white space; every line ends
// with the word <eos>. The vocabulary is that of the training part.
#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "coterie/error.h"
#include "train/tasks/tasks.h"
#include "train/tasks/text.h"

namespace coterie::train {
namespace {

constexpr std::string_view kUnknown = "<unk>", kEndOfLine = "<eos>";
constexpr std::int32_t kUnknownId = 0, kEndOfLineId = 1, kReserved = 2;

// Calls use(word) for every word, and use(kEndOfLine) at every line's end.
template <class Use>
void split_words(std::string_view text, const Use& use) {
  for (std::size_t place = 0; place < text.size();) {
    const std::size_t end = std::min(text.find_first_of(" \t\r\n", place), text.size());
    if (end > place) use(text.substr(place, end - place));
    if (end < text.size() && text[end] == '\n') use(kEndOfLine);
    place = end + 1;
  }
}

class Vocabulary {
 public:
  // The `limit` most frequent words of `text`, including <unk> and <eos>; 0: all.
  Vocabulary(std::string_view text, std::int64_t limit) {
    std::unordered_map<std::string_view, std::int64_t> counts;
    split_words(text, [&](std::string_view word) { ++counts[word]; });
    counts.erase(kUnknown);
    counts.erase(kEndOfLine);
    std::vector<std::pair<std::string_view, std::int64_t>> words(counts.begin(), counts.end());
    std::sort(words.begin(), words.end(), [](const auto& a, const auto& b) {
      return a.second != b.second ? a.second > b.second : a.first < b.first;
    });
    if (limit != 0)
      words.resize(std::min(words.size(), static_cast<std::size_t>(limit - kReserved)));
    words_ = {std::string(kUnknown), std::string(kEndOfLine)};
    for (const auto& [word, count] : words) words_.emplace_back(word);
    for (std::size_t id = 0; id < words_.size(); ++id) {
      ids_.emplace(words_[id], static_cast<std::int32_t>(id));
    }
  }

  Vocabulary(const Vocabulary&) = delete;  // ids_ refers to words_
  Vocabulary& operator=(const Vocabulary&) = delete;

  std::int32_t id(std::string_view word) const {
    const auto found = ids_.find(word);
    return found == ids_.end() ? kUnknownId : found->second;
  }
  const std::vector<std::string>& words() const { return words_; }

 private:
  std::vector<std::string> words_;
  std::unordered_map<std::string_view, std::int32_t> ids_;
};

class WordsTask final : public TextTask {
 public:
  WordsTask(const Config& config, const TextParts& text)
      : TextTask(config.seed, config.length), vocabulary_(text.train, config.text.vocabulary) {
    for (const Split split : {Split::train, Split::valid, Split::test}) {
      split_words(text[split], [&](std::string_view word) {
        tokens_[index(split)].push_back(vocabulary_.id(word));
      });
    }
    check_parts();
  }

  std::string name() const override { return "words"; }
  std::int64_t vocabulary() const override {
    return static_cast<std::int64_t>(vocabulary_.words().size());
  }
  Metric metric() const override { return Metric::perplexity; }
  std::vector<Baseline> baselines() const override {
    return {{"words by frequency",
             std::exp(frequency_loss(counts(Split::train), counts(Split::valid)))}};
  }

  // A word cut off by the end of the text counts as a whole word.
  std::vector<std::int64_t> encode(const std::string& text) const override {
    std::vector<std::int64_t> tokens;
    split_words(text, [&](std::string_view word) { tokens.push_back(vocabulary_.id(word)); });
    return tokens;
  }
  std::string decode(const std::vector<std::int64_t>& tokens) const override {
    std::string text;
    for (const std::int64_t token : tokens) {
      if (token < 0 || token >= vocabulary()) {
        throw Error(
            fmt::format("[words] expected tokens from 0 to {}; got {}", vocabulary() - 1, token));
      }
      text +=
          token == kEndOfLineId ? "\n" : vocabulary_.words()[static_cast<std::size_t>(token)] + " ";
    }
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
    std::vector<std::int64_t> counts(vocabulary_.words().size());
    for (const std::int32_t token : tokens_[index(split)])
      ++counts[static_cast<std::size_t>(token)];
    return counts;
  }

  Vocabulary vocabulary_;
  std::vector<std::int32_t> tokens_[3];  // by Split
};

}  // namespace

std::unique_ptr<Task> make_words_task(const Config& config) {
  if (config.data.empty()) {
    throw Error("[words] expected text in --data (words separated by white space); got none");
  }
  const std::int64_t limit = config.text.vocabulary;
  if (limit != 0 && limit <= kReserved) {
    throw Error(fmt::format(
        "[words] expected a vocabulary of 3 words or more, or 0 for all; got {}", limit));
  }
  return std::make_unique<WordsTask>(config, read_text(config, CutAt::line));
}

}  // namespace coterie::train
