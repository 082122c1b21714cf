// SPDX-License-Identifier: MIT
// Properties of mechanisms, read from their descriptors.
#include "coterie/mechanism.h"

#include "core/check.h"
#include "core/descriptor.h"

namespace coterie {
namespace {

template <class... Params>
std::vector<Descriptor> describe_all(const std::variant<Params...>*) {
  return {describe<Params>()...};
}

}  // namespace

SpecKey positions_key(Positions unless_told, bool relative) {
  Choices<Positions> choices = {{"rotary", Positions::rotary}, {"none", Positions::none}};
  if (relative) choices.push_back({"relative", Positions::relative});
  return choice_key<Positions>(
      "positions", [](HeadGroup& group) { return &group.positions; }, choices,
      unless_told == Positions::rotary ? "rotary by default" : "none by default");
}

const std::vector<Descriptor>& descriptors() {
  // Never destroyed: other threads may be inside a call while the process exits.
  static const std::vector<Descriptor>& all =
      *new std::vector<Descriptor>(describe_all(static_cast<const Mechanism*>(nullptr)));
  return all;
}

const Descriptor& descriptor_of(const Mechanism& mechanism) {
  return descriptors()[mechanism.index()];
}

void check_values(const std::string& op, const HeadGroup& group) {
  const Descriptor& own = descriptor_of(group.mechanism);
  for (const SpecKey& key : own.keys) {
    const bool unset = key.get(group) == key.get(own.defaults);
    COTERIE_CHECK(!unset || !key.needed(group), op, key.name, " is required for ", own.name, ": ",
                  key.allowed, "; got none");
    COTERIE_CHECK(key.valid(group), op, key.name, " of ", own.name, " must be ", key.allowed,
                  "; got ", key.get(group));
  }
}

const char* mechanism_name(const Mechanism& mechanism) { return descriptor_of(mechanism).name; }

bool takes_mask(const Mechanism& mechanism) { return descriptor_of(mechanism).takes_mask; }

RowForm row_form(const Mechanism& mechanism) { return descriptor_of(mechanism).rows; }

bool keys_are_queries(const Mechanism& mechanism) {
  return descriptor_of(mechanism).keys_are_queries(mechanism);
}

bool selects_together(const Mechanism& mechanism) {
  return descriptor_of(mechanism).selects_together(mechanism);
}

bool leaks_future(const Mechanism& mechanism, bool causal) {
  return resolve_causality(mechanism, causal) == Causality::leaking;
}

KeyPattern key_pattern(const Mechanism& mechanism, std::int64_t position) {
  return descriptor_of(mechanism).key_pattern(mechanism, position);
}

Decoding decoding(const Mechanism& mechanism, bool causal) {
  const Mechanism resolved = resolve(mechanism, causal);
  if (resolve_causality(resolved, causal) != Causality::strict) return Decoding::none;
  return descriptor_of(resolved).decoding(resolved);
}

Causality resolve_causality(const Mechanism& mechanism, bool causal) {
  return descriptor_of(mechanism).causality(mechanism, causal);
}

Mechanism resolve(const Mechanism& mechanism, bool causal) {
  check_values(mechanism_name(mechanism), {.mechanism = mechanism});
  Mechanism resolved = mechanism;
  descriptor_of(mechanism).settle(resolved, resolve_causality(mechanism, causal));
  return resolved;
}

}  // namespace coterie
