// SPDX-License-Identifier: MIT
// ListOps as in Long Range Arena: [MAX 4 [MIN 2 3 ] 1 0 [MED 1 5 8 ] ] is 5. The class of a row is
// the value of its expression.
//
// Expressions are drawn as LRA draws them: a node above the depth limit is an operator with
// probability 1/4, else a digit; an operator has 2 to 10 arguments. Those that are not between the
// shortest and the longest length are drawn again.
#include <fmt/core.h>

#include <algorithm>
#include <numeric>

#include "coterie/error.h"
#include "train/tasks/examples.h"
#include "train/tasks/tasks.h"

namespace coterie::train {
namespace {

// Tokens: the digits, then
enum Token : std::int64_t { kMin = 10, kMax, kMedian, kSumModulo, kClose, kTokens };
constexpr std::int64_t kDigits = 10, kOperators = kClose - kMin;
constexpr std::int64_t kTrainExpressions = 96'000, kHeldOutExpressions = 2'000;

std::int64_t apply(std::int64_t operation, std::vector<std::int64_t> values) {
  std::sort(values.begin(), values.end());
  const std::size_t half = values.size() / 2;
  switch (operation) {
    case kMin:
      return values.front();
    case kMax:
      return values.back();
    case kMedian:  // of an even number: the mean of the two in the middle, rounded down
      return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
    default:
      return std::accumulate(values.begin(), values.end(), std::int64_t{0}) % 10;
  }
}

// One attempt to draw an expression.
class Expression {
 public:
  Expression(RandomStream random, const ListopsConfig& config, std::size_t room)
      : random_(random), config_(config), room_(room) {
    value_ = node(1);
  }

  const std::vector<std::int64_t>& tokens() const { return tokens_; }
  std::int64_t value() const { return value_; }
  bool fits() const { return tokens_.size() < room_; }

 private:
  std::int64_t below(std::int64_t bound) {
    return random_below(random_, drawn_++, static_cast<std::uint32_t>(bound));
  }

  std::int64_t node(std::int64_t depth) {
    if (!fits()) return 0;  // too long already
    if (depth >= config_.depth || below(4) != 0) {
      tokens_.push_back(below(kDigits));
      return tokens_.back();
    }
    const std::int64_t operation = kMin + below(kOperators);
    tokens_.push_back(operation);
    std::vector<std::int64_t> values(static_cast<std::size_t>(2 + below(config_.arguments - 1)));
    for (std::int64_t& value : values) value = node(depth + 1);
    tokens_.push_back(kClose);
    return apply(operation, std::move(values));
  }

  RandomStream random_;
  const ListopsConfig& config_;
  std::size_t room_;
  std::uint64_t drawn_ = 0;
  std::vector<std::int64_t> tokens_;
  std::int64_t value_ = 0;
};

class ListopsTask final : public ClassTask {
 public:
  explicit ListopsTask(const Config& config)
      : ClassTask(config.seed, config.length),
        config_(config.listops),
        shortest_(config_.shortest > 0 ? config_.shortest : config.length / 4) {
    // The expressions of a depth limit of 1 are digits; longer ones must not be too rare to find.
    if (shortest_ + 4 > config.length) {
      throw Error(
          fmt::format("[listops] expected listops.shortest to be at least 4 below the length {}; "
                      "got {}",
                      config.length, shortest_));
    }
    random_expression(Split::train, 0);
  }

  std::string name() const override { return "listops"; }
  std::int64_t vocabulary() const override { return kTokens; }

 protected:
  std::int64_t classes() const override { return kDigits; }
  std::int64_t examples(Split split) const override {
    return split == Split::train ? kTrainExpressions : kHeldOutExpressions;
  }

  void fill_example(std::int64_t example, Row& row) const override {
    const Expression expression = random_expression(row.split, example);
    std::copy(expression.tokens().begin(), expression.tokens().end(), row.tokens.begin());
    row.length = static_cast<std::int64_t>(expression.tokens().size());
    row.targets[0] = expression.value();
  }

 private:
  Expression random_expression(Split split, std::int64_t example) const {
    constexpr std::uint32_t kAttempts = 100'000;
    for (std::uint32_t attempt = 0; attempt < kAttempts; ++attempt) {
      const Expression expression(random_of(split, example, attempt), config_,
                                  static_cast<std::size_t>(length()));
      const auto tokens = static_cast<std::int64_t>(expression.tokens().size());
      if (expression.fits() && tokens > shortest_) return expression;
    }
    throw Error(fmt::format(
        "[listops] found no expression with {} to {} tokens, depth {} and {} arguments in {} "
        "attempts: raise --listops.depth or --listops.arguments, or shorten --length",
        shortest_ + 1, length() - 1, config_.depth, config_.arguments, kAttempts));
  }

  ListopsConfig config_;
  std::int64_t shortest_;
};

}  // namespace

std::unique_ptr<Task> make_listops_task(const Config& config, const TaskFiles* /*stored*/) {
  return std::make_unique<ListopsTask>(config);
}

}  // namespace coterie::train
