// SPDX-License-Identifier: MIT
// Passes of an encoder over many texts, and training on top of it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "train/pretrained/encoder.h"

namespace coterie::train {

using ShowParts = std::function<void(std::int64_t done, std::int64_t all)>;

struct RunTextsOptions {
  std::int64_t batch_tokens = 4096;  // of a batch, padding included
  std::uint64_t seed = 1;            // of clusterings
  ShowParts progress{};
};

struct RunTextsFacts {
  double seconds = 0;       // of the passes
  std::int64_t tokens = 0;  // without padding
};

// Calls `take` with the rows (B, N, E) of every batch of texts; batches have texts of similar
// length.
using TakeRows = std::function<void(const std::vector<std::size_t>& texts, const at::Tensor& rows,
                                    const EncoderBatch& batch)>;
RunTextsFacts run_texts(PretrainedEncoder& encoder, const std::vector<EncodedText>& texts,
                        const RunTextsOptions& options, const TakeRows& take);

// The embeddings (texts, E), f32 on the CPU.
at::Tensor embeddings_of(PretrainedEncoder& encoder, const std::vector<EncodedText>& texts,
                         const RunTextsOptions& options, RunTextsFacts* facts = nullptr);

struct TuneOptions {
  bool encoder = false;  // also the encoder's parameters
  std::int64_t epochs = 2, batch = 32;
  double head_rate = 1e-3, rate = 5e-5;  // peak learning rates of the head and the encoder
  std::uint64_t seed = 1;
  ShowParts progress{};
};

// Minimises the mean of `loss` over texts with AdamW, warm-up over a tenth of the steps and linear
// decay; texts are in another order in every epoch. Head tensors must require gradients.
using BatchLoss = std::function<at::Tensor(const std::vector<std::size_t>& texts,
                                           const at::Tensor& rows, const EncoderBatch& batch)>;
void tune(PretrainedEncoder& encoder, const std::vector<at::Tensor>& head,
          const std::vector<EncodedText>& texts, const TuneOptions& options, const BatchLoss& loss);

// Logistic regression of labels 0 and 1 on features (n, E), which are standardised, with a ridge
// penalty; exact to rounding (Newton's method). Scores above 0 mean label 1.
class LinearProbe {
 public:
  void fit(const at::Tensor& features, const std::vector<double>& labels);
  at::Tensor scores(const at::Tensor& features) const;  // (n), f64

 private:
  at::Tensor mean_, deviation_, weight_;  // f64; the last weight is the constant
};

}  // namespace coterie::train
