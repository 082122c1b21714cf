// SPDX-License-Identifier: MIT
// Strict routing of tokens that follow those in the rings (coterie/routing.h).
#pragma once

#include <vector>

#include "core/call.h"
#include "coterie/routing.h"
#include "cpu/mechanisms/routing.h"

namespace coterie::cpu {

template <class T>
struct RoutingStepBuffers {
  RoutingRows<T> rows;
  SelectBuffers<T> select;
  T* values;  // (B, value heads, S, padded(Dv))

  RoutingStepBuffers(Arena& arena, const RoutingParams& params, const AttentionCall& call);
};

// Selects, attends, then adds the tokens to the rings. `selection` is memory for the selection
// tensors of attention_saved.
template <class T>
void routing_step(const RoutingParams& params, const AttentionCall& call,
                  const std::vector<TensorView>& selection, const RoutingRings& rings,
                  const TensorView& out, RoutingStepBuffers<T>& buffers);

}  // namespace coterie::cpu
