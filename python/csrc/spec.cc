// SPDX-License-Identifier: MIT
#include "coterie/spec.h"

#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#include "coterie/error.h"
#include "spec.h"

namespace coterie::stable_api {
namespace {

Mechanism parse_mechanism(const std::string& text) {
  const AttentionSpec spec = AttentionSpec::parse(text);
  if (spec.groups.size() != 1 || spec.groups[0].heads != 0) {
    throw Error("[attention] expected the spec of one group without a number of heads; got \"" +
                text + "\"");
  }
  return spec.groups[0].mechanism;
}

}  // namespace

Mechanism mechanism_of(const std::string& text) {
  static std::shared_mutex mutex;
  static std::unordered_map<std::string, Mechanism> known;
  {
    const std::shared_lock lock(mutex);
    const auto found = known.find(text);
    if (found != known.end()) return found->second;
  }
  constexpr std::size_t kMost = 1024;  // limits the memory of programs that generate specs
  const Mechanism mechanism = parse_mechanism(text);
  const std::unique_lock lock(mutex);
  if (known.size() >= kMost) known.clear();
  known.emplace(text, mechanism);
  return mechanism;
}

}  // namespace coterie::stable_api
