// SPDX-License-Identifier: MIT
// The fields of a Config as command-line options and as text. One list in options.cc binds, reads,
// writes and documents every field.
#pragma once

#include <string>
#include <vector>

#include "train/config.h"

namespace CLI {
class App;
}

namespace coterie::train {

// Adds one option per field, and --config FILE, whose values the command line overrides. `config`
// must outlive `app`.
void add_options(CLI::App& app, Config& config);

// Sets the options of `app` (from add_options) to the values in a config file's text, except for
// options that already have values. Messages call the text `name`. Throws Error.
void apply_config(CLI::App& app, const std::string& text, const std::string& name);

// An option with different values in two configs.
struct OptionChange {
  std::string name, before, after;  // "train.steps", "300", "600"
  bool may_change = false;          // in a resumed run; docs/training.md has the list
};
std::vector<OptionChange> option_changes(const Config& before, const Config& after);

// Throws Error for options of other tasks than config.task that do not have their default value.
void check_task_options(const Config& config);

// Sets the attention of all layers to a spec, or to those of a file of specs (formats/spec_file.h),
// which must be one for each of config.model.layers. Throws Error.
void set_attention(Config& config, const std::string& text);

// The error message for a text that is not a device (cpu, cuda, cuda:1); "" if it is one.
std::string check_device(const std::string& text);
bool built_with_cuda();
const char* device_help();  // names the devices that this build can use

// All fields, in the format of formats/config_text.h; parse_config reads them back unchanged.
std::string config_text(const Config& config);
Config parse_config(const std::string& text, const std::string& name);

}  // namespace coterie::train
