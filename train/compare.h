// SPDX-License-Identifier: MIT
// Trains the same small model with several attentions on the built-in tasks, as `make run` does.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "report/data.h"
#include "train/config.h"
#include "train/trainer.h"

namespace coterie::train {

struct PlannedRun {
  std::string section;  // runs of a section are compared with each other
  Config config;        // with `out` set
};

// Bidirectional recall and copy with every non-causal attention, copy also over a grid of lengths
// and cluster counts; recall over 4,096 tokens, where attention is most of the cost, from the model
// of full attention; causal recall and bytes with full, local and local + strict routing. All
// inside the folder `out`.
std::vector<PlannedRun> comparison_plan(const std::string& out);

struct ComparedRun {
  PlannedRun plan;
  RunLog log;
};

// Trains missing runs in order and resumes unfinished ones from their last checkpoint. Calls `done`
// after each run. When interrupted, returns early with the finished runs.
std::vector<ComparedRun> compare(const std::vector<PlannedRun>& plan, const TrainHooks& hooks,
                                 const std::function<void(const ComparedRun&)>& done);

}  // namespace coterie::train
