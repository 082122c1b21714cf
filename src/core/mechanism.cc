// SPDX-License-Identifier: MIT
// Which parameters fit together, and what the automatic ones stand for.
#include "coterie/mechanism.h"

#include "core/check.h"
#include "core/spec_keys.h"

namespace coterie {
namespace {

// The form of a mechanism whose parameters name one.
Causality chosen_form(const char* op, Causality chosen, bool causal) {
  if (chosen == Causality::automatic) return causal ? Causality::strict : Causality::none;
  COTERIE_CHECK(!causal || chosen != Causality::none, op,
                "expected inputs that are not causal with causal=none; got causal inputs");
  return chosen;
}

Causality form_of(const ImprovedClusteredParams& params, bool causal) {
  const Causality form = chosen_form("i-clustered", params.causal, causal);
  COTERIE_CHECK(form != Causality::strict, "i-clustered",
                "causal=strict is not available yet; use causal=reference (its selection sees the "
                "future) or routing(causal=strict)");
  return form;
}

Causality form_of(const RoutingParams& params, bool causal) {
  return chosen_form("routing", params.causal, causal);
}

Causality form_of(const LshParams&, bool causal) {
  return causal ? Causality::leaking : Causality::none;
}

Causality refuse_causal(const char* op, bool causal) {
  COTERIE_CHECK(!causal, op, "expected inputs that are not causal, for it has no causal form; ",
                "got causal inputs");
  return Causality::none;
}

Causality form_of(const ClusteredParams&, bool causal) {
  return refuse_causal("clustered", causal);
}

Causality form_of(const CastParams&, bool causal) { return refuse_causal("cast", causal); }

// full, local, strided, oracle-top: positions decide, nothing is learnt from later tokens.
template <class Params>
Causality form_of(const Params&, bool causal) {
  return causal ? Causality::strict : Causality::none;
}

// settle: replaces automatic values and refuses those that would have no effect.

template <class Params>
void settle(Params&, Causality) {}

void settle(LocalParams& params, Causality) {
  COTERIE_CHECK(params.kind == LocalKind::blocked || params.flange == LocalParams{}.flange, "local",
                "expected flange only with kind=blocked; got flange=", params.flange,
                " with kind=sliding");
}

void settle_clustering(const char* op, ClusteringParams& params) {
  const ClusteringParams defaults;
  COTERIE_CHECK(params.method != Clustering::keys || params.bits == defaults.bits, op,
                "expected bits only with clustering=hamming-keys or hamming; got bits=",
                params.bits, " with clustering=keys");
  COTERIE_CHECK(params.method == Clustering::hamming || params.hash_bias == defaults.hash_bias, op,
                "expected hash_bias=false only with clustering=hamming; got another clustering");
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

void settle(ClusteredParams& params, Causality) {
  settle_clustering("clustered", params.clustering);
}

void settle(ImprovedClusteredParams& params, Causality form) {
  settle_clustering("i-clustered", params.clustering);
  params.causal = form;
}

void settle_membership(RoutingParams& params, Causality form) {
  const bool strict = form == Causality::strict;
  if (params.membership == Membership::automatic) {
    params.membership = strict ? Membership::nearest : Membership::top;
  }
  if (params.membership == Membership::balanced) {
    COTERIE_CHECK(form == Causality::none, "routing",
                  "expected no causality with membership=balanced, which has no causal form; "
                  "got causal=",
                  strict ? "strict" : "paper");
    COTERIE_CHECK(params.window == 0, "routing",
                  "expected no window with membership=balanced, whose clusters share the tokens "
                  "evenly; got window=",
                  params.window);
    return;
  }
  COTERIE_CHECK(!strict || params.membership == Membership::nearest, "routing",
                "expected membership=nearest with causal=strict; got membership=top");
  COTERIE_CHECK(strict || params.membership == Membership::top, "routing",
                "expected causal=strict with membership=nearest; got causal=",
                form == Causality::none ? "none" : "paper");
}

void settle(RoutingParams& params, Causality form) {
  const RoutingParams defaults;
  settle_membership(params, form);
  const bool strict = form == Causality::strict;
  COTERIE_CHECK(
      strict || params.queries_in == 1, "routing",
      "expected queries_in above 1 only with causal=strict; got queries_in=", params.queries_in);
  COTERIE_CHECK(strict || !params.include_self, "routing",
                "expected include_self only with causal=strict; got include_self=true");
  COTERIE_CHECK(!params.share_qk || !params.include_self, "routing",
                "expected include_self only without share_qk, where a query's own key is in its "
                "cluster anyway; got include_self=true with share_qk=true");
  COTERIE_CHECK(params.membership == Membership::top || params.count_eps == defaults.count_eps,
                "routing",
                "expected count_eps only with membership=top; got count_eps=", params.count_eps);
  if (params.self == SelfAttention::automatic) {
    params.self = params.share_qk ? SelfAttention::demote : SelfAttention::keep;
  }
  params.causal = form;
}

}  // namespace

const char* mechanism_name(const Mechanism& mechanism) {
  return spec_entry(mechanism).name.c_str();
}

bool keys_are_queries(const Mechanism& mechanism) {
  const auto* routing = std::get_if<RoutingParams>(&mechanism);
  return std::holds_alternative<LshParams>(mechanism) || (routing && routing->share_qk);
}

bool leaks_future(const Mechanism& mechanism, bool causal) {
  if (const auto* params = std::get_if<ImprovedClusteredParams>(&mechanism)) {
    return params->causal == Causality::leaking;
  }
  if (const auto* params = std::get_if<RoutingParams>(&mechanism)) {
    return params->causal == Causality::leaking;
  }
  return causal && std::holds_alternative<LshParams>(mechanism);
}

Causality resolve_causality(const Mechanism& mechanism, bool causal) {
  return std::visit([causal](const auto& params) { return form_of(params, causal); }, mechanism);
}

Mechanism resolve(const Mechanism& mechanism, bool causal) {
  check_values(mechanism_name(mechanism), {.mechanism = mechanism});
  const Causality form = resolve_causality(mechanism, causal);
  Mechanism resolved = mechanism;
  std::visit([form](auto& params) { settle(params, form); }, resolved);
  return resolved;
}

}  // namespace coterie
