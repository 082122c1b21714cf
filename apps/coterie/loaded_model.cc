// SPDX-License-Identifier: MIT
#include "apps/coterie/loaded_model.h"

#include <fmt/core.h>

#include "train/checkpoint.h"
#include "train/options.h"
#include "train/trainer.h"

namespace coterie::cli {

LoadedModel load_model(const std::string& path) {
  std::string warning;
  LoadedModel loaded;
  loaded.checkpoint = train::find_checkpoint(path, /*best=*/true, &warning);
  if (!warning.empty()) fmt::print(stderr, "coterie: warning: {}\n", warning);
  const train::Checkpoint checkpoint = train::load_checkpoint(loaded.checkpoint);
  loaded.config = train::parse_config(checkpoint.config, loaded.checkpoint + "/config.toml");
  loaded.task = train::make_task(loaded.config);
  loaded.model = train::make_model(loaded.config, *loaded.task);
  train::load_module(*loaded.model, checkpoint.model, loaded.checkpoint + "/model.safetensors");
  loaded.model->eval();
  loaded.step = checkpoint.state.step;
  return loaded;
}

}  // namespace coterie::cli
