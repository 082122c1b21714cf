// SPDX-License-Identifier: MIT
#include <limits>

#include "core/check.h"
#include "core/descriptor.h"
#include "core/mechanisms/causal_form.h"

namespace coterie {
namespace {

struct Routing : AllKeys {
  using Params = RoutingParams;
  static constexpr const char *kName = "routing",
                              *kSummary =
                                  "tokens attend within clusters around learned centroids; "
                                  "lengths only",
                              *kAttends = "the tokens of its clusters";
  static constexpr bool kTakesMask = false, kRelativePositions = false;
  static constexpr RowForm kRows = RowForm::normalised;
  static constexpr Positions kPositions = Positions::none;

  static std::vector<SpecKey> keys(const HeadGroup& defaults) {
    constexpr double kUnbounded = std::numeric_limits<double>::max();
    SpecKey window = integer_key(
        "window", field_of(&Params::window), {}, defaults,
        "tokens per cluster (strict: latest tokens attended); not with membership=balanced");
    window.needed = [](const HeadGroup& group) {
      return std::get<Params>(group.mechanism).membership != Membership::balanced;
    };
    return {integer_key("clusters", field_of(&Params::clusters), {}, defaults, "centroids"),
            window,
            choice_key<Membership>("membership", field_of(&Params::membership),
                                   {{"top", Membership::top},
                                    {"balanced", Membership::balanced},
                                    {"nearest", Membership::nearest}},
                                   "automatic: nearest if strict, otherwise top"),
            choice_key<SharedKeys>("share_qk", field_of(&Params::share_qk),
                                   {{"true", SharedKeys::yes}, {"false", SharedKeys::no}},
                                   "use the queries as keys; automatic: in causal layers"),
            choice_key<Causality>("causal", field_of(&Params::causal),
                                  {{"none", Causality::none},
                                   {"paper", Causality::leaking},
                                   {"strict", Causality::strict}},
                                  "paper: its selection sees the future"),
            integer_key("queries_in", field_of(&Params::queries_in), {}, defaults,
                        "strict: clusters that a query attends to"),
            choice_key<SelfAttention>(
                "self", field_of(&Params::self),
                {{"demote", SelfAttention::demote}, {"keep", SelfAttention::keep}},
                "demote (default with share_qk): attend to the own key only if there is no other"),
            bool_key("include_self", field_of(&Params::include_self),
                     "strict without share_qk: a query also attends to its own key"),
            number_key("count_eps", field_of(&Params::count_eps), kUnbounded,
                       "top: outputs are divided by the token's number of clusters + count_eps"),
            number_key("decay", field_of(&Params::decay), 1.0,
                       "decay of the centroids' moving average"),
            number_key("commitment", field_of(&Params::commitment), kUnbounded,
                       "weight of the commitment loss")};
  }
  static bool keys_are_queries(const Params& params) { return params.shared(); }
  static bool self_attention(const Params& params) {
    return params.shared() || params.causal == Causality::strict;
  }
  static Causality causality(const Params& params, bool causal) {
    return chosen_form(kName, params.causal, causal);
  }

  static void settle_membership(Params& params, Causality form) {
    const bool strict = form == Causality::strict;
    if (params.membership == Membership::automatic)
      params.membership = strict ? Membership::nearest : Membership::top;
    if (params.membership == Membership::balanced) {
      COTERIE_CHECK(
          form == Causality::none, kName,
          "membership=balanced has no causal form; got causal=", strict ? "strict" : "paper");
      COTERIE_CHECK(params.window == 0, kName,
                    "membership=balanced takes no window, because clusters share the tokens "
                    "evenly; got window=",
                    params.window);
      return;
    }
    COTERIE_CHECK(!strict || params.membership == Membership::nearest, kName,
                  "causal=strict needs membership=nearest; got membership=top");
    COTERIE_CHECK(strict || params.membership == Membership::top, kName,
                  "membership=nearest needs causal=strict; got causal=",
                  form == Causality::none ? "none" : "paper");
  }
  static void settle(Params& params, Causality form) {
    settle_membership(params, form);
    if (params.share_qk == SharedKeys::automatic) params.share_qk = SharedKeys::no;
    const bool strict = form == Causality::strict;
    COTERIE_CHECK(strict || params.queries_in == 1, kName,
                  "queries_in above 1 needs causal=strict; got queries_in=", params.queries_in);
    COTERIE_CHECK(strict || !params.include_self, kName,
                  "include_self needs causal=strict; got include_self=true");
    COTERIE_CHECK(!params.shared() || !params.include_self, kName,
                  "include_self needs share_qk=false, because with share_qk a query's own key is "
                  "in its cluster already; got both");
    COTERIE_CHECK(params.membership == Membership::top || params.count_eps == Params{}.count_eps,
                  kName, "count_eps needs membership=top; got count_eps=", params.count_eps);
    if (params.self == SelfAttention::automatic)
      params.self = params.shared() ? SelfAttention::demote : SelfAttention::keep;
    params.causal = form;
  }
  static Decoding decoding(const Params& params) {
    return params.causal == Causality::strict ? Decoding::rings : Decoding::none;
  }

