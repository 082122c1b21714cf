// SPDX-License-Identifier: MIT
#include "core/spec_key.h"

#include <charconv>

namespace coterie {
namespace {

// The shortest digits that read back as the same number, with exponents as "1e-4".
std::string number_text(double value) {
  char buffer[32];
  const auto end = std::to_chars(buffer, buffer + sizeof(buffer), value).ptr;
  std::string text(buffer, end);
  const std::size_t exponent = text.find('e');
  if (exponent == std::string::npos) return text;
  std::size_t digit = exponent + 1;
  if (text[digit] == '+') text.erase(digit, 1);
  if (text[digit] == '-') ++digit;
  while (text[digit] == '0' && digit + 1 < text.size()) text.erase(digit, 1);
  return text;
}

template <class Number>
bool read_number(std::string_view text, Number& value) {
  const auto result = std::from_chars(text.data(), text.data() + text.size(), value);
  return result.ec == std::errc() && result.ptr == text.data() + text.size();
}

}  // namespace

SpecKey integer_key(const char* name, const Field<std::int64_t>& field, Whole range,
                    const HeadGroup& defaults, const char* help) {
  const auto inside = [range](std::int64_t value) {
    return value >= range.min && value <= range.max && value % range.multiple == 0;
  };
  HeadGroup unset_group = defaults;
  const std::int64_t unset = *field(unset_group);
  std::string allowed = range.multiple == 2 ? "an even integer from " : "an integer from ";
  allowed += std::to_string(range.min) + " to " + std::to_string(range.max);
  const auto set = [=](std::string_view text, HeadGroup& group) {
    std::int64_t value = 0;
    if (text.empty() || text[0] < '0' || text[0] > '9') return false;
    if (!read_number(text, value) || !inside(value)) return false;
    *field(group) = value;
    return true;
  };
  const auto get = [=](HeadGroup group) {
    const std::int64_t value = *field(group);
    return value == kAutomatic && unset == kAutomatic ? "automatic" : std::to_string(value);
  };
  const auto valid = [=](HeadGroup group) {
    const std::int64_t value = *field(group);
    return value == unset || inside(value);
  };
  const bool needed = !inside(unset) && unset != kAutomatic;
  return {name, allowed, help, set, get, valid, [needed](const HeadGroup&) { return needed; }};
}

SpecKey number_key(const char* name, const Field<double>& field, double max, const char* help) {
  const auto inside = [max](double value) { return value >= 0 && value <= max; };
  const bool bounded = max < std::numeric_limits<double>::max();
  const std::string allowed =
      bounded ? "a number from 0 to " + number_text(max) : std::string("a number >= 0");
  const auto set = [=](std::string_view text, HeadGroup& group) {
    double value = 0;
    if (!read_number(text, value) || !inside(value)) return false;
    *field(group) = value;
    return true;
  };
  const auto get = [=](HeadGroup group) { return number_text(*field(group)); };
  const auto valid = [=](HeadGroup group) { return inside(*field(group)); };
  return {name, allowed, help, set, get, valid, [](const HeadGroup&) { return false; }};
}

}  // namespace coterie
