// SPDX-License-Identifier: MIT
#include "cpu/cluster/group.h"

#include <algorithm>

namespace coterie::cpu {

void group_rows(const std::int32_t* labels, std::int64_t count, std::int64_t clusters,
                std::int32_t* order, std::int32_t* offsets) {
  std::fill_n(offsets, clusters + 1, 0);
  for (std::int64_t i = 0; i < count; ++i) ++offsets[labels[i] + 1];
  for (std::int64_t c = 0; c < clusters; ++c) offsets[c + 1] += offsets[c];
  // Filling moves each cluster's start to its end, which is the next start; then all shift back by
  // one.
  for (std::int64_t i = 0; i < count; ++i)
    order[offsets[labels[i]]++] = static_cast<std::int32_t>(i);
  for (std::int64_t c = clusters; c > 0; --c) offsets[c] = offsets[c - 1];
  offsets[0] = 0;
}

}  // namespace coterie::cpu
