// SPDX-License-Identifier: MIT
// The attention spec: one string for the attention of a layer, the same in all interfaces.
//
//   spec  := group ("+" group)*
//   group := [heads "*"] name ["(" key "=" value ("," key "=" value)* ")"]
//
// "full", "i-clustered(clusters=100,topk=32)",
// "4*local(window=256)+4*routing(clusters=16,window=256)"
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "coterie/mechanism.h"

namespace coterie {

enum class Positions : std::uint8_t { automatic, rotary, none, relative };

// Heads of a layer that share a mechanism.
struct HeadGroup {
  std::int64_t heads = 0;  // 0: all heads of the layer; only in a spec of one group
  Mechanism mechanism;
  Positions positions = Positions::automatic;  // rotary for full and local, none for the others

  bool rotary() const;
};

struct AttentionSpec {
  std::vector<HeadGroup> groups;

  // Throws Error, which lists what is allowed, on unknown names or keys, missing or invalid values.
  static AttentionSpec parse(std::string_view text);

  // The shortest text that parses to this spec: defaults are left out.
  std::string to_string() const;

  // Group sizes for a layer of `heads` heads; throws when they do not add up.
  std::vector<std::int64_t> head_counts(std::int64_t heads) const;
};

// A group's text without its head count.
std::string to_string(const Mechanism& mechanism);

// A table of names, keys, defaults and meanings, for --help.
std::string spec_help();

// The Markdown table of docs/mechanisms.md: what mechanisms attend to, take and refuse.
std::string mechanism_table();

}  // namespace coterie
