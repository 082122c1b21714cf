// SPDX-License-Identifier: MIT
#include "formats/spec_file.h"

#include <fmt/core.h>

#include <nlohmann/json.hpp>

#include "coterie/error.h"
#include "coterie/spec.h"
#include "formats/files.h"
#include "formats/json_lines.h"

namespace coterie::train {

bool is_spec_file(const std::string& text) { return text.ends_with(".json"); }

std::vector<std::string> read_spec_file(const std::string& path) {
  const std::string text = read_file(path, kSmallFile);
  check_json(text, "[spec] " + path);
  const auto file = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!file.is_object() || file.value("coterie_specs", nlohmann::json()) != 1) {
    throw Error(
        fmt::format("[spec] {}: expected JSON with \"coterie_specs\": 1, as "
                    "coterie.calibrate writes it",
                    path));
  }
  std::vector<std::string> specs;
  const auto layers = file.value("layers", nlohmann::json());
  for (const auto& layer : layers.is_array() ? layers : nlohmann::json::array()) {
    const bool good = layer.is_object() && layer.contains("spec") && layer["spec"].is_string();
    if (!good) {
      throw Error(fmt::format("[spec] {}: expected an object with a \"spec\" for layer {}", path,
                              specs.size()));
    }
    specs.push_back(layer["spec"].get<std::string>());
    AttentionSpec::parse(specs.back());
  }
  if (specs.empty()) {
    throw Error(fmt::format("[spec] {}: expected \"layers\", a list of at least one", path));
  }
  return specs;
}

}  // namespace coterie::train
