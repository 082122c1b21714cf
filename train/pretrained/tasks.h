// SPDX-License-Identifier: MIT
// Tasks that say how good a pretrained encoder is. What a task needs besides the encoder (a probe,
// a head, a reader) is learned with full attention; then every attention is scored, untouched.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "train/pretrained/run.h"

namespace coterie::train {

struct EncoderTaskOptions {
  std::string name = "text";
  std::string glue = "SST-2";     // task of GLUE
  std::vector<std::string> data;  // files, folders or archives
  std::int64_t length = 256;      // tokens of an input, at most; of text exactly
  std::int64_t join = 0;          // tokens of an input, at least: shorter ones are joined
  std::int64_t limit = 0;         // units that are scored, evenly spaced; 0: all
  std::int64_t train_limit = 0;   // texts that are learned from, evenly spaced; 0: all
  TuneOptions tune;
};

class EncoderTask {
 public:
  virtual ~EncoderTask() = default;

  const std::vector<EncodedText>& inputs() const { return inputs_; }
  const std::vector<std::string>& notes() const { return notes_; }  // what was scored, for readers
  std::size_t units() const { return units_; }  // what is scored and drawn by the bootstrap

  // Learns with the encoder as it is.
  virtual void fit(PretrainedEncoder& /*encoder*/, const RunTextsOptions& /*run*/) {}
  // The rows of inputs, for the scores that are asked for next. Embeddings (B, E) are on the CPU.
  virtual void take(const std::vector<std::size_t>& inputs, const at::Tensor& rows,
                    const EncoderBatch& batch, const at::Tensor& embeddings) = 0;
  virtual std::vector<std::string> score_names() const = 0;
  virtual std::vector<double> scores(const std::vector<std::size_t>& units) const = 0;

 protected:
  std::vector<EncodedText> inputs_;
  std::vector<std::string> notes_;
  std::size_t units_ = 0;
};

std::vector<std::string> encoder_task_names();
std::vector<std::string> glue_task_names();
std::unique_ptr<EncoderTask> make_encoder_task(const EncoderTaskOptions& options,
                                               const PretrainedEncoder& encoder);
std::unique_ptr<EncoderTask> make_squad_task(const EncoderTaskOptions& options,
                                             const PretrainedEncoder& encoder);

// Text cut into `count` inputs of exactly `length` tokens, evenly spaced over the text; throws
// Error if it is too short for one.
std::vector<EncodedText> text_inputs(const EncoderTaskOptions& options,
                                     const PretrainedEncoder& encoder, std::size_t count);

}  // namespace coterie::train
