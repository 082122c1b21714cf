// SPDX-License-Identifier: MIT
#include "core/check.h"
#include "core/descriptor.h"
#include "core/mechanisms/causal_form.h"

namespace coterie {
namespace {

// clustered and i-clustered: queries are clustered, keys are not.
struct QueryClusters : AllKeys {
  static constexpr bool kTakesMask = false, kRelativePositions = true;
  static constexpr RowForm kRows = RowForm::plain;
  static constexpr Positions kPositions = Positions::none;

  template <class Params>
  static std::vector<SpecKey> clustering_keys(const HeadGroup& defaults) {
    const auto field = [](auto member) {
      return [member](HeadGroup& group) {
        return &(std::get<Params>(group.mechanism).clustering.*member);
      };
    };
    return {integer_key("clusters", field(&ClusteringParams::clusters), {}, defaults,
                        "clusters of queries"),
            choice_key<Clustering>("clustering", field(&ClusteringParams::method),
                                   {{"keys", Clustering::keys},
                                    {"hamming-keys", Clustering::hamming_keys},
                                    {"hamming", Clustering::hamming}},
                                   "by the metric of the keys, hashes of key differences, or the "
                                   "published hashes"),
            integer_key("iterations", field(&ClusteringParams::iterations), {.min = 0}, defaults,
                        "centroid updates; automatic: 1 (keys), 3 (hamming-keys), 10 (hamming)"),
            integer_key("bits", field(&ClusteringParams::bits), {.max = 63}, defaults,
                        "hash length; only for hamming-keys and hamming"),
            bool_key("hash_bias", field(&ClusteringParams::hash_bias),
                     "random hash thresholds; only for hamming")};
  }
  static void settle_clustering(const char* op, ClusteringParams& params) {
    const ClusteringParams defaults;
    COTERIE_CHECK(params.method != Clustering::keys || params.bits == defaults.bits, op,
                  "bits needs clustering=hamming-keys or hamming; got bits=", params.bits,
                  " with clustering=keys");
    COTERIE_CHECK(params.method == Clustering::hamming || params.hash_bias == defaults.hash_bias,
                  op, "hash_bias=false needs clustering=hamming; got clustering=",
                  params.method == Clustering::keys ? "keys" : "hamming-keys");
    if (params.iterations != kAutomatic) return;
    switch (params.method) {
      case Clustering::keys:
        params.iterations = 1;
        break;
      case Clustering::hamming_keys:
        params.iterations = 3;
        break;
      case Clustering::hamming:
        params.iterations = 10;
        break;
    }
  }
  template <class Params>
  static SpecKey near_key(const HeadGroup& defaults) {
    return integer_key("near", field_of(&Params::near), {.min = 0}, defaults,
                       "block length: keys of the own block and its two neighbours are attended "
                       "exactly; 0: none");
  }
  template <class Params>
  static bool keys_are_queries(const Params&) {
    return false;
  }
  template <class Params>
  static bool self_attention(const Params& params) {
    return params.near > 0;
  }
  template <class Params>
  static Decoding decoding(const Params&) {
    return Decoding::none;
  }
  template <class Params, class Number>
  static StateTensors<Number> state(const Params&, const CallSizes<Number>&) {
    return {};
  }
  template <class Number>
  static SavedTensors<Number> groups(const ClusteringParams& params, const CallSizes<Number>& s) {
    return {{"labels", SavedKind::selection, {s.B, s.H, s.N}},
            {"order", SavedKind::selection, {s.B, s.H, s.N}},
            {"offsets", SavedKind::selection, {s.items, s.H, params.clusters + 1}}};
  }
  // With near keys, rows have one normaliser each; CUDA kernels also save the means' normalisers
  // and which heads are computed without them (src/cuda/clustered/near.h).
  template <class Number>
  static void add_centroids(const ClusteringParams& params, const CallSizes<Number>& s, bool near,
                            SavedTensors<Number>& saved) {
    saved.push_back({"centroids", SavedKind::value, {s.items, s.H, params.clusters, s.Dk}});
    if (near) saved.push_back(row_values("lse", s));
    if (near && !s.on_gpu) return;
    saved.push_back({"centroid_lse", SavedKind::value, {s.items, s.H, params.clusters}});
    if (near) saved.push_back({"cancels", SavedKind::count, {s.items, s.value_heads}});
  }
};

struct Clustered : QueryClusters {
  using Params = ClusteredParams;
  static constexpr const char *kName = "clustered",
                              *kSummary =
                                  "one attention row per cluster of queries; lengths only, not "
                                  "causal",
                              *kAttends = "all keys, with the logits of its cluster's mean";

