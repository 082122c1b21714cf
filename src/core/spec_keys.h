// SPDX-License-Identifier: MIT
// The table behind the attention spec: per mechanism its name and its keys, each tied to one field.
// Parser, printer, error texts, help and range checks all read it; defaults come from the structs.
#pragma once

#include <functional>
#include <string>
#include <string_view>
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
  std::function<bool(const HeadGroup&)> needed;           // whether the default will not do
};

struct SpecEntry {
  std::string name;
  std::string help;
  HeadGroup defaults;
  std::vector<SpecKey> keys;
};

const std::vector<SpecEntry>& spec_table();
const SpecEntry& spec_entry(const Mechanism& mechanism);

// Throws Error "[op] ..." when a needed key has its default or a value is out of range.
void check_values(const std::string& op, const HeadGroup& group);

}  // namespace coterie
