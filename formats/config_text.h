// SPDX-License-Identifier: MIT
// Config files are TOML 1.0, read by toml++. Sections, dotted keys and inline tables give option
// names: `dim = 64` under [model], `model.dim = 64` and `model = {dim = 64}` are model.dim. A value
// is a text, a number, true, false or one list of these.
//
// CLI11's own reader is not used: version 2.1.2 cuts quoted texts at '#', skips lines it cannot
// read, silently takes the first of two equal keys, and needs memory that grows with the square of
// a section name's length.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace coterie::train {

constexpr std::int64_t kMostKeyParts = 16;  // "model.dim" has 2

// One option of a config file.
struct ConfigLine {
  std::string key;                  // with the section: "model.dim"
  std::vector<std::string> values;  // texts without quotes, numbers in decimal: 1_000 is "1000"
  std::int64_t number = 0;          // of the key's line, from 1
};

// "[config] NAME, line 3: "
std::string config_place(const std::string& name, std::int64_t line);

// The options in the order of the file. Throws Error, naming the line, when the text is not TOML,
// has other values than the above, gives a key twice or is larger than kConfigFile.
std::vector<ConfigLine> read_config_lines(const std::string& text, const std::string& name);

// `text` as a TOML string, with quotes. Throws Error when it is not UTF-8.
std::string quoted_text(const std::string& text);

}  // namespace coterie::train
