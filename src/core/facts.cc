// SPDX-License-Identifier: MIT
// Descriptors as text: for callers in other languages, and as the table of docs/mechanisms.md.
#include <sstream>

#include "core/descriptor.h"
#include "coterie/error.h"
#include "coterie/mechanism.h"

namespace coterie {
namespace {

const char* name_of(Causality form) {
  switch (form) {
    case Causality::strict:
      return "strict";
    case Causality::leaking:
      return "leaking";
    default:
      return "none";
  }
}

const char* name_of(RowForm rows) {
  switch (rows) {
    case RowForm::unit_keys:
      return "unit_keys";
    case RowForm::normalised:
      return "normalised";
    default:
      return "plain";
  }
}

const char* name_of(SavedKind kind) {
  switch (kind) {
    case SavedKind::selection:
      return "selection";
    case SavedKind::count:
      return "count";
    default:
      return "value";
  }
}

const char* name_of(StateField field) {
  switch (field) {
    case StateField::centroids:
      return "centroids";
    case StateField::gate:
      return "gate";
    default:
      return "logit_scale";
  }
}

std::string joined(const std::vector<Formula>& sizes) {
  std::string text;
  for (const Formula& size : sizes) text += "," + size.text();
  return text;
}

CallSizes<Formula> symbols(bool on_gpu) {
  return {Formula("B"),     Formula("H"),  Formula("N"),         Formula("S"),
          Formula("Dk"),    Formula("Dv"), Formula("key_heads"), Formula("value_heads"),
          Formula("items"), on_gpu};
}

// The causal forms of a mechanism, for all values of a key `causal`: "strict, leaks".
std::string causal_forms(const Descriptor& own) {
  std::vector<HeadGroup> groups = {own.defaults};
  for (const SpecKey& key : own.keys) {
    if (key.name != "causal") continue;
    std::istringstream values(key.allowed);
    for (std::string value; std::getline(values, value, '|');) {
      groups.push_back(own.defaults);
      key.set(value, groups.back());
    }
  }
  bool strict = false, leaking = false;
  for (const HeadGroup& group : groups) {
    try {
      const Causality form = own.causality(group.mechanism, true);
      strict = strict || form == Causality::strict;
      leaking = leaking || form == Causality::leaking;
    } catch (const Error&) {  // a form that it does not have
    }
  }
  if (!strict && !leaking) return "no";
  return std::string(strict ? "strict" : "") + (strict && leaking ? ", " : "") +
         (leaking ? "leaks" : "");
}

}  // namespace

std::string mechanism_table() {
  std::string table =
      "| name | a query attends to | causal | mask | takes |\n|---|---|---|---|---|\n";
  for (const Descriptor& own : descriptors()) {
    const Mechanism& mechanism = own.defaults.mechanism;
    std::string state = own.keys_are_queries(mechanism) ? "q, v" : "q, k, v";
    for (const auto& field : own.state(mechanism, {}))
      state += std::string(", ") + name_of(field.field) + (field.required ? "" : " (optional)");
    table += std::string("| `") + own.name + "` | " + own.attends + " | " + causal_forms(own) +
             " | " + (own.takes_mask ? "yes" : "no") + " | " + state + " |\n";
  }
  return table;
}

std::string mechanism_facts(const Mechanism& mechanism, bool causal) {
  const Mechanism resolved = resolve(mechanism, causal);
  const Descriptor& own = descriptor_of(resolved);
  std::string lines;
  const auto add = [&](const std::string& key, const std::string& value) {
    lines += key + "=" + value + "\n";
  };
  const auto flag = [](bool value) { return value ? "1" : "0"; };
  add("name", own.name);
  add("causality", name_of(own.causality(resolved, causal)));
  add("keys_are_queries", flag(own.keys_are_queries(resolved)));
  add("selects_together", flag(own.selects_together(resolved)));
  add("takes_mask", flag(own.takes_mask));
  add("rows", name_of(own.rows));
  for (const SpecKey& key : own.keys) add("key." + key.name, key.get({.mechanism = resolved}));
  for (const bool on_gpu : {false, true})
    for (const auto& [name, kind, sizes] : own.saved_formulas(resolved, symbols(on_gpu)))
      add(std::string(on_gpu ? "saved.cuda." : "saved.cpu.") + name, name_of(kind) + joined(sizes));
  for (const auto& field : own.state_formulas(resolved, symbols(false)))
    add(std::string("state.") + name_of(field.field),
        std::string(field.required ? "required" : "optional") + joined(field.sizes));
  return lines;
}

}  // namespace coterie
