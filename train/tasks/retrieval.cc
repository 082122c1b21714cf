// SPDX-License-Identifier: MIT
// Whether two passages are from the same document: a row has the bytes of one, a separator and the
// bytes of the other. Documents are the articles of a text in which each begins with a line
// "= Title =", as in WikiText and wiki100m.
#include <fmt/core.h>

#include <string_view>
#include <utility>

#include "coterie/error.h"
#include "train/tasks/examples.h"
#include "train/tasks/tasks.h"
#include "train/tasks/text.h"

namespace coterie::train {
namespace {

constexpr std::int64_t kSeparator = 256;
constexpr std::int64_t kTrainPairs = 100'000, kHeldOutPairs = 2'000;

using Documents = std::vector<std::string_view>;

// "= Title =", but not "= = Section = =" or "== Section ==".
bool is_title(std::string_view line) {
  while (line.starts_with(' ')) line.remove_prefix(1);
  while (line.ends_with(' ')) line.remove_suffix(1);
  return line.size() > 4 && line.starts_with("= ") && line.ends_with(" =") && line[2] != '=' &&
         line[line.size() - 3] != '=';
}

// Articles of at least `bytes`, without their titles.
Documents documents_of(std::string_view text, std::size_t bytes) {
  Documents documents;
  std::size_t begin = std::string_view::npos;
  const auto finish = [&](std::size_t end) {
    if (begin != std::string_view::npos && end - begin >= bytes) {
      documents.push_back(text.substr(begin, end - begin));
    }
  };
  for (std::size_t line = 0; line < text.size();) {
    const std::size_t end = std::min(text.find('\n', line), text.size());
    if (is_title(text.substr(line, end - line))) {
      finish(line);
      begin = end;
    }
    line = end + 1;
  }
  finish(text.size());
  return documents;
}

struct Corpus {
  TextParts text;
  Documents parts[3];  // of `text`, by Split

  Corpus(TextParts own, std::size_t bytes) : text(std::move(own)) {
    for (const Split split : {Split::train, Split::valid, Split::test}) {
      parts[static_cast<std::size_t>(split)] = documents_of(text[split], bytes);
    }
  }
};

class RetrievalTask final : public ClassTask {
 public:
  explicit RetrievalTask(const Config& config)
      : ClassTask(config.seed, config.length),
        passage_((config.length - 1) / 2),
        corpus_([config, bytes = static_cast<std::size_t>(2 * passage_)] {
          return std::make_unique<Corpus>(read_text(config, CutAt::line), bytes);
        }) {
    if (config.data.empty()) {
      throw Error("[retrieval] expected --data with articles (lines \"= Title =\"); got none");
    }
    if (config.length < 3) {
      throw Error(fmt::format("[retrieval] expected a length of 3 or more; got {}", config.length));
    }
  }

  void load() const {
    for (const Split split : {Split::train, Split::valid}) {
      if (documents(split).size() > 1) continue;
      throw Error(fmt::format(
          "[retrieval] expected at least 2 articles (lines \"= Title =\") of {} bytes or more to "
          "train on and to validate with; got {}: shorten --length or use more text",
          2 * passage_, documents(split).size()));
    }
  }

  std::string name() const override { return "retrieval"; }
  std::int64_t vocabulary() const override { return kSeparator + 1; }
  std::vector<Baseline> baselines() const override { return {{"a guess", 0.5}}; }
  DataFacts data() const override { return facts_of(corpus_.get()->text); }

 protected:
  std::int64_t classes() const override { return 2; }
  std::int64_t examples(Split split) const override {
    if (split == Split::train) return kTrainPairs;
    return documents(split).size() > 1 ? kHeldOutPairs : 0;
  }

  void fill_example(std::int64_t example, Row& row) const override {
    const RandomStream random = random_of(row.split, example, 0);
    const Documents& all = documents(row.split);
    const auto below = [&](std::uint64_t index, std::size_t bound) {
      return static_cast<std::size_t>(random_u64(random, index) % bound);
    };
    const std::size_t first = below(0, all.size());
    const bool same = below(1, 2) == 0;
    const std::size_t second = same ? first : (first + 1 + below(2, all.size() - 1)) % all.size();
    // Two places of one article do not overlap.
    const auto bytes = static_cast<std::size_t>(passage_);
    const std::size_t room = all[first].size() - 2 * bytes + 1;
    const std::size_t a = below(3, room), b = a + bytes + below(4, room - a);
    const std::size_t other = same ? b : below(4, all[second].size() - bytes + 1);
    copy(all[first].substr(a, bytes), row, 0);
    row.tokens[bytes] = kSeparator;
    copy(all[second].substr(other, bytes), row, bytes + 1);
    row.length = 2 * passage_ + 1;
    row.targets[0] = same ? 1 : 0;
  }

 private:
  const Documents& documents(Split split) const {
    return corpus_.get()->parts[static_cast<std::size_t>(split)];
  }

  static void copy(std::string_view bytes, Row& row, std::size_t place) {
    for (const char byte : bytes) row.tokens[place++] = static_cast<unsigned char>(byte);
  }

  std::int64_t passage_;
  Lazy<std::unique_ptr<Corpus>> corpus_;
};

}  // namespace

std::unique_ptr<Task> make_retrieval_task(const Config& config, const TaskFiles* stored) {
  auto task = std::make_unique<RetrievalTask>(config);
  if (stored == nullptr) task->load();
  return task;
}

}  // namespace coterie::train
