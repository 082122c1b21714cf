// SPDX-License-Identifier: MIT
// Shared by the language modelling tasks: text in three parts, and rows whose targets are the next
// tokens.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
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

DataFacts facts_of(const TextParts& parts);

// A text as the ids of its tokens.
struct EncodedText {
  std::vector<std::int32_t> tokens[3];  // by Split
  DataFacts facts;

  const std::vector<std::int32_t>& operator[](Split split) const {
    return tokens[static_cast<std::size_t>(split)];
  }
  // How often each token occurs.
  std::vector<std::int64_t> counts(Split split, std::int64_t vocabulary) const;
};

// A value that is made when it is first needed.
template <class T>
class Lazy {
 public:
  explicit Lazy(std::function<T()> make) : make_(std::move(make)) {}
  const T& get() const {
    std::call_once(made_, [this] {
      value_.emplace(make_());
      make_ = nullptr;  // frees what it holds
    });
    return *value_;
  }

 private:
  mutable std::function<T()> make_;
  mutable std::once_flag made_;
  mutable std::optional<T> value_;
};

// Rows of train start anywhere; those of valid and test are consecutive and cover the part.
class TextTask : public RowTask {
 public:
  bool causal() const override { return true; }
  bool needs_positions() const override { return false; }

 protected:
  using RowTask::RowTask;

  // Throws if train or valid is too short for a row.
  void check_parts() const;
  std::int64_t held_out_rows(Split split) const override;
  void fill(Row& row) const override;

  virtual std::int64_t size(Split split) const = 0;  // tokens of a part
  virtual std::int64_t token(Split split, std::int64_t index) const = 0;
  virtual std::int64_t stratum(std::int64_t /*token*/) const { return 0; }  // of a target

  // Where a row starts in its part.
  std::int64_t begin_of(const Row& row) const;
};

// Cross entropy, in nats per token, of the add-one smoothed frequencies `counts` of one part on the
// token counts `wanted` of another part.
double frequency_loss(const std::vector<std::int64_t>& counts,
                      const std::vector<std::int64_t>& wanted);

}  // namespace coterie::train
