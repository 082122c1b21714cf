// SPDX-License-Identifier: MIT
// JSON from untrusted files. nlohmann-json parses any nesting, but copying and printing values
// recurses once per level, and a value of three bytes of text takes up to 80 bytes of memory.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <string_view>

namespace coterie::train {

constexpr std::size_t kLongestJson = std::size_t{16} << 20;  // bytes of a line, or of a whole text
constexpr int kDeepestJson = 64;                             // ours have at most 7 levels

// Throws Error, which starts with `place`, when a text is longer or nested deeper than that.
void check_json(std::string_view text, const std::string& place);

// Calls `use` with every line of a file of JSON lines, after check_json. Throws Error when the file
// cannot be read or is too large.
void for_each_json_line(const std::string& path, const std::function<void(std::string_view)>& use);

}  // namespace coterie::train
