// SPDX-License-Identifier: MIT
// The attention mechanisms. Each is a parameter struct of params.h.
#pragma once

#include <cstdint>
#include <string>
#include <variant>

#include "coterie/params.h"

namespace coterie {

using Mechanism =
    std::variant<FullParams, LocalParams, StridedParams, OracleTopParams, ClusteredParams,
                 ImprovedClusteredParams, LshParams, RoutingParams, CastParams>;

// The mechanism's name in an attention spec: "full", "i-clustered", ...
const char* mechanism_name(const Mechanism& mechanism);

// Whether masks are supported. They are not where the queries of a cluster share their keys.
bool takes_mask(const Mechanism& mechanism);

// How rows are transformed before the dot products: not at all; keys get unit length (lsh); queries
// and keys get zero mean and unit variance (routing).
enum class RowForm : std::uint8_t { plain, unit_keys, normalised };
RowForm row_form(const Mechanism& mechanism);

// What a layer caches to decode one position at a time: nothing, because there is no exact causal
// form; all earlier rows; the latest rows; a ring of the latest keys of each cluster.
enum class Decoding : std::uint8_t { none, rows, window, rings };
Decoding decoding(const Mechanism& mechanism, bool causal);

// Keys that a query at `position` may attend to: positions first, first + stride, ... up to its
// own. For Decoding::rows and Decoding::window.
struct KeyPattern {
  std::int64_t first = 0, stride = 1;
};
KeyPattern key_pattern(const Mechanism& mechanism, std::int64_t position);

// Whether keys are taken from the queries: lsh, and routing with share_qk.
bool keys_are_queries(const Mechanism& mechanism);

// Whether all heads share one selection: cast, unless heads=separate. Calls on some of the heads
// then need the selection of a call on all.
bool selects_together(const Mechanism& mechanism);

// Whether, when used causally, the selection of a position depends on later positions.
bool leaks_future(const Mechanism& mechanism, bool causal);

// The causal form in force; throws when the mechanism has none that fits `causal`.
Causality resolve_causality(const Mechanism& mechanism, bool causal);

// Parameters with every `automatic` replaced by its value; throws Error when they contradict each
// other, the mechanism or `causal`.
Mechanism resolve(const Mechanism& mechanism, bool causal);

// Properties of a mechanism after resolve as lines of key=value, for callers in other languages:
// name, causality (none, strict, leaking), keys_are_queries, selects_together, takes_mask, rows;
// key.NAME: the keys of the spec; saved.cpu.NAME and saved.cuda.NAME: kind (selection, count,
// value) and sizes of what a forward pass saves; state.NAME: required or optional, and sizes. Sizes
// are in postfix notation over B, H, N, S, Dk, Dv, key_heads, value_heads and items: "32 S min".
std::string mechanism_facts(const Mechanism& mechanism, bool causal);

}  // namespace coterie
