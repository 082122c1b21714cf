// SPDX-License-Identifier: MIT
#include "report/json.h"

#include <fmt/core.h>

#include "formats/json_lines.h"

namespace coterie::train {

namespace {

const Json* find(const Json& object, const char* key) {
  if (!object.is_object()) return nullptr;
  const auto found = object.find(key);
  return found == object.end() ? nullptr : &*found;
}

std::string value_text(const Json& value) {
  if (value.is_string()) return value.get<std::string>();
  if (value.is_boolean()) return value.get<bool>() ? "yes" : "no";
  if (value.is_null()) return "–";
  if (value.is_number_float()) return fmt::format("{:.6g}", value.get<double>());
  return value.dump();
}

}  // namespace

std::int64_t for_each_line(const std::string& path, const std::function<void(const Json&)>& use) {
  std::int64_t unreadable = 0;
  for_each_json_line(path, [&](std::string_view line) {
    if (line.find_first_not_of(" \t\r") == std::string::npos) return;
    const Json value = Json::parse(line, nullptr, /*allow_exceptions=*/false);
    value.is_object() ? use(value) : void(++unreadable);
  });
  return unreadable;
}

double number_at(const Json& object, const char* key) {
  const Json* const value = find(object, key);
  return value && value->is_number() ? value->get<double>() : kUnknown;
}

std::int64_t integer_at(const Json& object, const char* key) {
  const Json* const value = find(object, key);
  return value && value->is_number_integer() ? value->get<std::int64_t>() : 0;
}

std::string text_at(const Json& object, const char* key) {
  const Json* const value = find(object, key);
  return value && value->is_string() ? value->get<std::string>() : "";
}

bool flag_at(const Json& object, const char* key) {
  const Json* const value = find(object, key);
  return value && value->is_boolean() && value->get<bool>();
}

Json list_at(const Json& object, const char* key) {
  const Json* const value = find(object, key);
  return value && value->is_array() ? *value : Json::array();
}

Facts facts_of(const Json& object) {
  Facts facts;
  if (!object.is_object()) return facts;
  for (const auto& [name, value] : object.items()) facts.emplace_back(name, value_text(value));
  return facts;
}

}  // namespace coterie::train
