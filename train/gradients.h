// SPDX-License-Identifier: MIT
// The loss and its gradients for one step of the optimiser.
#pragma once

#include <cstdint>
#include <functional>

#include "coterie/torch/models.h"
#include "train/ranks.h"
#include "train/task.h"

namespace coterie::train {

struct GradientOptions {
  std::int64_t micro_batch = 0;          // rows of one pass; 0: all
  std::uint64_t seed = 0;                // of clusterings and attention dropout
  std::int64_t first_row = 0;            // number of the first row in the batch of all ranks
  bool bf16 = false;                     // matrix products
  bool update_centroids = false;         // of routing heads: updated once, after the last pass
  std::function<void()> before_layer{};  // see PassContext; gradients are incomplete if it throws
  // Several ranks, or null. Each has its rows of the batch; what follows is over those of all.
  Ranks* ranks = nullptr;
  GradientSums* sums = nullptr;
};

// Numbers on the model's device, in double: the host does not wait for them.
struct StepLoss {
  at::Tensor loss;        // mean over the batch's targets of their negative log-probability
  at::Tensor commitment;  // weighted sum over the routing heads, mean over the batch's valid tokens
};

// Adds the gradients of loss + commitment to those of the model's parameters. Losses are means over
// the whole batch, and routing's centroids are updated once, from the statistics of all passes.
// Splitting the batch therefore only changes the order of summation. (The exception is dropout
// outside of attention, which draws in another order.)
StepLoss add_gradients(const torch_api::Model& model, const Batch& batch,
                       const GradientOptions& options);

// Rows [first, first + count).
Batch rows_of(const Batch& batch, std::int64_t first, std::int64_t count);

// The positions of this rank among those that share the sequences; all if `ranks` is null.
Batch own_positions(const Batch& batch, const torch_api::SequenceRanks* ranks);

// The first `length` positions of all rows.
Batch truncated(const Batch& batch, std::int64_t length);

// Sequence length of a step with random truncation: config.length, or a random length between an
// eighth of it and all of it. A pure function of the config and the step.
std::int64_t step_length(const Config& config, std::int64_t step);

// The clustering seed of a step, a pure function of both arguments.
std::uint64_t step_seed(std::uint64_t seed, std::int64_t step);

}  // namespace coterie::train
