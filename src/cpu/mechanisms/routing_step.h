// SPDX-License-Identifier: MIT
// Strict routing one position at a time (coterie/routing.h).
#pragma once

#include <vector>

#include "core/call.h"
#include "coterie/routing.h"
#include "cpu/mechanisms/routing.h"

namespace coterie::cpu {

// `selection` is that of the call, which has one token.
template <class T>
void routing_step(const RoutingParams& params, const AttentionCall& call,
                  const std::vector<TensorView>& selection, const RoutingRings& rings,
                  const TensorView& out, RoutingRows<T>& rows);

}  // namespace coterie::cpu
