// SPDX-License-Identifier: MIT
// Byte-level language modelling of any file, folder or archive.
#include <fmt/core.h>

#include <cmath>
#include <utility>

#include "coterie/error.h"
#include "train/bpe.h"
#include "train/tasks/tasks.h"
#include "train/tasks/text.h"

namespace coterie::train {
namespace {

constexpr std::int64_t kBytes = 256;

class BytesTask final : public TextTask {
 public:
  explicit BytesTask(const Config& config)
      : TextTask(config.seed, config.length),
        parts_([config] { return read_text(config, CutAt::byte); }) {}

  // Reads the text, which must be long enough.
  void load() const { check_parts(); }

  std::string name() const override { return "bytes"; }
  std::int64_t vocabulary() const override { return kBytes; }
  Metric metric() const override { return Metric::bits_per_byte; }
  std::vector<Baseline> baselines() const override {
    const double loss = frequency_loss(counts(parts_.get().train), counts(parts_.get().valid));
    return {{"bytes by frequency", loss / std::log(2.0)}};
  }

  DataFacts data() const override { return facts_of(parts_.get()); }

  std::vector<std::int64_t> encode(const std::string& text) const override {
    std::vector<std::int64_t> tokens;
    for (const char byte : text) tokens.push_back(static_cast<unsigned char>(byte));
    return tokens;
  }
  std::string decode(const std::vector<std::int64_t>& tokens) const override {
    std::string text;
    for (const std::int64_t token : tokens) {
      if (token < 0 || token >= kBytes) {
        throw Error(fmt::format("[bytes] expected tokens from 0 to 255; got {}", token));
      }
      text += static_cast<char>(token);
    }
    return text;
  }

  std::string tokenizer_text() const override { return BpeTokenizer::bytes().text(); }

 protected:
  std::int64_t size(Split split) const override {
    return static_cast<std::int64_t>(parts_.get()[split].size());
  }
  std::int64_t token(Split split, std::int64_t index) const override {
    return static_cast<unsigned char>(parts_.get()[split][static_cast<std::size_t>(index)]);
  }

 private:
  static std::vector<std::int64_t> counts(const std::string& text) {
    std::vector<std::int64_t> counts(kBytes);
    for (const char byte : text) ++counts[static_cast<unsigned char>(byte)];
    return counts;
  }

  Lazy<TextParts> parts_;
};

}  // namespace

std::unique_ptr<Task> make_bytes_task(const Config& config, const TaskFiles* stored) {
  auto task = std::make_unique<BytesTask>(config);
  if (stored == nullptr) task->load();
  return task;
}

}  // namespace coterie::train
