// SPDX-License-Identifier: MIT
// What another attention costs a pretrained encoder: scores of a task, agreement with full
// attention, speed and memory.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "train/pretrained/scores.h"
#include "train/pretrained/tasks.h"

namespace coterie::train {

// Whether a mechanism gives full attention over sequences of `length` tokens, because its budget of
// keys or clusters covers them.
bool covers(const Mechanism& mechanism, std::int64_t length);

// An attention of all layers: one spec, or one per layer.
struct NamedAttention {
  std::string name;  // as users write it
  std::vector<AttentionSpec> specs;
};

struct ApproximateOptions {
  RunTextsOptions run{};
  std::int64_t draws = 1000;                  // of the bootstrap
  std::int64_t error_inputs = 8;              // whose rows give errors by layer and head
  std::vector<std::int64_t> speed_lengths{};  // tokens of the sequences that speed is measured on
  double speed_seconds = 1.0;  // two passes or one of over 10 seconds, then more until this time
  std::function<void(const std::string& work, std::int64_t done, std::int64_t all)> progress{};
};

// A score with its 95 % intervals: the value, and its difference from full attention, both over the
// same bootstrap samples.
struct ScoreResult {
  std::string name;
  Interval value, difference;
};

struct SpeedPoint {
  std::int64_t length = 0;
  double tokens_per_s = 0;
};

using HeadErrors = std::vector<std::vector<double>>;  // [layer][head], relative

struct ApproximateResult {
  std::string attention;
  std::vector<ScoreResult> scores;
  double cosine = 1, worst_cosine = 1;   // of embeddings with those of full attention: mean, least
  double embedding_error = 0;            // relative, Frobenius
  HeadErrors head_error;                 // on rows of full attention
  double exact_share = 1;                // of inputs, because the budget covers them
  double seconds = 0, tokens_per_s = 0;  // of the passes over the inputs
  std::int64_t tokens = 0;
  std::int64_t peak_memory_bytes = 0;
  std::vector<SpeedPoint> speeds;
  std::optional<double> crossover{};  // tokens from which it is faster than full attention
};

// Full attention first, then each of the others. The encoder keeps the last one.
std::vector<ApproximateResult> approximate(
    PretrainedEncoder& encoder, EncoderTask& task, const std::vector<NamedAttention>& attentions,
    const ApproximateOptions& options, const std::function<void(const ApproximateResult&)>& show);

// Errors of each attention's outputs on the rows that full attention has for a batch of inputs.
std::vector<HeadErrors> head_errors(PretrainedEncoder& encoder, const EncoderBatch& batch,
                                    const std::vector<NamedAttention>& attentions,
                                    std::uint64_t seed);

// Tokens a second of passes over `batch`, the median of passes.
double encoder_speed(PretrainedEncoder& encoder, const EncoderBatch& batch, double seconds,
                     std::uint64_t seed);
// The same with attention by torch's scaled_dot_product_attention.
double torch_speed(PretrainedEncoder& encoder, const EncoderBatch& batch, double seconds);

// A batch of sequences of `length` tokens of the inputs, joined and repeated where need be, with
// about `tokens` tokens.
EncoderBatch speed_batch(const PretrainedEncoder& encoder, const std::vector<EncodedText>& inputs,
                         std::int64_t length, std::int64_t tokens);

}  // namespace coterie::train
