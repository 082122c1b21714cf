// SPDX-License-Identifier: MIT
// Locality-sensitive codes: bit r of a row x is [plane_r . x > threshold_r]. Tensors are on the
// CPU; on a GPU whole mechanisms run (attention.h).
#pragma once

#include <cstdint>

#include "coterie/attention.h"
#include "coterie/tensor.h"

namespace coterie {

constexpr std::int64_t kMaxHashBits = 63;

// Published form: planes (1, 1, bits, D) f32 with normal entries rounded to bf16, thresholds
// (1, 1, bits) f32 normal, or 0 without `bias`. The same for all items and heads.
void isotropic_planes(std::uint64_t seed, bool bias, const TensorView& planes,
                      const TensorView& thresholds, const Workspace& workspace = {});

// Key-aware form: plane r of an item and key/value head is the sum of 16 differences of random
// pairs of its valid keys, planes (items, Hkv, bits, D) f32; threshold r of a query head is plane_r
// . mean valid query, thresholds (items, H, bits) f32. An item without keys or queries gets zeros.
void key_difference_planes(const AttentionInputs& inputs, const TensorView& planes,
                           const TensorView& thresholds, const Workspace& workspace = {});

// codes (B, H, N) u64 of x (B, H, N, D); 0 for padded rows. planes and thresholds as above, with
// size 1 meaning "the same for all". A NaN row gets code 0.
void hash_codes(const TensorView& x, const Sequences& sequences, const TensorView& planes,
                const TensorView& thresholds, const TensorView& codes,
                const Workspace& workspace = {});

}  // namespace coterie