  template <class Number>
  static StateTensors<Number> state(const Params& params, const CallSizes<Number>& s) {
    return {
        {StateField::centroids, "centroids", true, false, {s.value_heads, params.clusters, s.Dk}},
        {StateField::logit_scale, "logit_scale", false, true, {s.H}}};
  }

  template <class Number>
  static SavedTensors<Number> saved(const Params& params, const CallSizes<Number>& s) {
    return params.membership == Membership::nearest ? saved_runs(params, s)
                                                    : saved_members(params, s);
  }
  // What GPU kernels compute once for both passes: mean and 1 / sigma of every row; how many keys
  // of its list a query slot sees. The CPU recomputes these.
  template <class Number>
  static void add_facts(const Params& params, const CallSizes<Number>& s,
                        const std::vector<Number>& slots, bool ends, SavedTensors<Number>& all) {
    all.push_back({"q_statistics", SavedKind::value, {s.B, s.H, s.N, 2}});
    if (!params.shared())
      all.push_back({"k_statistics", SavedKind::value, {s.B, s.key_heads, s.S, 2}});
    if (ends) all.push_back({"ends", SavedKind::count, slots});
  }
  template <class Number>
  static SavedTensors<Number> saved_runs(const Params& params, const CallSizes<Number>& s) {
    const std::int64_t in = std::min(params.queries_in, params.clusters);
    const std::vector<Number> slots{s.B, s.H, s.N * Number(in)}, keys{s.B, s.key_heads, s.S};
    const Number runs = params.clusters + 1;
    SavedTensors<Number> all{{"q_labels", SavedKind::selection, {s.B, s.H, s.N}}};
    if (!params.shared()) all.push_back({"k_labels", SavedKind::selection, keys});
    all.push_back({"q_order", SavedKind::selection, slots});
    all.push_back({"q_offsets", SavedKind::selection, {s.items, s.H, runs}});
    all.push_back({"k_order", SavedKind::selection, keys});
    all.push_back({"k_offsets", SavedKind::selection, {s.items, s.key_heads, runs}});
    all.push_back(row_values("lse", s));
    if (s.on_gpu) add_facts(params, s, slots, !params.shared() || in > 1, all);
    return all;
  }
  // On a GPU also the slots of every token in member lists, and its weight.
  template <class Number>
  static SavedTensors<Number> saved_members(const Params& params, const CallSizes<Number>& s) {
    const Number clusters = params.clusters;
    const auto width = [&](const Number& rows) {
      const bool balanced = params.membership == Membership::balanced;
      return balanced ? (rows + Number(params.clusters - 1)) / clusters
                      : least(Number(params.window), rows);
    };
    const std::vector<Number> q_slots{s.items, s.H, clusters, width(s.N)},
        k_slots{s.items, s.key_heads, clusters, width(s.S)};
    SavedTensors<Number> all{{"q_members", SavedKind::selection, q_slots}};
    if (!params.shared()) all.push_back({"k_members", SavedKind::selection, k_slots});
    all.push_back({"member_lse", SavedKind::value, q_slots});
    if (!s.on_gpu) return all;
    add_facts(params, s, q_slots, params.causal != Causality::none && !params.shared(), all);
    const std::vector<Number> queries{s.B, s.H, s.N}, keys{s.B, s.key_heads, s.S};
    all.push_back({"q_first", SavedKind::count, queries});
    all.push_back({"q_count", SavedKind::count, queries});
    all.push_back({"q_slots", SavedKind::count, q_slots});
    if (!params.shared()) {
      all.push_back({"k_first", SavedKind::count, keys});
      all.push_back({"k_count", SavedKind::count, keys});
      all.push_back({"k_slots", SavedKind::count, k_slots});
    }
    all.push_back(row_values("weights", s));
    return all;
  }
};

}  // namespace

template <>
Descriptor describe<RoutingParams>() {
  return make_descriptor<Routing>();
}

}  // namespace coterie
