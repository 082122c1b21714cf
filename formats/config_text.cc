// SPDX-License-Identifier: MIT
// The only file that includes toml++, which takes seconds to compile. Input is limited before it is
// parsed: toml++ builds and frees nested tables by recursion.
#include "formats/config_text.h"

#include <fmt/core.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>
#include <utility>

#include "coterie/error.h"
#include "formats/files.h"

#define TOML_HEADER_ONLY 1
#define TOML_ENABLE_FORMATTERS 0
#define TOML_MAX_NESTED_VALUES 16
#include <toml++/toml.h>

namespace coterie::train {
namespace {

// The end of the string that starts at `begin`, which may be over several lines.
std::size_t end_of_string(std::string_view text, std::size_t begin) {
  const std::string_view quote = text.substr(begin, 1);
  const std::string three(3, quote[0]);
  const std::string_view end = text.substr(begin).starts_with(three) ? three : quote;
  std::size_t at = begin + end.size();
  for (; at < text.size() && !text.substr(at).starts_with(end); ++at) {
    if (quote == "\"" && text[at] == '\\') ++at;
    if (end.size() == 1 && at < text.size() && text[at] == '\n') return at;  // not TOML
  }
  at = std::min(at + end.size(), text.size());
  // A long string may end with up to two quotes of its content.
  for (int i = 0; i < 2 && end.size() == 3 && text.substr(at).starts_with(quote); ++i) ++at;
  return at;
}

// Refuses dotted keys with many parts. If the text is not TOML, those before the error are counted.
void check_key_parts(std::string_view text, const std::string& name) {
  constexpr std::string_view kBetweenKeys = "\n=,{}[]";
  std::int64_t parts = 1;
  for (std::size_t at = 0; at < text.size();) {
    const char c = text[at];
    if (c == '"' || c == '\'') {
      at = end_of_string(text, at);
    } else if (c == '#') {
      at = std::min(text.find('\n', at), text.size());
    } else {
      if (c == '.') ++parts;
      if (kBetweenKeys.find(c) != std::string_view::npos) parts = 1;
      if (parts > kMostKeyParts) {
        const auto line = std::count(text.begin(), text.begin() + static_cast<int>(at), '\n') + 1;
        throw Error(config_place(name, line) +
                    fmt::format("expected keys of at most {} parts; got more", kMostKeyParts));
      }
      ++at;
    }
  }
}

// What to do about an error of toml++.
std::string_view advice(std::string_view wrong) {
  constexpr std::pair<std::string_view, std::string_view> kAdvice[] = {
      {"redefine", "write each key and each [section] once"},
      {"nested value", "write values in one list"},
      {"utf-8", "save the file as UTF-8"},
      {"escape", "write \\\\ for a backslash, or the text in 'single quotes'"},
      {"table header", "write a section as [model]"}};
  for (const auto& [part, what] : kAdvice) {
    if (wrong.find(part) != std::string_view::npos) return what;
  }
  return "write key = value with a \"quoted text\", a number, true, false or a [list] of these";
}

[[noreturn]] void refuse(const toml::parse_error& error, const std::string& name) {
  constexpr std::size_t kShown = 200;
  constexpr std::string_view kPrefix = "Error while parsing ";
  std::string_view wrong = error.description();
  if (wrong.starts_with(kPrefix)) wrong.remove_prefix(kPrefix.size());
  throw Error(fmt::format("{}{}{}; {}", config_place(name, error.source().begin.line),
                          wrong.substr(0, kShown), wrong.size() > kShown ? " ..." : "",
                          advice(wrong)));
}

toml::table parse(const std::string& text, const std::string& name) {
  if (text.size() > kConfigFile.bytes) {
    throw Error(fmt::format("[config] {}: expected at most {} bytes; got {} ({})", name,
                            size_text(kConfigFile.bytes), size_text(text.size()),
                            kConfigFile.advice));
  }
  check_key_parts(text, name);
  try {
    return toml::parse(text);
  } catch (const toml::parse_error& error) {
    refuse(error, name);
  }
}

// As many digits as give the same number back, and never the text of a whole number.
std::string number_text(double value) {
  const std::string text = fmt::format("{}", value);
  return text.find_first_not_of("-0123456789") == std::string::npos ? text + ".0" : text;
}

std::string value_text(const toml::node& node, const std::string& place) {
  if (const auto* text = node.as_string()) return text->get();
  if (const auto* number = node.as_integer()) return std::to_string(number->get());
  if (const auto* number = node.as_floating_point()) return number_text(number->get());
  if (const auto* truth = node.as_boolean()) return truth->get() ? "true" : "false";
  throw Error(place + "expected a \"quoted text\", a number, true or false; got " +
              (node.is_array()   ? "a list in a list"
               : node.is_table() ? "a table in a list"
                                 : "a date or time"));
}

// Collects the options of a table; keys start with `prefix`.
void collect(const toml::table& table, const std::string& prefix, const std::string& name,
             std::vector<ConfigLine>& lines) {
  for (const auto& [key, node] : table) {
    const std::string full = prefix + std::string(key.str());
    if (const toml::table* const section = node.as_table()) {
      collect(*section, full + ".", name, lines);
      continue;
    }
    ConfigLine line{full, {}, static_cast<std::int64_t>(key.source().begin.line)};
    const std::string place = config_place(name, line.number);
    if (const toml::array* const list = node.as_array()) {
      for (const toml::node& value : *list) line.values.push_back(value_text(value, place));
    } else {
      line.values.push_back(value_text(node, place));
    }
    lines.push_back(std::move(line));
  }
}

}  // namespace

std::string config_place(const std::string& name, std::int64_t line) {
  return fmt::format("[config] {}, line {}: ", name, line);
}

std::vector<ConfigLine> read_config_lines(const std::string& text, const std::string& name) {
  std::vector<ConfigLine> lines;
  collect(parse(text, name), "", name, lines);  // sorted by key
  std::stable_sort(lines.begin(), lines.end(),
                   [](const ConfigLine& a, const ConfigLine& b) { return a.number < b.number; });
  std::set<std::string> seen;
  for (const ConfigLine& line : lines) {  // "model.dim" in quotes is another key of TOML
    if (!seen.insert(line.key).second) {
      throw Error(config_place(name, line.number) + "expected each key once; got " + line.key +
                  " again");
    }
  }
  return lines;
}

// The escapes of JSON are escapes of TOML, which also wants one for DEL.
std::string quoted_text(const std::string& text) {
  std::string out;
  try {
    out = nlohmann::json(text).dump();
  } catch (const nlohmann::json::exception&) {
    throw Error("expected a text in UTF-8; got other bytes");
  }
  for (std::size_t at = out.find('\x7f'); at != std::string::npos; at = out.find('\x7f', at)) {
    out.replace(at, 1, "\\u007f");
  }
  return out;
}

}  // namespace coterie::train
