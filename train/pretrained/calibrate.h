// SPDX-License-Identifier: MIT
// The attention of every layer and head of a model, chosen from measurements: the cheapest whose
// error of the model's output stays under a target (coterie/choice.h).
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "coterie/choice.h"
#include "coterie/torch/models.h"
#include "train/pretrained/approximate.h"

namespace coterie::train {

// A model with full attention that can be replaced.
struct CalibratedModel {
  std::vector<std::string> names;  // of the modules of its layers
  std::int64_t heads = 0;
  // Rows (B, N, ...) of tokens (B, N), in evaluation mode and without gradients.
  std::function<at::Tensor(const at::Tensor& tokens, const torch_api::PassContext& context)> run;
  std::function<torch_api::SelfAttention(std::int64_t layer)> attention;
  std::function<void(const std::vector<AttentionSpec>&specs)> check, set;  // its attention
};
CalibratedModel calibrated_model(const PretrainedEncoder& encoder);  // its rows
// The logits of a model of `coterie train`, with matrix products in bf16 if wanted. Throws Error
// for a causal model, and for one that was not trained with full attention.
CalibratedModel calibrated_model(const torch_api::Model& model, bool bf16);

// Specs from cheap to exact for sequences of `length` tokens; the last is "full". Those that would
// be exact at this length are left out.
std::vector<std::string> default_ladder(std::int64_t length);

struct CalibrateOptions {
  std::vector<std::string> ladder;
  std::vector<double> targets;  // relative errors of the output, Frobenius
  double seconds = 0.3;         // of each timing
  std::uint64_t seed = 1;
  std::function<void(const std::string& work, std::int64_t done, std::int64_t all)> progress{};
};

// A whole model on the held-out batches.
struct MeasuredAttention {
  std::string name;
  std::vector<AttentionSpec> specs;  // one per layer
  double error = 0;                  // of the output, relative
  double seconds = 0;                // of a pass over a batch
};

struct CalibratedTarget {
  double target = 0;
  Choice choice;
  MeasuredAttention measured;
};

struct Calibration {
  std::vector<std::string> ladder;
  std::size_t full = 0;  // place of full attention in the ladder
  std::vector<LayerMeasurements> layers;
  std::vector<std::vector<double>> seconds;  // of all heads of a layer, by layer and rung
  std::vector<MeasuredAttention> uniform;    // every rung in all heads
  std::vector<CalibratedTarget> targets;
};

// Measures on batches of tokens (B, N) and verifies on others; all have the same shape.
Calibration calibrate(const CalibratedModel& model, const std::vector<at::Tensor>& measured,
                      const std::vector<at::Tensor>& held_out, const CalibrateOptions& options);

// Rows of tokens (1, N) in batches of at most `tokens` tokens and at least one row; a last batch
// with fewer rows is left out.
std::vector<at::Tensor> equal_batches(const std::vector<at::Tensor>& rows, std::int64_t tokens);

// "full: at 512 tokens no other attention of the ladder is faster", or which heads stay full and
// why; lines for readers.
std::vector<std::string> explain(const CalibratedTarget& target, std::int64_t length);

}  // namespace coterie::train
