// SPDX-License-Identifier: MIT
#include "core/descriptor.h"

namespace coterie {
namespace {

struct Full : ExactMechanism, AllKeys {
  using Params = FullParams;
  static constexpr const char *kName = "full",
                              *kSummary = "softmax over all keys; any mask, causal or not",
                              *kAttends = "all keys";
  static constexpr Positions kPositions = Positions::rotary;

  static std::vector<SpecKey> keys(const HeadGroup&) { return {}; }
  static Decoding decoding(const Params&) { return Decoding::rows; }
};

}  // namespace

template <>
Descriptor describe<FullParams>() {
  return make_descriptor<Full>();
}

}  // namespace coterie
