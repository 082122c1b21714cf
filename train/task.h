// SPDX-License-Identifier: MIT
// A task: the data and metric of training and evaluation. docs/extending.md shows how to add one.
//
// Batches are pure functions of (split, index). The order of data therefore needs no state, and a
// resumed run sees the same batches as an uninterrupted one.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "train/config.h"

namespace coterie::train {

enum class Split : std::uint8_t { train, valid, test };

constexpr std::int64_t kIgnore = -100;  // target of a position without a loss

struct Batch {
  at::Tensor tokens;   // (B, N) int64; of a transcript's task frames (B, N, features), float
  at::Tensor targets;  // (B, N) int64, kIgnore where there is no loss; for causal language
                       // modelling the token after each position. One class per row: (B, 1).
                       // Transcripts: (B, L) symbols, filled up with kIgnore
  at::Tensor strata;   // (B, N) int64: index into Task::strata() of each target; or undefined
  at::Tensor lengths;  // (B) int64 valid positions of each row; undefined: all
};

// Sums over the targets, from which metrics are computed.
struct Score {
  double nats = 0;           // sum of negative log-probabilities
  std::int64_t count = 0;    // targets
  std::int64_t correct = 0;  // of transcripts: count minus the errors, which may be more

  double loss() const { return count == 0 ? 0.0 : nats / static_cast<double>(count); }
};

enum class Metric : std::uint8_t {
  accuracy,
  bits_per_byte,
  bits_per_masked_byte,
  bits_per_dimension,
  perplexity,
  error_rate
};
const char* metric_name(Metric metric);  // "accuracy", "bits per byte", ...
double metric_value(Metric metric, const Score& score);
bool better(Metric metric, double a, double b);  // whether a is the better value
bool counts_answers(Metric metric);              // instead of weighing their probabilities

// The score of an answer without a model.
struct Baseline {
  std::string name;  // "most frequent symbol", "bytes by frequency"
  double value = 0;
};

// The data of a task, to recognise it again; empty for generated data.
struct DataFacts {
  std::string checksum;
  std::int64_t bytes = 0;
};

// Files by name that are stored in every checkpoint: vocabulary or tokenizer.
using TaskFiles = std::map<std::string, std::string>;

// What a model answers, which decides the model (coterie/torch/models.h).
struct TokenAnswers {};  // one per position: LanguageModel
struct ClassAnswer {     // one per row: SequenceClassifier
  std::int64_t classes = 2;
};
struct TranscriptAnswer {  // of each row: CtcModel
  std::int64_t features = 0, symbols = 0;
  std::int64_t subsample = 1;  // frames in one position
  std::int64_t space = 0;      // symbol between words
  std::int64_t beam = 1;       // of the decoding; 1: greedy
};
struct ImageAnswers {  // every value of an image: ImageModel
  std::int64_t height = 0, width = 0, channels = 0;
};
using Answers = std::variant<TokenAnswers, ClassAnswer, TranscriptAnswer, ImageAnswers>;

class Task {
 public:
  virtual ~Task() = default;

  virtual std::string name() const = 0;
  virtual std::int64_t vocabulary() const = 0;  // of the tokens; 0 if there are frames
  virtual Answers answers() const { return TokenAnswers{}; }
  // The image that the tokens of a row are, if they are one.
  virtual std::optional<ImageAnswers> image() const { return std::nullopt; }
  virtual bool causal() const = 0;
  virtual bool needs_positions() const = 0;  // absolute, in the embeddings
  // Initial deviation of token embeddings with which small models learn the task.
  virtual double embedding_std() const { return 0.1; }
  virtual Metric metric() const = 0;
  virtual std::vector<Baseline> baselines() const = 0;
  virtual std::vector<std::string> strata() const { return {}; }  // names, for scores by stratum

  // What a checkpoint needs to encode text without the training data.
  virtual TaskFiles files() const { return {}; }
  virtual DataFacts data() const { return {}; }
  // Remarks on the scores, for a reader: "4.2 % of the words to predict are <unk>".
  virtual std::vector<std::string> notes() const { return {}; }

  // Rows index * rows, index * rows + 1, ... of a split. Train is endless; valid and test have
  // batches(split, rows) batches, the last of which may have fewer rows.
  virtual Batch batch(Split split, std::int64_t index, std::int64_t rows) const = 0;
  virtual std::int64_t batches(Split split, std::int64_t rows) const = 0;

  // Text, for tasks that can generate it; others throw. decode(a + b) is decode(a) + decode(b),
  // which allows streaming.
  virtual std::vector<std::int64_t> encode(const std::string& text) const;
  virtual std::string decode(const std::vector<std::int64_t>& tokens) const;
  // The text of a tokenizer.json for these tokens; empty if there is none.
  virtual std::string tokenizer_text() const { return ""; }
};

// The task named by config.task; throws an Error that lists all names if it is unknown. With the
// `stored` files of a checkpoint, data is only read when it is needed, with their vocabulary.
std::unique_ptr<Task> make_task(const Config& config, const TaskFiles* stored = nullptr);
std::vector<std::string> task_names();

}  // namespace coterie::train
