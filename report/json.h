// SPDX-License-Identifier: MIT
// Fields of JSON lines that may be missing or of another type than expected.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>

#include "report/data.h"

namespace coterie::train {

using Json = nlohmann::ordered_json;

// Calls `use` with every line that is a JSON object; returns how many other lines there are, blank
// ones aside. Throws Error when the file cannot be read or has lines beyond formats/json_lines.h.
std::int64_t for_each_line(const std::string& path, const std::function<void(const Json&)>& use);

double number_at(const Json& object, const char* key);         // kUnknown when it is no number
std::int64_t integer_at(const Json& object, const char* key);  // 0 when it is no integer
std::string text_at(const Json& object, const char* key);      // "" when it is no string
bool flag_at(const Json& object, const char* key);             // false when it is no boolean
Json list_at(const Json& object, const char* key);             // empty when it is no list

// Names and values of an object as text.
Facts facts_of(const Json& object);

}  // namespace coterie::train
