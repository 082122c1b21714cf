// SPDX-License-Identifier: MIT
// Speech recognition: the characters of recordings. The error rate is that of characters, by edit
// distance; the stratum "words" has that of words.
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <fmt/core.h>

#include <algorithm>
#include <limits>

#include "coterie/error.h"
#include "train/mfcc.h"
#include "train/speech_files.h"
#include "train/tasks/examples.h"
#include "train/tasks/tasks.h"
#include "train/tasks/text.h"

namespace coterie::train {
namespace {

constexpr std::int64_t kSpace = 27;  // A to Z are 1 to 26

std::int64_t symbol_of(char character) { return character == ' ' ? kSpace : character - 'A' + 1; }

class SpeechTask final : public Task {
 public:
  explicit SpeechTask(const Config& config)
      : config_(config.speech),
        seed_(config.seed),
        length_(config.length),
        speech_([config] { return read_speech(config); }) {}

  // Reads the recordings, which must fit into the length.
  void load() const {
    std::int64_t longest = 0;
    for (const auto& part : speech_.get().parts) {
      for (const Utterance& one : part) longest = std::max(longest, one.features.size(0));
    }
    if (longest * config_.join <= length_) return;
    throw Error(
        fmt::format("[speech] expected --length of at least {}, {} times the frames of the longest "
                    "recording; got {}",
                    longest * config_.join, config_.join, length_));
  }

  std::string name() const override { return "speech"; }
  std::int64_t vocabulary() const override { return 0; }
  Answers answers() const override {
    return TranscriptAnswer{.features = kSpeechFeatures,
                            .symbols = kSpace,
                            .subsample = config_.subsample,
                            .space = kSpace,
                            .beam = config_.beam};
  }
  bool causal() const override { return false; }
  bool needs_positions() const override { return false; }  // the model has its own
  Metric metric() const override { return Metric::error_rate; }
  std::vector<Baseline> baselines() const override { return {{"an empty transcript", 1.0}}; }
  std::vector<std::string> strata() const override { return {"words"}; }
  DataFacts data() const override { return speech_.get().facts; }

  std::int64_t batches(Split split, std::int64_t rows) const override {
    if (rows < 1) throw Error(fmt::format("[batch] expected 1 row or more; got {}", rows));
    if (split == Split::train)
      return std::numeric_limits<std::int64_t>::max() / rows / config_.join;
    return (examples(split) + rows - 1) / rows;
  }

  // Rows are as long as the longest of them.
  Batch batch(Split split, std::int64_t index, std::int64_t rows) const override {
    const std::int64_t count = batches(split, rows);
    if (index < 0 || index >= count) {
      throw Error(fmt::format("[batch] expected an index below {}; got {}", count, index));
    }
    const std::int64_t first = index * rows;
    if (split != Split::train) rows = std::min(rows, examples(split) - first);
    std::vector<Utterance> all;
    for (std::int64_t row = 0; row < rows; ++row) all.push_back(example(split, first + row));
    return batch_of(all);
  }

 private:
  std::int64_t examples(Split split) const {
    const auto recordings = static_cast<std::int64_t>(speech_.get()[split].size());
    return (recordings + config_.join - 1) / config_.join;
  }

  // Some recordings after each other; the last held-out example may have fewer.
  Utterance example(Split split, std::int64_t row) const {
    const std::vector<Utterance>& part = speech_.get()[split];
    const auto recordings = static_cast<std::int64_t>(part.size());
    Utterance joined;
    std::vector<at::Tensor> features;
    for (std::int64_t i = row * config_.join; i < (row + 1) * config_.join; ++i) {
      if (split != Split::train && i >= recordings) break;
      const std::int64_t chosen = split == Split::train ? example_of_row(seed_, i, recordings) : i;
      const Utterance& one = part[static_cast<std::size_t>(chosen)];
      features.push_back(one.features);
      joined.text += (joined.text.empty() ? "" : " ") + one.text;
    }
    joined.features = at::cat(features);
    return joined;
  }

  static Batch batch_of(const std::vector<Utterance>& examples) {
    const auto rows = static_cast<std::int64_t>(examples.size());
    std::int64_t frames = 0;
    std::size_t symbols = 0;
    for (const Utterance& one : examples) {
      frames = std::max(frames, one.features.size(0));
      symbols = std::max(symbols, one.text.size());
    }
    Batch batch;
    batch.tokens = at::zeros({rows, frames, kSpeechFeatures}, at::kFloat);
    batch.targets = at::full({rows, static_cast<std::int64_t>(symbols)}, kIgnore, at::kLong);
    batch.lengths = at::zeros({rows}, at::kLong);
    for (std::int64_t row = 0; row < rows; ++row) {
      const Utterance& one = examples[static_cast<std::size_t>(row)];
      batch.tokens[row].narrow(0, 0, one.features.size(0)).copy_(one.features);
      batch.lengths[row] = one.features.size(0);
      auto* const to = batch.targets[row].mutable_data_ptr<std::int64_t>();
      std::transform(one.text.begin(), one.text.end(), to, symbol_of);
    }
    return batch;
  }

  SpeechConfig config_;
  std::uint64_t seed_;
  std::int64_t length_;
  Lazy<Speech> speech_;
};

}  // namespace

std::unique_ptr<Task> make_speech_task(const Config& config, const TaskFiles* stored) {
  auto task = std::make_unique<SpeechTask>(config);
  if (stored == nullptr) task->load();
  return task;
}

}  // namespace coterie::train
