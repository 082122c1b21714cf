// SPDX-License-Identifier: MIT
// Command-line options with a range or a list of words, the same in every verb. Repeated options:
// the last one counts.
#pragma once

#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <limits>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace coterie::train {

// "from 1 to 1024", "of at least 0"
template <class Number>
std::string range_text(Number low, Number high) {
  return high == std::numeric_limits<Number>::max() ? fmt::format("of at least {}", low)
                                                    : fmt::format("from {} to {}", low, high);
}

// Parses all of `text`; CLI11 would read "010" as 8 and "-1" as 2^64 - 1. Whole numbers may end in
// k, M or G: times 1024, 1024^2, 1024^3.
template <class Number>
Number parse_number(const std::string& option, const std::string& text, Number low, Number high) {
  Number value{};
  const char* const end = text.data() + text.size();
  const auto read = std::from_chars(text.data(), end, value);
  const std::string_view unit(read.ptr, static_cast<std::size_t>(end - read.ptr));
  bool good = read.ec == std::errc() && unit.size() <= 1;
  if constexpr (std::is_integral_v<Number>) {
    const std::size_t power = unit.empty() ? 0 : std::string_view("kMG").find(unit) + 1;
    good = good && (unit.empty() || power != 0) && value <= high >> (10 * power);
    if (good) value = static_cast<Number>(value * (Number{1} << (10 * power)));
  } else {
    good = good && unit.empty();
  }
  if (good && value >= low && value <= high) return value + Number{};  // -0 becomes 0
  throw CLI::ValidationError(option,
                             fmt::format("expected a {} {}; got \"{}\"",
                                         std::is_integral_v<Number> ? "whole number" : "number",
                                         range_text(low, high), text));
}

template <class Number>
CLI::Option* add_number(CLI::App& app, const std::string& name, Number& field,
                        std::type_identity_t<Number> low, std::type_identity_t<Number> high,
                        const std::string& help) {
  const auto set = [=, &field](const std::string& text) {
    field = parse_number<Number>(name, text, low, high);
  };
  return app.add_option_function<std::string>(name, set, help)
      ->type_name(std::is_integral_v<Number> ? "N" : "NUMBER")
      ->default_str(fmt::format("{}", field))
      ->take_last();
}

inline CLI::Option* add_choice(CLI::App& app, const std::string& name, std::string& field,
                               const std::vector<std::string>& words, const std::string& help) {
  const std::string list = CLI::detail::join(words, "|");
  const auto check = [=](std::string& text) {
    const bool known = std::find(words.begin(), words.end(), text) != words.end();
    return known ? std::string() : "expected one of " + list + "; got \"" + text + "\"";
  };
  return app.add_option(name, field, help)
      ->check(CLI::Validator("").operation(check))
      ->type_name(list)
      ->capture_default_str()
      ->take_last();
}

// "--model.bias", "--model.bias=false" and "--model.bias false" all work.
inline CLI::Option* add_switch(CLI::App& app, const std::string& name, bool& field,
                               const std::string& help) {
  const auto set = [name, &field](const std::string& text) {
    const bool on = text.empty() || text == "true" || text == "1" || text == "on";
    if (!on && text != "false" && text != "0" && text != "off") {
      throw CLI::ValidationError(name, "expected true or false; got \"" + text + "\"");
    }
    field = on;
  };
  return app.add_option_function<std::string>(name, set, help)
      ->expected(0, 1)
      ->option_text(fmt::format("[true|false]={}", field))
      ->take_last();
}

}  // namespace coterie::train
