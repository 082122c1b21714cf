// SPDX-License-Identifier: MIT
#include "apps/coterie/loaded_model.h"

#include <fmt/core.h>

#include <CLI/CLI.hpp>

#include "coterie/error.h"
#include "coterie/runtime.h"
#include "train/checkpoint.h"
#include "train/corpus.h"
#include "train/option_values.h"
#include "train/options.h"
#include "train/trainer.h"

namespace coterie::cli {
namespace {

void warn(const std::string& text) { fmt::print(stderr, "coterie: warning: {}\n", text); }

// Names other data than that of the run, and says how to give its data.
void check_data(const LoadedModel& loaded, const train::Checkpoint& checkpoint, bool given) {
  if (!given && loaded.config.data == train::kStandardInput) {
    throw Error(
        "[data] expected --data FILE: the run read its text from standard input and did "
        "not keep it");
  }
  train::DataFacts now;
  try {
    now = loaded.task->data();
  } catch (const Error& error) {
    if (given) throw;
    throw Error(fmt::format("{}; the run was trained on it (give its new place with --data)",
                            error.what()));
  }
  const train::DataFacts& then = checkpoint.data;
  if (then.checksum.empty() || then.checksum == now.checksum) return;
  warn(
      fmt::format("the model was trained on other data: {} bytes with checksum {}; {} has {} "
                  "bytes with {}",
                  then.bytes, then.checksum,
                  loaded.config.data.empty() ? "the built-in text" : loaded.config.data, now.bytes,
                  now.checksum));
}

}  // namespace

void add_model_options(CLI::App& verb, ModelOptions& options, UsesData data) {
  verb.add_option("checkpoint", options.checkpoint,
                  "Checkpoint folder, or folder of a run (uses its best checkpoint)")
      ->required()
      ->type_name("FOLDER");
  if (data == UsesData::yes) {
    verb.add_option("--data", options.data, "Text to use; as in training if not given")
        ->type_name("PATH");
  }
  verb.add_option("--device", options.device,
                  std::string(train::device_help()) + "; as in training if not given")
      ->check(CLI::Validator(train::check_device, ""))
      ->type_name("DEVICE");
  train::add_number(verb, "--threads", options.threads, 0, kMaxThreads,
                    "Number of CPU threads; as in training if 0");
}

LoadedModel load_model(const ModelOptions& options, UsesData data) {
  std::string warning;
  LoadedModel loaded;
  loaded.checkpoint = train::find_checkpoint(options.checkpoint, /*best=*/true, &warning);
  if (!warning.empty()) warn(warning);
  const train::Checkpoint checkpoint = train::load_checkpoint(loaded.checkpoint);
  loaded.config = train::parse_config(checkpoint.config, loaded.checkpoint + "/config.toml");
  if (!options.data.empty()) loaded.config.data = options.data;
  if (!options.device.empty()) loaded.config.device = options.device;
  if (options.threads > 0) loaded.config.threads = options.threads;
  if (options.beam > 0) loaded.config.speech.beam = options.beam;
  train::use_threads(loaded.config.threads);
  train::Config data_config = loaded.config;
  if (options.length > 0) data_config.length = options.length;
  loaded.task = train::make_task(data_config, &checkpoint.files);
  if (data == UsesData::yes) check_data(loaded, checkpoint, !options.data.empty());
  loaded.model = train::make_model(loaded.config, *loaded.task);
  train::load_module(*loaded.model, checkpoint.model, loaded.checkpoint + "/model.safetensors");
  loaded.model->eval();
  loaded.step = checkpoint.state.step;
  return loaded;
}

}  // namespace coterie::cli
