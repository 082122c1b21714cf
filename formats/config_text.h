// SPDX-License-Identifier: MIT
// The format of config files, a part of TOML: comments, [sections], and lines `key = value` with a
// quoted text, a number, true, false or a [list] of these on one line.
//
// Not CLI11's own reader: version 2.1.2 cuts quoted texts at '#', skips what it cannot read, takes
// the first of two equal keys in silence, and memory that grows with the square of a section's
// name.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace coterie::train {

struct ConfigLine {
  std::string key;  // with the section: "model.dim"
  std::vector<std::string> values;
  std::int64_t number = 0;  // of the line, from 1
};

// "[config] NAME, line 3: "
std::string config_place(const std::string& name, std::int64_t line);

// Throws Error, naming the line, on anything else than the above and on a key that comes twice.
std::vector<ConfigLine> read_config_lines(const std::string& text, const std::string& name);

// `text` as read_config_lines takes it, with quotes.
std::string quoted_text(const std::string& text);

}  // namespace coterie::train
