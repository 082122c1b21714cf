// SPDX-License-Identifier: MIT
// Word-level language modelling of text whose words are separated by white space; every line ends
// with the word <eos>. The vocabulary is that of the training part.
#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <sstream>
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

constexpr const char* kVocabularyFile = "vocabulary.txt";  // one word per line

class Vocabulary {
 public:
  // The `limit` most frequent words of `text`, including <unk> and <eos>; 0: all.
  static std::vector<std::string> most_frequent(std::string_view text, std::int64_t limit) {
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
    std::vector<std::string> kept = {std::string(kUnknown), std::string(kEndOfLine)};
    for (const auto& [word, count] : words) kept.emplace_back(word);
    return kept;
  }

  static std::vector<std::string> read(const TaskFiles& files) {
    const auto file = files.find(kVocabularyFile);
    std::vector<std::string> words;
    if (file != files.end()) {
      std::istringstream lines(file->second);
      for (std::string line; std::getline(lines, line);) words.push_back(line);
    }
    if (words.size() < kReserved || words[kUnknownId] != kUnknown ||
        words[kEndOfLineId] != kEndOfLine) {
      throw Error(
          fmt::format("[words] expected the checkpoint's {} to begin with {} and {}; got "
                      "{} (train again with this version)",
                      kVocabularyFile, kUnknown, kEndOfLine,
                      file == files.end() ? "no such file" : "other words"));
    }
    return words;
  }

  explicit Vocabulary(std::vector<std::string> words) : words_(std::move(words)) {
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

EncodedText encoded(const TextParts& parts, const Vocabulary& vocabulary) {
  EncodedText text;
  text.facts = facts_of(parts);
  for (const Split split : {Split::train, Split::valid, Split::test}) {
    split_words(parts[split], [&](std::string_view word) {
      text.tokens[static_cast<std::size_t>(split)].push_back(vocabulary.id(word));
    });
  }
  return text;
}

class WordsTask final : public TextTask {
 public:
  WordsTask(const Config& config, std::vector<std::string> words,
            std::function<TextParts()> read_parts)
      : TextTask(config.seed, config.length),
        vocabulary_(std::move(words)),
        text_([this, read_parts = std::move(read_parts)] {
          return encoded(read_parts(), vocabulary_);
        }) {}

  // Reads the text, which must be long enough.
  void load() const { check_parts(); }

  std::string name() const override { return "words"; }
  std::int64_t vocabulary() const override {
    return static_cast<std::int64_t>(vocabulary_.words().size());
  }
  Metric metric() const override { return Metric::perplexity; }
  std::vector<Baseline> baselines() const override {
    return {{"words by frequency",
             std::exp(frequency_loss(counts(Split::train), counts(Split::valid)))}};
  }
  std::vector<std::string> strata() const override { return {"known words", "<unk>"}; }
  std::vector<std::string> notes() const override {
    const std::vector<std::int64_t> found = counts(Split::valid);
    const double share = static_cast<double>(found[kUnknownId]) /
                         static_cast<double>(std::max<std::int64_t>(size(Split::valid), 1));
    return {fmt::format("{:.2g} % of the validation words are <unk>", 100 * share)};
  }
  DataFacts data() const override { return text_.get().facts; }
  TaskFiles files() const override {
    std::string text;
    for (const std::string& word : vocabulary_.words()) text += word + "\n";
    return {{kVocabularyFile, text}};
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
    return static_cast<std::int64_t>(text_.get()[split].size());
  }
  std::int64_t token(Split split, std::int64_t i) const override {
    return text_.get()[split][static_cast<std::size_t>(i)];
  }
  std::int64_t stratum(std::int64_t token) const override { return token == kUnknownId ? 1 : 0; }

 private:
  std::vector<std::int64_t> counts(Split split) const {
    return text_.get().counts(split, vocabulary());
  }

  Vocabulary vocabulary_;
  Lazy<EncodedText> text_;
};

}  // namespace

std::unique_ptr<Task> make_words_task(const Config& config, const TaskFiles* stored) {
  const auto read = [config] {
    if (!config.data.empty()) return read_text(config, CutAt::line);
    throw Error("[words] expected text in --data (words separated by white space); got none");
  };
  if (stored != nullptr) {
    return std::make_unique<WordsTask>(config, Vocabulary::read(*stored), read);
  }
  const std::int64_t limit = config.text.vocabulary;
  if (limit != 0 && limit <= kReserved) {
    throw Error(fmt::format(
        "[words] expected a vocabulary of 3 words or more, or 0 for all; got {}", limit));
  }
  TextParts parts = read();
  std::vector<std::string> words = Vocabulary::most_frequent(parts.train, limit);
  auto task = std::make_unique<WordsTask>(config, std::move(words),
                                          [parts = std::move(parts)] { return parts; });
  task->load();
  return task;
}

}  // namespace coterie::train
