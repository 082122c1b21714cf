// SPDX-License-Identifier: MIT
// Shared by the tasks on bytes of a text: reading it, and its byte frequencies.
#pragma once

#include <cmath>
#include <string>
#include <vector>

#include "train/tasks/text.h"

namespace coterie::train {

class ByteTask : public TextTask {
 public:
  // Reads the text, which must be long enough.
  void load() const { check_parts(); }

  std::vector<Baseline> baselines() const override {
    const double loss = frequency_loss(counts(text(Split::train)), counts(text(Split::valid)));
    return {{"bytes by frequency", loss / std::log(2.0)}};
  }
  DataFacts data() const override { return facts_of(parts_.get()); }

 protected:
  static constexpr std::int64_t kBytes = 256;

  explicit ByteTask(const Config& config)
      : TextTask(config.seed, config.length),
        parts_([config] { return read_text(config, CutAt::byte); }) {}

  const std::string& text(Split split) const { return parts_.get()[split]; }
  std::int64_t size(Split split) const override {
    return static_cast<std::int64_t>(text(split).size());
  }
  std::int64_t token(Split split, std::int64_t index) const override {
    return static_cast<unsigned char>(text(split)[static_cast<std::size_t>(index)]);
  }

 private:
  static std::vector<std::int64_t> counts(const std::string& text) {
    std::vector<std::int64_t> counts(kBytes);
    for (const char byte : text) ++counts[static_cast<unsigned char>(byte)];
    return counts;
  }

  Lazy<TextParts> parts_;
};

}  // namespace coterie::train