  static std::vector<SpecKey> keys(const HeadGroup& defaults) {
    std::vector<SpecKey> all = clustering_keys<Params>(defaults);
    all.push_back(near_key<Params>(defaults));
    return all;
  }
  static Causality causality(const Params&, bool causal) { return refuse_causal(kName, causal); }
  static void settle(Params& params, Causality) { settle_clustering(kName, params.clustering); }
  template <class Number>
  static SavedTensors<Number> saved(const Params& params, const CallSizes<Number>& s) {
    SavedTensors<Number> all = groups(params.clustering, s);
    add_centroids(params.clustering, s, params.near > 0, all);
    if (params.near > 0) return all;
    const Number clusters = params.clustering.clusters;
    all.push_back({"centroid_out", SavedKind::value, {s.items, s.H, clusters, s.Dv}});
    return all;
  }
};

struct ImprovedClustered : QueryClusters {
  using Params = ImprovedClusteredParams;
  static constexpr const char *kName = "i-clustered",
                              *kSummary =
                                  "clustered, with the cluster's best keys attended exactly; "
                                  "lengths only",
                              *kAttends =
                                  "its cluster's `topk` best keys with its own logits, the rest "
                                  "as `clustered`";

  static std::vector<SpecKey> keys(const HeadGroup& defaults) {
    std::vector<SpecKey> all = clustering_keys<Params>(defaults);
    all.push_back(
        integer_key("topk", field_of(&Params::topk), {}, defaults, "exact keys per cluster"));
    all.push_back(bool_key("mass_grad", field_of(&Params::mass_grad),
                           "propagate gradients through the mass of the exact keys"));
    all.push_back(choice_key<Causality>("causal", field_of(&Params::causal),
                                        {{"none", Causality::none},
                                         {"reference", Causality::leaking},
                                         {"strict", Causality::strict}},
                                        "reference: its selection sees the future"));
    all.push_back(near_key<Params>(defaults));
    return all;
  }
  static Causality causality(const Params& params, bool causal) {
    const Causality form = chosen_form(kName, params.causal, causal);
    COTERIE_CHECK(form != Causality::strict, kName,
                  "causal=strict is not available yet; use causal=reference (its selection sees "
                  "the future) or routing(causal=strict)");
    return form;
  }
  static void settle(Params& params, Causality form) {
    settle_clustering(kName, params.clustering);
    params.causal = form;
    if (params.near == 0) return;
    COTERIE_CHECK(form == Causality::none, kName, "near=", params.near,
                  " has no causal form; use near=0 or inputs that are not causal");
    COTERIE_CHECK(params.mass_grad, kName, "mass_grad=false needs near=0; got near=", params.near,
                  ", which has one normaliser for all keys and no mass");
  }
  template <class Number>
  static SavedTensors<Number> saved(const Params& params, const CallSizes<Number>& s) {
    const Number clusters = params.clustering.clusters;
    SavedTensors<Number> all = groups(params.clustering, s);
    all.push_back({"top_keys",
                   SavedKind::selection,
                   {s.items, s.H, clusters, least(Number(params.topk), s.S)}});
    if (params.causal == Causality::none) {
      add_centroids(params.clustering, s, params.near > 0, all);
      if (params.near > 0) return all;
      all.push_back({"mass", SavedKind::value, {s.items, s.H, clusters}});
      all.push_back({"bottom", SavedKind::value, {s.items, s.H, clusters, s.Dv}});
    }
    all.push_back(row_values("lse", s));
    return all;
  }
};

}  // namespace

template <>
Descriptor describe<ClusteredParams>() {
  return make_descriptor<Clustered>();
}
template <>
Descriptor describe<ImprovedClusteredParams>() {
  return make_descriptor<ImprovedClustered>();
}

}  // namespace coterie
