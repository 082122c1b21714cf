// SPDX-License-Identifier: MIT
#include "core/descriptor.h"

namespace coterie {
namespace {

struct Lsh : AllKeys {
  using Params = LshParams;
  static constexpr const char *kName = "lsh",
                              *kSummary =
                                  "Reformer: chunks of tokens sorted by hash, shared queries and "
                                  "keys; lengths only, causal form sees the future",
                              *kAttends =
                                  "its own and the previous chunk in the order of random hash "
                                  "buckets";
  static constexpr bool kTakesMask = false, kRelativePositions = false;
  static constexpr RowForm kRows = RowForm::unit_keys;
  static constexpr Positions kPositions = Positions::none;

  static std::vector<SpecKey> keys(const HeadGroup& defaults) {
    return {integer_key("rounds", field_of(&Params::rounds), {}, defaults, "hash rounds"),
            integer_key("chunk", field_of(&Params::chunk), {}, defaults, "tokens per chunk"),
            integer_key("buckets", field_of(&Params::buckets),
                        {.min = 2, .max = kMaxCount - 1, .multiple = 2}, defaults,
                        "hash values per round"),
            choice_key<LshCombine>("combine", field_of(&Params::combine),
                                   {{"lse", LshCombine::lse}, {"mean", LshCombine::mean}},
                                   "lse: one softmax over all rounds; mean: mean of the rounds")};
  }
  static bool keys_are_queries(const Params&) { return true; }
  static bool self_attention(const Params&) { return true; }
  static Causality causality(const Params&, bool causal) {
    return causal ? Causality::leaking : Causality::none;
  }
  static void settle(Params&, Causality) {}
  static Decoding decoding(const Params&) { return Decoding::none; }
  template <class Number>
  static SavedTensors<Number> saved(const Params& params, const CallSizes<Number>& s) {
    const std::vector<Number> rounds{s.B, s.H, params.rounds, s.N};
    SavedTensors<Number> all{{"order", SavedKind::selection, rounds}};
    if (params.combine == LshCombine::lse)
      all.push_back(row_values("lse", s));
    else
      all.push_back({"round_lse", SavedKind::value, rounds});
    return all;
  }
  template <class Number>
  static StateTensors<Number> state(const Params&, const CallSizes<Number>&) {
    return {};
  }
};

}  // namespace

template <>
Descriptor describe<LshParams>() {
  return make_descriptor<Lsh>();
}

}  // namespace coterie
