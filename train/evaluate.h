// SPDX-License-Identifier: MIT
// Scores of a model on a task's held-out data.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "coterie/torch/models.h"
#include "train/ranks.h"
#include "train/task.h"

namespace coterie::train {

// Called before the first and after every part of some work, with the number of parts.
using ShowParts = std::function<void(std::int64_t done, std::int64_t all)>;

struct Evaluation {
  Score score;
  double metric = 0;
  double seconds = 0;
  double share = 1;                     // of the split's batches
  std::map<std::string, Score> strata;  // by the names of Task::strata()
};

struct EvaluateOptions {
  Split split = Split::valid;
  std::int64_t rows = 32;
  std::int64_t batches = 0;              // 0: all
  std::uint64_t seed = 0;                // of clusterings
  bool bf16 = false;                     // matrix products
  std::function<void()> before_layer{};  // see PassContext
  ShowParts progress{};                  // may be empty; parts are batches
  Ranks* ranks = nullptr;                // share the batches, or null
};
// Without gradients and dropout, on the model's device.
Evaluation evaluate(const torch_api::Model& model, const Task& task,
                    const EvaluateOptions& options);

// The score of logits (B, N, V), or (B, V) for one class per row, for a batch. If `strata` is given
// and the batch has strata, adds the scores by stratum to it, in the order of Task::strata().
Score score_of(const at::Tensor& logits, const Batch& batch, std::vector<Score>* strata = nullptr);

// The batch on another device.
Batch to_device(const Batch& batch, c10::Device device);

}  // namespace coterie::train
