// SPDX-License-Identifier: MIT
// Stable counting sort of tokens by cluster.
#pragma once

#include <cstdint>

namespace coterie::cpu {

// order[slot] = token, sorted by (label, token); cluster c is slots [offsets[c], offsets[c+1]).
// Labels lie in [0, clusters).
void group_rows(const std::int32_t* labels, std::int64_t count, std::int64_t clusters,
                std::int32_t* order, std::int32_t* offsets);

}  // namespace coterie::cpu
