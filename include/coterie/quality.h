// SPDX-License-Identifier: MIT
// How close a forward pass comes to full attention over the same logits, on a sample of its rows;
// in double precision, on the CPU.
//
// The logits are the mechanism's: of normalised rows for routing, of unit keys for lsh. A query's
// own key is left out if the mechanism demotes it and there is another.
#pragma once

#include <cstdint>
#include <vector>

#include "coterie/inputs.h"
#include "coterie/mechanism.h"
#include "coterie/result.h"

namespace coterie {

// Values (B, H, R) of R sampled rows, dense; 0 for rows that are in no item.
struct AttentionQuality {
  std::int64_t rows = 0;      // R
  std::vector<double> error;  // norm of the difference from full attention's row
  std::vector<double> norm;   // of full attention's row

  // The share of full attention's weight on keys that the mechanism attends to individually; NaN
  // for rows without keys. Empty if it attends to no individual keys (clustered without near) or to
  // the same key several times (lsh).
  std::vector<double> mass;
  // An upper bound of the error, rounding included: the distance of the weights from those of full
  // attention, key by key times the distance of its value from the mean value (clustered,
  // i-clustered), or from the mass (full, local, strided, oracle-top, strict routing). It needs all
  // logits of a row, half of the work of full attention. Empty for the others.
  std::vector<double> bound;
};

// Samples up to `rows` rows of each batch entry, evenly spaced among the valid ones. `result` is
// that of attention_forward. Tensors are on the CPU; `from_gpu` says that `result` was computed on
// a GPU, which saves more and rounds products of f32 differently. A pass with dropout is refused.
AttentionQuality attention_quality(const Mechanism& mechanism, const AttentionInputs& inputs,
                                   const AttentionResult& result, std::int64_t rows,
                                   bool from_gpu = false);

// The weights (B, H, N, S) of full attention, dense; 0 outside of items.
std::vector<double> full_attention_weights(const Mechanism& mechanism,
                                           const AttentionInputs& inputs);

}  // namespace coterie
