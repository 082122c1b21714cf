// SPDX-License-Identifier: MIT
// Parser and printer of the attention spec. Names and keys come from the descriptors.
#include "coterie/spec.h"

#include <algorithm>
#include <charconv>
#include <limits>

#include "core/check.h"
#include "core/descriptor.h"
#include "coterie/near_miss.h"
#include "coterie/wrap.h"

namespace coterie {
namespace {

bool is_space(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && is_space(text.front())) text.remove_prefix(1);
  while (!text.empty() && is_space(text.back())) text.remove_suffix(1);
  return text;
}

// Any text as one printable line of limited length, for messages.
std::string quoted(std::string_view text) {
  constexpr std::size_t kLongest = 60;
  std::string shown = "\"";
  for (const char c : text.substr(0, kLongest)) shown += c >= ' ' && c <= '~' ? c : '?';
  return shown + (text.size() > kLongest ? "...\"" : "\"");
}

std::string join(const std::vector<std::string>& parts, const char* between) {
  std::string text;
  for (const std::string& part : parts) text += (text.empty() ? "" : between) + part;
  return text;
}

const Descriptor& find_descriptor(std::string_view name) {
  std::vector<std::string> names;
  for (const Descriptor& entry : descriptors()) {
    if (entry.name == name) return entry;
    names.push_back(entry.name);
  }
  fail("spec", "expected one of ", join(names, ", "), "; got ", quoted(name),
       near_miss(name, names));
}

std::string key_and_default(const Descriptor& entry, const SpecKey& key) {
  if (key.needed(entry.defaults)) return key.name + " (required)";
  return key.name + "=" + key.get(entry.defaults);
}

const SpecKey& find_key(const Descriptor& entry, std::string_view name) {
  std::vector<std::string> names, defaults;
  for (const SpecKey& key : entry.keys) {
    if (key.name == name) return key;
    names.push_back(key.name);
    defaults.push_back(key_and_default(entry, key));
  }
  fail("spec", "expected a key of ", entry.name, ": ", join(defaults, ", "), "; got ", quoted(name),
       near_miss(name, names));
}

// Splits at `separator`, but not inside parentheses.
std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  std::size_t begin = 0;
  bool inside = false;
  for (std::size_t at = 0; at < text.size(); ++at) {
    if (text[at] == '(') inside = true;
    if (text[at] == ')') inside = false;
    if (text[at] != separator || inside) continue;
    parts.push_back(text.substr(begin, at - begin));
    begin = at + 1;
  }
  parts.push_back(text.substr(begin));
  return parts;
}

void parse_keys(std::string_view text, const Descriptor& entry, HeadGroup& group) {
  std::vector<std::string> seen;
  for (const std::string_view part : split(text, ',')) {
    const std::size_t equals = part.find('=');
    const std::string_view name = trimmed(part.substr(0, equals));
    COTERIE_CHECK(equals != std::string_view::npos && !name.empty(), "spec",
                  "expected key=value in the parentheses of ", entry.name, "; got ",
                  quoted(trimmed(part)));
    const SpecKey& key = find_key(entry, name);
    COTERIE_CHECK(std::find(seen.begin(), seen.end(), key.name) == seen.end(), "spec", "expected ",
                  key.name, " of ", entry.name, " once; got it twice");
    seen.push_back(key.name);
    const std::string_view value = trimmed(part.substr(equals + 1));
    COTERIE_CHECK(key.set(value, group), "spec", "expected ", key.name, " of ", entry.name,
                  " to be ", key.allowed, "; got ", quoted(value));
  }
}

std::int64_t parse_heads(std::string_view text) {
  std::int32_t heads = 0;
  const auto result = std::from_chars(text.data(), text.data() + text.size(), heads);
  COTERIE_CHECK(result.ec == std::errc() && result.ptr == text.data() + text.size() && heads >= 1,
                "spec", "expected a number of heads from 1 to 2147483647 before \"*\"; got ",
                quoted(text));
  return heads;
}

