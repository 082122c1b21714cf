// SPDX-License-Identifier: MIT
// The attention mechanisms: one of the parameters of params.h each.
#pragma once

#include <variant>

#include "coterie/params.h"

namespace coterie {

using Mechanism =
    std::variant<FullParams, LocalParams, StridedParams, OracleTopParams, ClusteredParams,
                 ImprovedClusteredParams, LshParams, RoutingParams, CastParams>;

// The mechanism's name in an attention spec: "full", "i-clustered", ...
const char* mechanism_name(const Mechanism& mechanism);

// Whether keys are taken from the queries: lsh, and routing with share_qk.
bool keys_are_queries(const Mechanism& mechanism);

// Whether, when used causally, the selection of a position depends on later positions.
bool leaks_future(const Mechanism& mechanism, bool causal);

// The causal form in force; throws when the mechanism has none that fits `causal`.
Causality resolve_causality(const Mechanism& mechanism, bool causal);

// Parameters with every `automatic` replaced by its value; throws Error when they contradict each
// other, the mechanism or `causal`.
Mechanism resolve(const Mechanism& mechanism, bool causal);

}  // namespace coterie
