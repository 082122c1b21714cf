// SPDX-License-Identifier: MIT
// Speech recognition: the characters or phones of recordings. The error rate is that of symbols, by
// edit distance; the stratum "words" has that of words, if symbols are characters.
//
// Recordings for training may be changed anew in every epoch: resampled in time (--speech.tempo)
// and with spans of time and bands of cepstra set to 0 (--speech.masks; Park et al. 2019, there of
// mel bands).
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/upsample_linear1d.h>
#include <ATen/ops/zeros.h>
#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "coterie/error.h"
#include "train/mfcc.h"
#include "train/speech_files.h"
#include "train/tasks/examples.h"
#include "train/tasks/tasks.h"
#include "train/tasks/text.h"

namespace coterie::train {
namespace {

constexpr std::int64_t kLongestMask = 40, kWidestMask = 4;  // frames, cepstra

// Random numbers of one recording of one epoch, each used once.
class Draws {
 public:
  Draws(std::uint64_t seed, std::int64_t index)
      : stream_{random_u64({seed, RandomUse::data, 2}, static_cast<std::uint64_t>(index)),
                RandomUse::data, 3} {}

  // 0 to most.
  std::int64_t up_to(std::int64_t most) {
    return random_below(stream_, next_++, static_cast<std::uint32_t>(most + 1));
  }
  double unit() { return random_unit(stream_.at(next_++).word[0]); }

 private:
  RandomStream stream_;
  std::uint64_t next_ = 0;
};

// Frames (T, F) as `frames` frames, by linear interpolation.
at::Tensor stretched(const at::Tensor& features, std::int64_t frames) {
  return at::upsample_linear1d(features.t().unsqueeze(0), {frames}, /*align_corners=*/true)
      .squeeze(0)
      .t();
}

// Sets a span of time and a band of cepstra, with their slopes, to 0, which is their mean.
void mask(at::Tensor& features, Draws& draws) {
  const std::int64_t frames = features.size(0);
  const std::int64_t span = draws.up_to(std::min(kLongestMask, frames / 5));
  features.narrow(0, draws.up_to(frames - span), span).zero_();
  const std::int64_t band = draws.up_to(kWidestMask);
  features.unflatten(1, {-1, kCepstra}).narrow(2, draws.up_to(kCepstra - band), band).zero_();
}

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
    longest = frames_at(longest, 1 + config_.tempo);
    if (longest * config_.join <= length_) return;
    throw Error(
        fmt::format("[speech] expected --length of at least {}, {} times the frames of the longest "
                    "recording at the slowest tempo; got {}",
                    longest * config_.join, config_.join, length_));
  }

  std::string name() const override { return "speech"; }
  std::int64_t vocabulary() const override { return 0; }
  Answers answers() const override {
    return TranscriptAnswer{.features = kSpeechFeatures,
                            .symbols = speech_.get().symbols,
                            .subsample = config_.subsample,
                            .space = speech_.get().space,
                            .beam = config_.beam};
  }
  bool causal() const override { return false; }
  bool needs_positions() const override { return false; }  // the model has its own
  Metric metric() const override { return Metric::error_rate; }
  std::vector<Baseline> baselines() const override { return {{"an empty transcript", 1.0}}; }
  std::vector<std::string> strata() const override {
    return config_.symbols == "characters" ? std::vector<std::string>{"words"}
                                           : std::vector<std::string>{};
  }
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
  static std::int64_t frames_at(std::int64_t frames, double factor) {
    return std::max<std::int64_t>(1, std::llround(static_cast<double>(frames) * factor));
  }

  // Row `index` of the training data, counted without joining.
  at::Tensor changed(const at::Tensor& features, std::int64_t index) const {
    if (config_.tempo == 0 && config_.masks == 0) return features;
    Draws draws(seed_, index);
    const double factor = 1 + config_.tempo * (2 * draws.unit() - 1);
    at::Tensor own = stretched(features, frames_at(features.size(0), factor)).clone();
    for (std::int64_t i = 0; i < config_.masks; ++i) mask(own, draws);
    return own;
  }

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
      features.push_back(split == Split::train ? changed(one.features, i) : one.features);
      if (!joined.symbols.empty() && speech_.get().space != 0) {
        joined.symbols.push_back(speech_.get().space);
      }
      joined.symbols.insert(joined.symbols.end(), one.symbols.begin(), one.symbols.end());
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
      symbols = std::max(symbols, one.symbols.size());
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
      std::copy(one.symbols.begin(), one.symbols.end(), to);
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
