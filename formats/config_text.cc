// SPDX-License-Identifier: MIT
#include "formats/config_text.h"

#include <fmt/core.h>

#include <set>
#include <sstream>
#include <string_view>

#include "coterie/error.h"

namespace coterie::train {
namespace {

bool is_word(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' ||
         c == '_';
}

bool is_space(char c) { return c == ' ' || c == '\t' || c == '\r'; }

// Reads one line from left to right.
class LineReader {
 public:
  LineReader(std::string_view line, std::string place) : rest_(line), place_(std::move(place)) {}

  [[noreturn]] void refuse(const std::string& expected) const {
    constexpr std::size_t kShown = 60;
    const std::string got =
        rest_.empty() ? "the end of the line" : quoted_text(std::string(rest_.substr(0, kShown)));
    throw Error(place_ + "expected " + expected + "; got " + got);
  }

  // Whether the next character is `c`, which is then taken.
  bool take(char c) {
    skip_spaces();
    if (rest_.empty() || rest_.front() != c) return false;
    rest_.remove_prefix(1);
    return true;
  }

  bool at_end() {
    skip_spaces();
    return rest_.empty() || rest_.front() == '#';
  }

  // "dim", "model.dim"
  std::string key() {
    skip_spaces();
    const std::string name = take_while([](char c) { return is_word(c) || c == '.'; });
    const bool empty_part = name.empty() || name.front() == '.' || name.back() == '.' ||
                            name.find("..") != std::string::npos;
    if (empty_part) refuse("a key like dim or model.dim");
    return name;
  }

  std::vector<std::string> values() {
    std::vector<std::string> found;
    if (!take('[')) return {value()};
    while (!take(']')) {
      found.push_back(value());
      if (!take(',') && !(!rest_.empty() && rest_.front() == ']')) refuse("\",\" or \"]\"");
    }
    return found;
  }

 private:
  void skip_spaces() {
    while (!rest_.empty() && is_space(rest_.front())) rest_.remove_prefix(1);
  }

  template <class Test>
  std::string take_while(Test test) {
    std::size_t length = 0;
    while (length < rest_.size() && test(rest_[length])) ++length;
    const std::string taken(rest_.substr(0, length));
    rest_.remove_prefix(length);
    return taken;
  }

  std::string value() {
    if (take('"')) return escaped_text();
    if (take('\'')) return literal_text();
    const std::string_view start = rest_;
    const std::string bare = take_while([](char c) { return is_word(c) || c == '.' || c == '+'; });
    const bool number =
        !bare.empty() && std::string("+-.0123456789").find(bare[0]) != std::string::npos;
    if (!number && bare != "true" && bare != "false" && bare != "inf" && bare != "nan") {
      rest_ = start;
      refuse("a \"quoted text\", a number, true, false or a [list]");
    }
    return bare;
  }

  std::string literal_text() {
    const std::string text = take_while([](char c) { return c != '\''; });
    if (!take('\'')) refuse("a closing '");
    return text;
  }

  std::string escaped_text() {
    std::string text;
    while (!rest_.empty() && rest_.front() != '"') {
      const char c = rest_.front();
      rest_.remove_prefix(1);
      text += c == '\\' ? escape() : c;
    }
    if (rest_.empty()) refuse("a closing \"");
    rest_.remove_prefix(1);
    return text;
  }

  // What stands after a backslash.
  char escape() {
    static const std::string letters = "\"\\nrtbf", meanings = "\"\\\n\r\t\b\f";
    const std::size_t at = rest_.empty() ? std::string::npos : letters.find(rest_.front());
    if (at == std::string::npos) return unicode_escape();
    rest_.remove_prefix(1);
    return meanings[at];
  }

  char unicode_escape() {
    constexpr std::size_t kLength = 5;  // u and four digits
    int code = 0;
    bool good = rest_.size() >= kLength && rest_.front() == 'u';
    for (std::size_t i = 1; good && i < kLength; ++i) {
      const std::size_t digit = std::string("0123456789abcdef").find(rest_[i]);
      good = digit != std::string::npos;
      code = code * 16 + static_cast<int>(digit & 15);
    }
    if (!good || code >= 0x80) refuse("one of \" \\ n r t b f u0000 ... u007f after a backslash");
    rest_.remove_prefix(kLength);
    return static_cast<char>(code);
  }

  std::string_view rest_;
  std::string place_;
};

}  // namespace

std::string config_place(const std::string& name, std::int64_t line) {
  return fmt::format("[config] {}, line {}: ", name, line);
}

std::vector<ConfigLine> read_config_lines(const std::string& text, const std::string& name) {
  std::vector<ConfigLine> lines;
  std::set<std::string> seen;
  std::string section;
  std::istringstream stream(text);
  std::string line;
  for (std::int64_t number = 1; std::getline(stream, line); ++number) {
    LineReader reader(line, config_place(name, number));
    if (reader.at_end()) continue;
    if (reader.take('[')) {
      section = reader.key() + ".";
      if (!reader.take(']')) reader.refuse("\"]\"");
    } else {
      const std::string key = section + reader.key();
      if (!reader.take('=')) reader.refuse("\"=\"");
      lines.push_back({key, reader.values(), number});
      if (!seen.insert(key).second) {
        throw Error(config_place(name, number) + "expected each key once; got " + key + " again");
      }
    }
    if (!reader.at_end()) reader.refuse("the end of the line");
  }
  return lines;
}

std::string quoted_text(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += {'\\', c};
    } else if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
      out += fmt::format("\\u{:04x}", static_cast<int>(c));
    } else {
      out += c;
    }
  }
  return out + "\"";
}

}  // namespace coterie::train
