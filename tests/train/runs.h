// SPDX-License-Identifier: MIT
// Small runs and their logs.
#pragma once

#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "formats/files.h"
#include "train/trainer.h"

namespace coterie::train {

// A model that makes a step in milliseconds.
inline Config tiny_config(const std::string& task) {
  Config config;
  config.task = task;
  config.length = 34;
  config.model.dim = 16;
  config.model.layers = 2;
  config.model.heads = 2;
  config.recall.keys = 8;
  config.recall.pairs = 8;
  config.recall.queries = 4;
  config.optimizer.lr = 3e-3;
  config.schedule.warmup = 5;
  config.train.steps = 20;
  config.train.batch = 8;
  config.train.log_every = 1;
  config.train.eval_every = 10;
  config.train.eval_batches = 1;
  config.train.final_batches = 1;
  config.checkpoint.every = 0;
  config.threads = 1;
  return config;
}

inline TrainResult run(const Config& config, bool resume = false, const TrainHooks& hooks = {}) {
  return train(config, *make_task(config), resume, hooks);
}

// The lines of a kind in a run's log.
inline std::vector<nlohmann::json> log_lines(const std::string& out, const std::string& kind) {
  std::vector<nlohmann::json> lines;
  std::istringstream stream(read_file(out + "/log.jsonl"));
  for (std::string text; std::getline(stream, text);) {
    nlohmann::json line = nlohmann::json::parse(text);
    if (line.at("kind") == kind) lines.push_back(std::move(line));
  }
  return lines;
}

inline std::vector<double> losses(const std::string& out) {
  std::vector<double> values;
  for (const nlohmann::json& line : log_lines(out, "step")) values.push_back(line.at("loss"));
  return values;
}

}  // namespace coterie::train
