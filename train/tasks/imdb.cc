// SPDX-License-Identifier: MIT
// The sentiment of film reviews, read as bytes and cut to the length ("Text" of Long Range Arena).
// The last tenth of the training reviews of each label is held out for validation.
#include <filesystem>

#include "coterie/error.h"
#include "formats/checksum.h"
#include "train/reviews.h"
#include "train/tasks/examples.h"
#include "train/tasks/tasks.h"
#include "train/tasks/text.h"

namespace coterie::train {
namespace {

constexpr std::int64_t kByteValues = 256;

struct Reviews {
  std::vector<Review> parts[3];  // by Split
  DataFacts facts;

  const std::vector<Review>& operator[](Split split) const {
    return parts[static_cast<std::size_t>(split)];
  }
};

// Those of an archive, a folder, or a folder of compressed files.
std::vector<CorpusFile> review_files(const Config& config) {
  namespace fs = std::filesystem;
  if (config.data.empty()) {
    throw Error(
        "[imdb] expected --data, a folder or archive with *.train.jsonl and *.test.jsonl (or "
        ".jsonl.xz); got none");
  }
  if (!fs::is_directory(config.data)) return read_corpus_files(config.data, config.data_limit);
  std::vector<CorpusFile> files;
  for (const fs::directory_entry& entry : fs::directory_iterator(config.data)) {
    const std::string name = entry.path().filename().string();
    if (name.find(".jsonl") == std::string::npos || !entry.is_regular_file()) continue;
    for (CorpusFile& file : read_corpus_files(entry.path().string(), config.data_limit)) {
      files.push_back(std::move(file));
    }
  }
  return files;
}

Reviews read_parts(const Config& config) {
  const std::vector<CorpusFile> files = review_files(config);
  Reviews reviews;
  reviews.parts[2] = read_reviews(files, "test");
  for (const bool positive : {true, false}) {
    std::vector<Review> own;
    for (Review& review : read_reviews(files, "train")) {
      if (review.positive == positive) own.push_back(std::move(review));
    }
    const auto cut = own.end() - static_cast<std::ptrdiff_t>(own.size() / 10);
    reviews.parts[0].insert(reviews.parts[0].end(), own.begin(), cut);
    reviews.parts[1].insert(reviews.parts[1].end(), cut, own.end());
  }
  if (reviews[Split::valid].empty()) {
    throw Error("[imdb] expected at least 10 training reviews of a label; got fewer");
  }
  std::string sums;
  for (const std::vector<Review>& part : reviews.parts) {
    for (const Review& review : part) {
      sums += text_checksum(review.text) + (review.positive ? "+" : "-");
      reviews.facts.bytes += static_cast<std::int64_t>(review.text.size());
    }
  }
  reviews.facts.checksum = text_checksum(sums);
  return reviews;
}

class ImdbTask final : public ClassTask {
 public:
  explicit ImdbTask(const Config& config)
      : ClassTask(config.seed, config.length), reviews_([config] { return read_parts(config); }) {}

  std::string name() const override { return "imdb"; }
  std::int64_t vocabulary() const override { return kByteValues; }
  DataFacts data() const override { return reviews_.get().facts; }

 protected:
  std::int64_t classes() const override { return 2; }
  std::int64_t examples(Split split) const override {
    return static_cast<std::int64_t>(reviews_.get()[split].size());
  }

  void fill_example(std::int64_t example, Row& row) const override {
    const Review& review = reviews_.get()[row.split][static_cast<std::size_t>(example)];
    const std::size_t bytes = std::min(review.text.size(), row.tokens.size());
    for (std::size_t i = 0; i < bytes; ++i) {
      row.tokens[i] = static_cast<unsigned char>(review.text[i]);
    }
    row.length = std::max<std::int64_t>(1, static_cast<std::int64_t>(bytes));
    row.targets[0] = review.positive ? 1 : 0;
  }

 private:
  Lazy<Reviews> reviews_;
};

}  // namespace

std::unique_ptr<Task> make_imdb_task(const Config& config, const TaskFiles* stored) {
  auto task = std::make_unique<ImdbTask>(config);
  if (stored == nullptr) task->data();
  return task;
}

}  // namespace coterie::train
