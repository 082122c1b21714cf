// SPDX-License-Identifier: MIT
// What the tasks of language modelling share: text in three parts, and rows of tokens whose targets
// are the tokens after them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "train/tasks/row_task.h"

namespace coterie::train {

struct TextParts {
  std::string train, valid, test;

  const std::string& operator[](Split split) const;
};

enum class CutAt : std::uint8_t { byte, line };

// The text of config.data, or the built-in one when that is empty. A folder or archive with files
// for training and validation (train.txt, wiki.valid.tokens, ...) has its parts in them; any other
// text is cut into the shares of config.text, each cut moved to the next line with CutAt::line.
TextParts read_text(const Config& config, CutAt cut);

// Rows of train begin anywhere; those of valid and test lie side by side and cover the part.
class TextTask : public RowTask {
 public:
  bool causal() const override { return true; }
  bool needs_positions() const override { return false; }

 protected:
  using RowTask::RowTask;

  // Throws when a part that is needed is too short for a row (train) or for one target (valid).
  void check_parts() const;
  std::int64_t held_out_rows(Split split) const override;
  void fill(Row& row) const override;

  virtual std::int64_t size(Split split) const = 0;  // tokens of a part
  virtual std::int64_t token(Split split, std::int64_t index) const = 0;

 private:
  std::int64_t random_begin(const Row& row) const;
};

// Cross entropy, in nats per token, of `counts` (the frequencies of tokens in one part, each
// counted once more) on `wanted`, the counts of another part.
double frequency_loss(const std::vector<std::int64_t>& counts,
                      const std::vector<std::int64_t>& wanted);

}  // namespace coterie::train
