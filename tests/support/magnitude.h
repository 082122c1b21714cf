// SPDX-License-Identifier: MIT
// How large the terms are that a result sums up: what cancellation cannot make smaller, and with it
// the accumulator's rounding errors that no implementation can avoid.
#pragma once

#include <vector>

#include "cases/problem.h"

namespace coterie::test {

// For each result the largest sum of absolute values of its terms, with W the weights of the
// selection, and M_ij = W_ij (|g_i| . |v_j| + |g_i| . (W |v|)_i) the two terms of ds_ij:
// out: W |v|;  dv: W^T |g|;  dq: scale M |k|;  dk: scale M^T |q|;  and likewise for what else
// enters the logits. Routing and LSH see normalised rows, which divides by the rows' norms.
struct Magnitudes {
  double out = 0.0, dq = 0.0, dk = 0.0, dv = 0.0;
  double dcentroids = 0.0, dgate = 0.0, dlogit_scale = 0.0;
};
Magnitudes magnitudes(const Mechanism& mechanism, const AttentionInputs& inputs,
                      const std::vector<TensorView>& saved, const TensorView& grad_out);

}  // namespace coterie::test
