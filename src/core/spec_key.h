// SPDX-License-Identifier: MIT
// A key of the attention spec, tied to one field of a mechanism's parameters. Parser, printer,
// messages, help and range checks read it; the default is the struct's.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "coterie/spec.h"

namespace coterie {

struct SpecKey {
  std::string name;
  std::string allowed;  // "keys|hamming-keys|hamming", "an integer from 1 to 63"
  std::string help;
  std::function<bool(std::string_view, HeadGroup&)> set;  // false: not a value of this key
  std::function<std::string(const HeadGroup&)> get;       // as `set` reads it, or "automatic"
  std::function<bool(const HeadGroup&)> valid;            // in range, or the default
  std::function<bool(const HeadGroup&)> needed;           // whether the key is required
};

// Tokens and clusters are counted in int32.
constexpr std::int64_t kMaxCount = std::numeric_limits<std::int32_t>::max();

// The integers that a key allows.
struct Whole {
  std::int64_t min = 1, max = kMaxCount, multiple = 1;
};
// Returns a pointer to a field of a head group.
template <class Value>
using Field = std::function<Value*(HeadGroup&)>;

SpecKey integer_key(const char* name, const Field<std::int64_t>& field, Whole range,
                    const HeadGroup& defaults, const char* help);
SpecKey number_key(const char* name, const Field<double>& field, double max, const char* help);

template <class Value>
using Choices = std::vector<std::pair<const char*, Value>>;

// A value that is not among the choices is the automatic one.
template <class Value>
SpecKey choice_key(const char* name, const Field<Value>& field, const Choices<Value>& choices,
                   const char* help) {
  std::string allowed;
  for (const auto& choice : choices)
    allowed += (allowed.empty() ? "" : "|") + std::string(choice.first);
  const auto set = [=](std::string_view text, HeadGroup& group) {
    for (const auto& choice : choices) {
      if (text != choice.first) continue;
      *field(group) = choice.second;
      return true;
    }
    return false;
  };
  const auto get = [=](HeadGroup group) -> std::string {
    for (const auto& choice : choices) {
      if (*field(group) == choice.second) return choice.first;
    }
    return "automatic";
  };
  const auto always = [](const HeadGroup&) { return true; };
  const auto never = [](const HeadGroup&) { return false; };
  return {name, allowed, help, set, get, always, never};
}

inline SpecKey bool_key(const char* name, const Field<bool>& field, const char* help) {
  return choice_key<bool>(name, field, {{"true", true}, {"false", false}}, help);
}

// A field of the mechanism's parameters.
template <class Params, class Value>
Field<Value> field_of(Value Params::*member) {
  return [member](HeadGroup& group) { return &(std::get<Params>(group.mechanism).*member); };
}

}  // namespace coterie
