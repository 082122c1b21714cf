// SPDX-License-Identifier: MIT
// Clustering types shared by the back ends, the reference and ops.
#pragma once

#include <cstdint>

#include "coterie/params.h"
#include "coterie/view.h"

namespace coterie {

constexpr std::int64_t kMaxHashBits = 63;

struct HammingKMeansParams {
  std::int64_t iterations = 10;    // centroid updates; one more assignment follows
  std::int64_t bits = kAutomatic;  // code length, for re-seeding empty clusters; 63 by default
  std::uint64_t seed = 0;
};

// Tokens sorted by cluster: each cluster is a contiguous run in position order. Indices count from
// the start of the item (all int32).
struct Groups {
  TensorView order;    // (B, H, N): slot -> token; -1 in padding
  TensorView inverse;  // (B, H, N): token -> slot; -1 in padding; may be absent
  TensorView offsets;  // (items, H, C+1): cluster c is slots [offsets[c], offsets[c+1])
};

}  // namespace coterie
