// SPDX-License-Identifier: MIT
// Causal forms of mechanisms with a key `causal`, and of those that have none.
#pragma once

#include "core/check.h"
#include "coterie/params.h"

namespace coterie {

inline Causality chosen_form(const char* op, Causality chosen, bool causal) {
  if (chosen == Causality::automatic) return causal ? Causality::strict : Causality::none;
  COTERIE_CHECK(!causal || chosen != Causality::none, op,
                "causal=none takes inputs that are not causal; got causal inputs");
  return chosen;
}

inline Causality refuse_causal(const char* op, bool causal) {
  COTERIE_CHECK(!causal, op, "there is no causal form; got causal inputs");
  return Causality::none;
}

}  // namespace coterie
