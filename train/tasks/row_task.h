// SPDX-License-Identifier: MIT
// A task whose batches are filled row by row. Derived tasks implement fill() and may override the
// number of held-out rows and of targets.
#pragma once

#include <span>

#include "coterie/random.h"
#include "train/task.h"

namespace coterie::train {

// One row of a batch, to be filled. Tokens are 0, targets kIgnore and strata 0 at first.
struct Row {
  Split split = Split::train;
  std::int64_t index = 0;                           // in the split
  std::span<std::int64_t> tokens, targets, strata;  // strata: empty in tasks without them
  std::int64_t length = 0;  // valid positions, initially all; held-out text may be shorter
};

class RowTask : public Task {
 public:
  Batch batch(Split split, std::int64_t index, std::int64_t rows) const final;
  std::int64_t batches(Split split, std::int64_t rows) const final;

 protected:
  RowTask(std::uint64_t seed, std::int64_t length);

  // Rows of valid or test.
  virtual std::int64_t held_out_rows(Split) const { return 1024; }
  virtual std::int64_t targets() const { return length_; }  // of a row, and its strata
  virtual void fill(Row& row) const = 0;

  std::int64_t length() const { return length_; }
  // Random numbers of one row: a pure function of (seed, split, index), different per purpose.
  RandomStream random(const Row& row, std::uint32_t purpose) const;

 private:
  std::uint64_t seed_;
  std::int64_t length_;
};

}  // namespace coterie::train
