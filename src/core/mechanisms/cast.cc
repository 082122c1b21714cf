// SPDX-License-Identifier: MIT
#include "core/descriptor.h"
#include "core/mechanisms/causal_form.h"

namespace coterie {
namespace {

struct Cast : AllKeys {
  using Params = CastParams;
  static constexpr const char *kName = "cast",
                              *kSummary =
                                  "clusters around surrogate tokens, with summaries between them; "
                                  "lengths only, not causal",
                              *kAttends =
                                  "the tokens of its clusters, and one summary of each other "
                                  "cluster";
  static constexpr bool kTakesMask = false, kRelativePositions = false;
  static constexpr RowForm kRows = RowForm::plain;
  static constexpr Positions kPositions = Positions::none;

  static std::vector<SpecKey> keys(const HeadGroup& defaults) {
    return {
        integer_key("clusters", field_of(&Params::clusters), {}, defaults, "surrogate tokens"),
        integer_key("size", field_of(&Params::size), {}, defaults, "tokens per cluster"),
        choice_key<CastMode>("mode", field_of(&Params::mode),
                             {{"topk", CastMode::topk}, {"single", CastMode::single}},
                             "topk: a token may be in several clusters; single: in exactly one"),
        choice_key<CastActivation>(
            "activation", field_of(&Params::activation),
            {{"softmax", CastActivation::softmax}, {"laplace", CastActivation::laplace}},
            "attention function"),
        choice_key<bool>("heads", field_of(&Params::share_heads),
                         {{"shared", true}, {"separate", false}},
                         "one clustering for all heads, or one per head"),
        bool_key("gate_scale", field_of(&Params::gate_scale), "scale affinities by the gate")};
  }
  static bool keys_are_queries(const Params&) { return false; }
  static bool self_attention(const Params&) { return true; }
  static bool selects_together(const Params& params) { return params.share_heads; }
  static Causality causality(const Params&, bool causal) { return refuse_causal(kName, causal); }
  static void settle(Params&, Causality) {}
  static Decoding decoding(const Params&) { return Decoding::none; }

  template <class Number>
  static StateTensors<Number> state(const Params& params, const CallSizes<Number>& s) {
    return {{StateField::centroids,
             "centroids (surrogate tokens)",
             true,
             true,
             {s.H, params.clusters, s.Dk}},
            {StateField::gate, "gate", true, true, {s.B, s.N}}};
  }
  template <class Number>
  static SavedTensors<Number> saved(const Params& params, const CallSizes<Number>& s) {
    const Number clusters = params.clusters;
    Number size = params.size;
    // With `single` every token needs a slot: clusters have at least ceil(N / C) of them.
    if (params.mode == CastMode::single)
      size = most(size, (s.N + Number(params.clusters - 1)) / clusters);
    size = least(size, s.N);
    const Number heads = params.share_heads ? Number(1) : s.H;
    const bool softmax = params.activation == CastActivation::softmax;
    SavedTensors<Number> all{{"members", SavedKind::selection, {s.items, heads, clusters, size}}};
    if (softmax) all.push_back({"member_lse", SavedKind::value, {s.items, s.H, clusters, size}});
    all.push_back({"summary", SavedKind::value, {s.items, s.H, clusters, s.Dv}});
    if (softmax) {
      all.push_back({"summary_lse", SavedKind::value, {s.items, s.H, clusters}});
      all.push_back(row_values("combine_lse", s));
    }
    return all;
  }
};

}  // namespace

template <>
Descriptor describe<CastParams>() {
  return make_descriptor<Cast>();
}

}  // namespace coterie
