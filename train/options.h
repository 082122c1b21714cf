// SPDX-License-Identifier: MIT
// The fields of a Config as command-line options and as text. One list in options.cc binds, reads,
// writes and explains every field, so that the four cannot disagree.
#pragma once

#include <string>

#include "train/config.h"

namespace CLI {
class App;
}

namespace coterie::train {

// Adds one option per field, and --config FILE, whose values the command line overrides. `config`
// must outlive `app`.
void add_options(CLI::App& app, Config& config);

// Gives `app` (of add_options) the values of a config file's text, except for options that have
// values already. `name` is what messages call the text. Throws Error.
void apply_config(CLI::App& app, const std::string& text, const std::string& name);

// Why a text names no device (cpu, cuda, cuda:1); "" when it does.
std::string check_device(const std::string& text);

// All fields, in the format of formats/config_text.h; parse_config reads them back unchanged.
std::string config_text(const Config& config);
Config parse_config(const std::string& text, const std::string& name);

}  // namespace coterie::train