HeadGroup parse_group(std::string_view text) {
  const std::size_t open = text.find('(');
  std::string_view name = trimmed(text.substr(0, open));
  std::int64_t heads = 0;
  if (const std::size_t star = name.find('*'); star != std::string_view::npos) {
    heads = parse_heads(trimmed(name.substr(0, star)));
    name = trimmed(name.substr(star + 1));
  }
  const Descriptor& entry = find_descriptor(name);
  HeadGroup group = entry.defaults;
  group.heads = heads;
  if (open != std::string_view::npos) {
    COTERIE_CHECK(text.back() == ')', "spec", "expected \")\" at the end of a group; got ",
                  quoted(text));
    parse_keys(text.substr(open + 1, text.size() - open - 2), entry, group);
  }
  check_values("spec", group);
  return group;
}

std::string group_text(const HeadGroup& group) {
  const Descriptor& entry = descriptor_of(group.mechanism);
  std::vector<std::string> keys;
  for (const SpecKey& key : entry.keys) {
    const std::string value = key.get(group);
    if (value != key.get(entry.defaults)) keys.push_back(key.name + "=" + value);
  }
  const std::string count = group.heads > 0 ? std::to_string(group.heads) + "*" : "";
  return count + entry.name + (keys.empty() ? "" : "(" + join(keys, ",") + ")");
}

}  // namespace

bool HeadGroup::rotary() const {
  const bool automatic = positions == Positions::automatic;
  return (automatic ? descriptor_of(mechanism).positions : positions) == Positions::rotary;
}

AttentionSpec AttentionSpec::parse(std::string_view text) {
  AttentionSpec spec;
  for (const std::string_view part : split(text, '+')) {
    spec.groups.push_back(parse_group(trimmed(part)));
  }
  for (const HeadGroup& group : spec.groups) {
    COTERIE_CHECK(group.heads > 0 || spec.groups.size() == 1, "spec",
                  "expected a number of heads for every group if there are several, as in \"4*",
                  group_text(group), "\"; got none");
  }
  return spec;
}

std::string AttentionSpec::to_string() const {
  std::vector<std::string> parts;
  for (const HeadGroup& group : groups) parts.push_back(group_text(group));
  return join(parts, "+");
}

std::vector<std::int64_t> AttentionSpec::head_counts(std::int64_t heads) const {
  COTERIE_CHECK(heads >= 1, "spec", "expected a layer of at least one head; got ", heads);
  COTERIE_CHECK(!groups.empty(), "spec", "expected at least one group of heads; got none");
  if (groups.size() == 1 && groups[0].heads == 0) return {heads};
  std::vector<std::int64_t> counts;
  std::int64_t left = heads;
  bool fits = true;
  for (const HeadGroup& group : groups) {
    fits = fits && group.heads >= 1 && group.heads <= left;
    if (fits) left -= group.heads;
    counts.push_back(group.heads);
  }
  COTERIE_CHECK(fits && left == 0, "spec", "expected head counts that add up to the ", heads,
                " heads of the layer; got ", quoted(to_string()));
  return counts;
}

std::string to_string(const Mechanism& mechanism) { return group_text({.mechanism = mechanism}); }

std::string spec_help() {
  std::string text =
      "An attention spec describes the attention of a layer as a sum of head groups:\n"
      "  [heads*]name[(key=value,...)] + ...\n"
      "One group without a count takes all heads.\n"
      "Examples:\n"
      "  full\n"
      "  i-clustered(clusters=100,topk=32)\n"
      "  4*local(window=256)+4*routing(clusters=16,window=256,causal=strict)\n";
  for (const Descriptor& entry : descriptors()) {
    append_wrapped(text += '\n', std::string(entry.name) + ": " + entry.summary, 0);
    for (const SpecKey& key : entry.keys) {
      text += "  " + key_and_default(entry, key);
      append_wrapped(text, key.help + " (" + key.allowed + ")", 26);
    }
  }
  return text;
}

}  // namespace coterie
