// SPDX-License-Identifier: MIT
// Checkpoints: OUT/checkpoints/step-00000200/ with model.safetensors, config.toml,
// optimizer.safetensors and state.json, written as a whole or not at all. OUT/checkpoints/best is a
// file that names the best one.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "train/named_tensors.h"

namespace coterie::train {

// Where a run stands, beside tensors. state.json, which also has checksums of the tensors' files.
struct TrainState {
  std::int64_t step = 0;  // finished steps
  std::int64_t evaluations_without_improvement = 0;
  std::optional<double> best;  // metric of the best checkpoint
  std::int64_t best_step = 0;
  double seconds = 0;  // of training so far
};

struct Checkpoint {
  NamedTensors model, optimizer;
  std::string config;  // text of config.toml
  TrainState state;
};

class Checkpoints {
 public:
  explicit Checkpoints(const std::string& out) : folder_(out + "/checkpoints") {}

  // Replaces a checkpoint of the same step.
  void save(const Checkpoint& checkpoint, bool best) const;
  // Removes all but the `keep` last ones and the best, and what killed processes left.
  void prune(std::int64_t keep) const;

  // For a run that goes on from `state`, behind checkpoints that are damaged: renames those to
  // step-N.damaged, in place of earlier ones, so that they count no more, and marks as the best the
  // one that the state knows.
  void set_aside_after(const TrainState& state) const;

  std::vector<std::int64_t> steps() const;  // ascending
  std::optional<std::int64_t> best() const;
  std::string path(std::int64_t step) const;

 private:
  void mark_best(std::int64_t step) const;

  std::string folder_;
};

// Reads one checkpoint folder; throws Error saying which file is missing, truncated or malformed.
Checkpoint load_checkpoint(const std::string& folder);

// The folder of a checkpoint that a person names: a checkpoint folder, or a run's folder, of which
// the best (`best`; the last when none is marked) or the last is taken. When that one is damaged,
// the last good one before it, with a line in `warning`.
std::string find_checkpoint(const std::string& path, bool best, std::string* warning);

}  // namespace coterie::train
