// SPDX-License-Identifier: MIT
// Trains the model of a task.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "coterie/torch/models.h"
#include "train/checkpoint.h"
#include "train/config.h"
#include "train/evaluate.h"
#include "train/log.h"
#include "train/profile.h"
#include "train/ranks.h"
#include "train/task.h"

namespace coterie::train {

// One spec per layer from config.attention and config.attention_at; throws on bad specs and ranges.
std::vector<AttentionSpec> layer_attention(const Config& config);

// One spec if all layers have the same, else by layers: "0-1: local(window=8); 2: full".
std::string attention_text(const Config& config);

// The device of a config; throws if it is not available.
c10::Device config_device(const Config& config);

// The model of a config for a task, freshly initialised from the config's seed, on its device.
torch_api::Model make_model(const Config& config, const Task& task);
// A model of make_model as a language model; throws if the task is answered by another one.
torch_api::LanguageModel language_model(const torch_api::Model& model, const Task& task);

// A warning about the first mechanism whose selection sees future tokens when used causally; empty
// if there is none.
std::string leak_warning(const std::vector<AttentionSpec>& specs, bool causal);

// Sets the number of threads of the core and of torch.
void use_threads(int threads);  // 0: the core's choice

struct TrainResult {
  TrainState state;
  // "steps", "patience", "interrupted"; "finished": nothing was left to do
  std::string reason;
  std::optional<Evaluation> evaluation;  // the one at the end, on valid
  std::string checkpoint;                // folder of the last one; empty if there is none
};

struct TrainHooks {
  ShowProgress progress{};                         // may be empty; called after every step
  ShowParts validation{};                          // may be empty; parts are batches
  std::function<void(const std::string&)> warn{};  // may be empty; one line
  // Finish the step, save and return; leave a step or an evaluation that takes seconds longer.
  // Several ranks stop together, after a step.
  const std::atomic<bool>* interrupted = nullptr;
  // The ranks that train together, or null. Each calls train with its own hooks; rank 0 writes.
  Ranks* ranks = nullptr;
};

// Runs from the start or, with `resume`, from the last intact checkpoint in config.out. Writes
// log.jsonl, config.toml and checkpoints there (nothing if config.out is empty) and refuses to
// start a new run in a folder that already has one. On the CPU, losses after a resume are bit-equal
// to those of an uninterrupted run. Throws on a loss, gradient or parameter that is not finite, and
// keeps the last good checkpoint. A finished run is left as it is.
TrainResult train(const Config& config, const Task& task, bool resume, const TrainHooks& hooks);

struct DryRun {
  std::int64_t parameters = 0;
  std::int64_t peak_bytes = 0;
  double centroid_seconds = 0;    // until routing's centroids are initialised from data
  double step_seconds = 0;        // of a step
  double step_cpu_seconds = 0;    // processor time of all threads in a step
  double evaluation_seconds = 0;  // of all validations
  std::int64_t batch_tokens = 0;
  StepProfile profile{};  // empty unless it was asked for
};

// Trains a few steps, `steps` of them timed, and writes nothing. With `profile` a few more steps
// are profiled.
DryRun dry_run(const Config& config, const Task& task, int steps = 2, bool profile = false,
               Ranks* ranks = nullptr);

}  // namespace coterie::train
