// SPDX-License-Identifier: MIT
// Access to fields of JSON lines that may be missing or of an unexpected type.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>

#include "report/data.h"

namespace coterie::train {

using Json = nlohmann::ordered_json;

// Calls `use` with every line that is a JSON object; returns the number of other nonblank lines.
// Throws Error if the file cannot be read or exceeds the limits of formats/json_lines.h.
std::int64_t for_each_line(const std::string& path, const std::function<void(const Json&)>& use);

double number_at(const Json& object, const char* key);         // kUnknown if not a number
std::int64_t integer_at(const Json& object, const char* key);  // 0 if not an integer
std::string text_at(const Json& object, const char* key);      // "" if not a string
bool flag_at(const Json& object, const char* key);             // false if not a boolean
Json list_at(const Json& object, const char* key);             // empty if not a list

// Names and values of an object as text.
Facts facts_of(const Json& object);

}  // namespace coterie::train
