// SPDX-License-Identifier: MIT
// A trained model with its task, for the verbs that work on checkpoints.
#pragma once

#include <memory>
#include <string>

#include "coterie/torch/models.h"
#include "train/config.h"
#include "train/task.h"

namespace coterie::cli {

struct LoadedModel {
  train::Config config;
  std::unique_ptr<train::Task> task;
  torch_api::LanguageModel model = nullptr;
  std::int64_t step = 0;   // finished steps of the checkpoint
  std::string checkpoint;  // its folder
};

// `path` is a checkpoint folder, or a run's folder, whose best checkpoint is loaded. A damaged
// checkpoint is skipped with a warning on stderr.
LoadedModel load_model(const std::string& path);

}  // namespace coterie::cli
