// SPDX-License-Identifier: MIT
// Shared by the language modelling tasks: text in three parts, and rows whose targets are the next
// tokens.
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

// The text of config.data, or the built-in text if that is empty. A folder or archive with training
// and validation files (train.txt, wiki.valid.tokens, ...) is split by these; any other text is
// split by the fractions in config.text. CutAt::line moves each cut to the next line.
TextParts read_text(const Config& config, CutAt cut);

// Rows of train start anywhere; those of valid and test are consecutive and cover the part.
class TextTask : public RowTask {
 public:
  bool causal() const override { return true; }
  bool needs_positions() const override { return false; }

 protected:
  using RowTask::RowTask;

  // Throws if train is too short for a row or valid for one target.
  void check_parts() const;
  std::int64_t held_out_rows(Split split) const override;
  void fill(Row& row) const override;

  virtual std::int64_t size(Split split) const = 0;  // tokens of a part
  virtual std::int64_t token(Split split, std::int64_t index) const = 0;

 private:
  std::int64_t random_begin(const Row& row) const;
};

// Cross entropy, in nats per token, of the add-one smoothed frequencies `counts` of one part on the
// token counts `wanted` of another part.
double frequency_loss(const std::vector<std::int64_t>& counts,
                      const std::vector<std::int64_t>& wanted);

}  // namespace coterie::train
