// SPDX-License-Identifier: MIT
// The lines of a run's log (log.h).
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

#include "coterie/torch/models.h"
#include "train/checkpoint.h"
#include "train/config.h"
#include "train/evaluate.h"
#include "train/inspect.h"
#include "train/ranks.h"
#include "train/task.h"

namespace coterie::train {

// Values logged for one step.
struct StepFacts {
  std::int64_t step = 0;
  double loss = 0, commitment = 0, rate = 0, gradient_norm = 0;
  double tokens_per_s = 0;  // since the previous line
  double seconds = 0;       // of training so far
  std::int64_t memory_bytes = 0;
};

struct EndFacts {
  std::string reason;
  TrainState state;
  std::int64_t peak_memory_bytes = 0;
  const Ranks* ranks = nullptr;  // several: what rank 0 gave to collectives
};

nlohmann::json run_line(const Config& config, const Task& task, const ::torch::nn::Module& model);
nlohmann::json step_line(const StepFacts& facts, bool with_commitment);
// `kind`: "eval" during the run, "final" at its end.
nlohmann::json eval_line(const char* kind, std::int64_t step, const Task& task,
                         const Evaluation& evaluation);
nlohmann::json resume_line(std::int64_t step, const Config& config);
// The number of ranks, how they share the work, and their back end.
nlohmann::json ranks_line(const Ranks& ranks);
nlohmann::json end_line(const EndFacts& facts);
// On a few validation rows; std::nullopt for a model without head groups that select by content.
std::optional<Inspection> inspect_clusters(const torch_api::Model& model, const Task& task);
nlohmann::json clusters_line(std::int64_t step, const Inspection& inspection);

}  // namespace coterie::train
