// SPDX-License-Identifier: MIT
#include "core/descriptor.h"

namespace coterie {
namespace {

struct Strided : ExactMechanism {
  using Params = StridedParams;
  static constexpr const char *kName = "strided",
                              *kSummary =
                                  "keys at multiples of a distance; any mask, causal or not",
                              *kAttends = "keys at a multiple of `stride` positions from it";
  static constexpr Positions kPositions = Positions::none;

  static std::vector<SpecKey> keys(const HeadGroup& defaults) {
    return {integer_key("stride", field_of(&Params::stride), {}, defaults,
                        "distance between attended keys")};
  }
  static Decoding decoding(const Params&) { return Decoding::rows; }
  static KeyPattern key_pattern(const Params& params, std::int64_t position) {
    return {position % params.stride, params.stride};
  }
};

}  // namespace

template <>
Descriptor describe<StridedParams>() {
  return make_descriptor<Strided>();
}

}  // namespace coterie
