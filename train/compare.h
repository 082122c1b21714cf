// SPDX-License-Identifier: MIT
// The same small model trained with several attentions on the built-in tasks: what `make run` does.
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

// Copy and bidirectional recall with every attention that is not causal, copy also over a grid of
// lengths and numbers of clusters; causal recall and bytes with full, local and local + strict
// routing. All below the folder `out`.
std::vector<PlannedRun> comparison_plan(const std::string& out);

struct ComparedRun {
  PlannedRun plan;
  RunLog log;
};

// Trains what is not there yet, in order; runs that were broken off go on from their last
// checkpoint. `done` is told of each. Returns early, with what there is, when interrupted.
std::vector<ComparedRun> compare(const std::vector<PlannedRun>& plan, const TrainHooks& hooks,
                                 const std::function<void(const ComparedRun&)>& done);

}  // namespace coterie::train
