// SPDX-License-Identifier: MIT
#include "formats/json_lines.h"

#include <algorithm>

#include "coterie/error.h"
#include "formats/files.h"

namespace coterie::train {
namespace {

constexpr FileLimit kLinesFile = {std::uint64_t{1} << 30,
                                  "split the file, or log fewer steps with --train.log-every"};

// Nesting of brackets outside strings. If the text is not JSON, at least the depth that the parser
// reaches before it finds the error.
int nesting(std::string_view text) {
  int depth = 0, deepest = 0;
  bool quoted = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (c == '"') {
      quoted = !quoted;
    } else if (quoted) {
      i += c == '\\' ? 1 : 0;
    } else if (c == '[' || c == '{') {
      deepest = std::max(deepest, ++depth);
    } else if (c == ']' || c == '}') {
      --depth;
    }
  }
  return deepest;
}

}  // namespace

void check_json(std::string_view text, const std::string& place) {
  if (text.size() > kLongestJson) {
    throw Error(place + ": expected at most " + size_text(kLongestJson) +
                " bytes of JSON in a line; got " + size_text(text.size()));
  }
  const int depth = nesting(text);
  if (depth > kDeepestJson) {
    throw Error(place + ": expected JSON of at most " + std::to_string(kDeepestJson) +
                " nested levels; got " + std::to_string(depth));
  }
}

void for_each_json_line(const std::string& path, const std::function<void(std::string_view)>& use) {
  const std::string content = read_file(path, kLinesFile);
  std::string_view rest = content;
  for (std::int64_t number = 1; !rest.empty(); ++number) {
    const std::string_view line = rest.substr(0, rest.find('\n'));
    check_json(line, "[json] " + path + ", line " + std::to_string(number));
    use(line);
    rest.remove_prefix(std::min(line.size() + 1, rest.size()));
  }
}

}  // namespace coterie::train
