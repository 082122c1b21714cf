// SPDX-License-Identifier: MIT
// How large the terms are that a result sums up: what cancellation cannot make smaller, and with it
// the accumulator's rounding errors that no implementation can avoid.
#pragma once

#include <vector>

#include "cases/problem.h"

namespace coterie::test {

// The largest root of the sum of squares of a result's terms (their rounding errors are
// independent). With W the weights of the selection, g the gradient of the output,
//   out: W v    dv: W^T g    dq: scale M k    dk: scale M^T q,    M_ij = W_ij (g_i . v_j - g_i .
//   o_i)
// where both terms of M count, and likewise for what else enters the logits. W counts |logit|
// or |lse| times where that is above 1: weights are recomputed as exp(logit - lse). Routing and LSH
// see normalised rows, which divides gradients by the rows' norms.
struct Magnitudes {
  double out = 0.0, dq = 0.0, dk = 0.0, dv = 0.0;
  double dcentroids = 0.0, dgate = 0.0, dlogit_scale = 0.0;
};
Magnitudes magnitudes(const Mechanism& mechanism, const AttentionInputs& inputs,
                      const std::vector<TensorView>& saved, const TensorView& grad_out);

}  // namespace coterie::test
