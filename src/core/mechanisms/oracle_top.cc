// SPDX-License-Identifier: MIT
#include "core/descriptor.h"

namespace coterie {
namespace {

struct OracleTop : ExactMechanism, AllKeys {
  using Params = OracleTopParams;
  static constexpr const char *kName = "oracle-top",
                              *kSummary =
                                  "the top keys by exact score, as a reference; quadratic time; "
                                  "any mask, causal or not",
                              *kAttends =
                                  "its `topk` best keys, renormalised; the yardstick of the "
                                  "approximations";
  static constexpr Positions kPositions = Positions::none;

  static std::vector<SpecKey> keys(const HeadGroup& defaults) {
    return {integer_key("topk", field_of(&Params::topk), {}, defaults, "keys per query")};
  }
  template <class Number>
  static SavedTensors<Number> saved(const Params& params, const CallSizes<Number>& s) {
    return {{"top_keys", SavedKind::selection, {s.B, s.H, s.N, least(Number(params.topk), s.S)}},
            row_values("lse", s)};
  }
  static Decoding decoding(const Params&) { return Decoding::rows; }
};

}  // namespace

template <>
Descriptor describe<OracleTopParams>() {
  return make_descriptor<OracleTop>();
}

}  // namespace coterie
