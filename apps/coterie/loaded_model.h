// SPDX-License-Identifier: MIT
// A trained model with its task, for the verbs that work on checkpoints.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "coterie/torch/models.h"
#include "train/config.h"
#include "train/task.h"

namespace CLI {
class App;
}

namespace coterie::cli {

// Options of all these verbs.
struct ModelOptions {
  std::string checkpoint;   // or a run's folder, whose best checkpoint is loaded
  std::string data;         // empty: that of the run
  std::string device;       // empty: that of the run
  int threads = 0;          // 0: as in the run
  std::int64_t length = 0;  // of the task's sequences; 0: as in the run
  std::int64_t beam = 0;    // of the decoding of speech; 0: as in the run
};

enum class UsesData : bool { no, yes };
void add_model_options(CLI::App& verb, ModelOptions& options, UsesData data);

struct LoadedModel {
  train::Config config;
  std::unique_ptr<train::Task> task;
  torch_api::Model model;
  std::int64_t step = 0;   // finished steps of the checkpoint
  std::string checkpoint;  // its folder
};

// A damaged checkpoint is skipped with a warning on stderr; so is data that is not that of the run.
// The task reads its data when it is first used, and not at all if `data` is no.
LoadedModel load_model(const ModelOptions& options, UsesData data);

}  // namespace coterie::cli
