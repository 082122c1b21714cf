// SPDX-License-Identifier: MIT
// Sizes of the terms that a result sums. Cancellation does not reduce them, so they determine the
// accumulator's unavoidable rounding errors.
#pragma once

#include <vector>

#include "cases/problem.h"

namespace coterie::test {

// The largest root of the sum of squares of an element's terms (their rounding errors are
// independent). With W the weights of the selection and g the gradient of the output,
//   out: W v    dv: W^T g    dq: scale M k    dk: scale M^T q
//   M_ij = W_ij (g_i . v_j - g_i . o_i)
// where both terms of M count, and likewise for other inputs of the logits. W is multiplied by
// |logit| or |lse| where that is above 1, because weights are recomputed as exp(logit - lse).
// Routing and LSH normalise rows, which divides gradients by the rows' norms.
struct Magnitudes {
  double out = 0.0, dq = 0.0, dk = 0.0, dv = 0.0;
  double dcentroids = 0.0, dgate = 0.0, dlogit_scale = 0.0;
};
Magnitudes magnitudes(const Mechanism& mechanism, const AttentionInputs& inputs,
                      const std::vector<TensorView>& saved, const TensorView& grad_out);

}  // namespace coterie::test
