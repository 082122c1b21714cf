// SPDX-License-Identifier: MIT
// coterie help: explains a topic.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <string>

#include "coterie/spec.h"
#include "train/option_values.h"
#include "verbs.h"

namespace coterie::cli {

void add_help(CLI::App& program) {
  CLI::App* verb = program.add_subcommand("help", "Explain a topic: spec (attention specs)");
  const auto topic = std::make_shared<std::string>();  // lives as long as the callback
  train::add_choice(*verb, "topic", *topic, {"spec"}, "Topic")->required();
  verb->callback([topic] { fmt::print("{}", spec_help()); });
}

}  // namespace coterie::cli
