// SPDX-License-Identifier: MIT
// Masked copy (Vyas et al. 2020): a row is 0 w 0 w, where w is a word of random symbols. At some
// positions one of the two copies is masked, never both. The targets are the masked symbols, each
// of which can only be read from the other copy.
#include <fmt/core.h>

#include <algorithm>
#include <cmath>

#include "coterie/error.h"
#include "train/tasks/row_task.h"
#include "train/tasks/tasks.h"

namespace coterie::train {
namespace {

class CopyTask final : public RowTask {
 public:
  explicit CopyTask(const Config& config)
      : RowTask(config.seed, config.length),
        symbols_(config.copy.symbols),
        word_((config.length - 2) / 2) {
    if (config.length < 4 || config.length % 2 != 0) {
      throw Error(fmt::format("[copy] expected an even length of 4 or more (0 word 0 word); got {}",
                              config.length));
    }
    if (symbols_ < 2 || symbols_ > 1'000'000) {
      throw Error(fmt::format("[copy] expected 2 to 1000000 symbols; got {}", symbols_));
    }
    const double share = config.copy.mask;
    if (!(share > 0.0 && share <= 1.0)) {
      throw Error(fmt::format("[copy] expected copy.mask above 0 and at most 1; got {}", share));
    }
    masked_ = std::max<std::int64_t>(1, std::llround(share * static_cast<double>(word_)));
  }

  std::string name() const override { return "copy"; }
  std::int64_t vocabulary() const override { return symbols_ + 2; }
  bool causal() const override { return false; }
  bool needs_positions() const override { return true; }
  double embedding_std() const override { return 0.5; }
  Metric metric() const override { return Metric::accuracy; }
  std::vector<Baseline> baselines() const override {
    return {{"a guess", 1.0 / static_cast<double>(symbols_)}};
  }

 protected:
  void fill(Row& row) const override {
    const RandomStream symbols = random(row, kSymbols);
    const auto bound = static_cast<std::uint32_t>(symbols_);
    for (std::int64_t i = 0; i < word_; ++i) {
      const std::int64_t symbol = 1 + random_below(symbols, static_cast<std::uint64_t>(i), bound);
      row.tokens[first(i)] = row.tokens[second(i)] = symbol;
    }
    const RandomStream places = random(row, kPlaces), sides = random(row, kSides);
    for (std::uint32_t m = 0; m < static_cast<std::uint32_t>(masked_); ++m) {
      const std::int64_t i = random_permutation(places, m, static_cast<std::uint32_t>(word_));
      const std::size_t place = random_below(sides, m, 2) == 0 ? first(i) : second(i);
      row.targets[place] = row.tokens[place];
      row.tokens[place] = symbols_ + 1;
    }
  }

 private:
  enum Purpose : std::uint32_t { kSymbols, kPlaces, kSides };
  static std::size_t first(std::int64_t i) { return static_cast<std::size_t>(1 + i); }
  std::size_t second(std::int64_t i) const { return static_cast<std::size_t>(2 + word_ + i); }

  std::int64_t symbols_, word_, masked_ = 0;
};

}  // namespace

std::unique_ptr<Task> make_copy_task(const Config& config, const TaskFiles* /*stored*/) {
  return std::make_unique<CopyTask>(config);
}

}  // namespace coterie::train
