// SPDX-License-Identifier: MIT
// Checkpoints: OUT/checkpoints/step-00000200/ with model.safetensors, config.toml,
// optimizer.safetensors, state.json and the task's files (vocabulary.txt), written as a whole or
// not at all. OUT/checkpoints/best is a file that names the best one.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "train/named_tensors.h"
#include "train/task.h"

namespace coterie::train {

// Progress of a run, stored in state.json together with checksums of the tensor files.
struct TrainState {
  std::int64_t step = 0;  // finished steps
  std::int64_t evaluations_without_improvement = 0;
  std::optional<double> best;  // metric of the best checkpoint
  std::int64_t best_step = 0;
  double seconds = 0;               // of training so far
  std::int64_t evaluated_step = 0;  // the last step whose validation is complete
  int threads = 0;                  // CPU threads of the last step; 0: unknown
};

struct Checkpoint {
  NamedTensors model, optimizer;
  std::string config;  // text of config.toml
  TrainState state;
  TaskFiles files;
  DataFacts data;
};

class Checkpoints {
 public:
  explicit Checkpoints(const std::string& out) : folder_(out + "/checkpoints") {}

  // Replaces a checkpoint of the same step.
  void save(const Checkpoint& checkpoint, bool best) const;
  // Removes all but the `keep` latest ones and the best, and partial files of killed processes.
  void prune(std::int64_t keep) const;

  // For a run that resumes from `state` because later checkpoints are damaged: renames those to
  // step-N.damaged (replacing earlier ones of that name), which excludes them from steps(), and
  // marks state.best_step as the best if no best checkpoint is left.
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

// The checkpoint folder that `path` refers to: `path` itself, or the best (`best`; the last if none
// is marked) or last checkpoint of a run's folder. If that one is damaged, returns the last intact
// one before it and sets `warning`.
std::string find_checkpoint(const std::string& path, bool best, std::string* warning);

}  // namespace coterie::train
