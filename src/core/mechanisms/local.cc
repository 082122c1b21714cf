// SPDX-License-Identifier: MIT
#include "core/check.h"
#include "core/descriptor.h"

namespace coterie {
namespace {

struct Local : ExactMechanism {
  using Params = LocalParams;
  static constexpr const char *kName = "local",
                              *kSummary = "attention to nearby positions; any mask, causal or not",
                              *kAttends =
                                  "keys i-⌊w/2⌋ … i+⌈w/2⌉-1 (causal: the w keys up to its own "
                                  "position); `blocked`: its block of w positions and `flange` "
                                  "blocks on each side";
  static constexpr Positions kPositions = Positions::rotary;

  static std::vector<SpecKey> keys(const HeadGroup& defaults) {
    return {
        integer_key("window", field_of(&Params::window), {}, defaults,
                    "keys in the window or block"),
        choice_key<LocalKind>("kind", field_of(&Params::kind),
                              {{"sliding", LocalKind::sliding}, {"blocked", LocalKind::blocked}},
                              "sliding: a window around each query; blocked: fixed blocks"),
        integer_key("flange", field_of(&Params::flange), {.min = 0}, defaults,
                    "blocked: neighbouring blocks attended on each side")};
  }
  static void settle(Params& params, Causality) {
    COTERIE_CHECK(params.kind == LocalKind::blocked || params.flange == Params{}.flange, kName,
                  "flange needs kind=blocked; got flange=", params.flange, " with kind=sliding");
  }
  static Decoding decoding(const Params&) { return Decoding::window; }
  static KeyPattern key_pattern(const Params& params, std::int64_t position) {
    const std::int64_t first = params.kind == LocalKind::sliding
                                   ? position - params.window + 1
                                   : (position / params.window - params.flange) * params.window;
    return {std::max<std::int64_t>(0, first), 1};
  }
};

}  // namespace

template <>
Descriptor describe<LocalParams>() {
  return make_descriptor<Local>();
}

}  // namespace coterie
