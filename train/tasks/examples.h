// SPDX-License-Identifier: MIT
// Shared by the tasks with a fixed number of examples, which do not depend on the seed of a run.
#pragma once

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "train/tasks/row_task.h"

namespace coterie::train {

// The example of a training row: every epoch has all examples once, in an order of its own.
inline std::int64_t example_of_row(std::uint64_t seed, std::int64_t row, std::int64_t examples) {
  const RandomStream epochs{seed, RandomUse::data, 0};
  const RandomStream order{random_u64(epochs, static_cast<std::uint64_t>(row / examples)),
                           RandomUse::data, 1};
  return random_permutation(order, static_cast<std::uint32_t>(row % examples),
                            static_cast<std::uint32_t>(examples));
}

class ExampleTask : public RowTask {
 protected:
  ExampleTask(std::uint64_t seed, std::int64_t length) : RowTask(seed, length), seed_(seed) {}

  virtual std::int64_t examples(Split split) const = 0;
  virtual void fill_example(std::int64_t example, Row& row) const = 0;

  std::int64_t held_out_rows(Split split) const final { return examples(split); }
  void fill(Row& row) const final {
    const bool train = row.split == Split::train;
    fill_example(train ? example_of_row(seed_, row.index, examples(row.split)) : row.index, row);
  }

  // Random numbers of a generated example.
  static RandomStream random_of(Split split, std::int64_t example, std::uint32_t purpose) {
    const RandomStream all{0, RandomUse::data, static_cast<std::uint32_t>(split)};
    return {random_u64(all, static_cast<std::uint64_t>(example)), RandomUse::data, purpose};
  }

 private:
  std::uint64_t seed_;
};

// One class per example.
class ClassTask : public ExampleTask {
 public:
  Answers answers() const override { return ClassAnswer{classes()}; }
  bool causal() const override { return false; }
  bool needs_positions() const override { return true; }
  Metric metric() const override { return Metric::accuracy; }
  std::vector<Baseline> baselines() const override {
    std::vector<std::int64_t> counts(static_cast<std::size_t>(classes()));
    const std::int64_t all = examples(Split::valid);
    for (std::int64_t i = 0; i < all; ++i) ++counts[static_cast<std::size_t>(label(i))];
    const double most = static_cast<double>(*std::max_element(counts.begin(), counts.end()));
    return {{"most frequent class", most / static_cast<double>(std::max<std::int64_t>(all, 1))}};
  }

 protected:
  using ExampleTask::ExampleTask;

  virtual std::int64_t classes() const = 0;
  std::int64_t targets() const final { return 1; }

 private:
  // Of a validation example.
  std::int64_t label(std::int64_t example) const {
    std::vector<std::int64_t> tokens(static_cast<std::size_t>(length()));
    std::int64_t target = 0;
    Row row{.split = Split::valid,
            .index = example,
            .tokens = tokens,
            .targets = {&target, 1},
            .strata = {},
            .length = length()};
    fill_example(example, row);
    return target;
  }
};

}  // namespace coterie::train
