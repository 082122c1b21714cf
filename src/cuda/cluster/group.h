// SPDX-License-Identifier: MIT
// Stable counting sort of rows by cluster on the GPU (see coterie/group.h).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/arena.h"
#include "cuda/prim/team.cuh"

namespace coterie::cuda {

struct GroupRun {
  const std::int32_t* labels;     // (B, H, N), in [0, C) for rows of an item
  std::int32_t *order, *offsets;  // (B, H, N), -1 in padding; (items, H, C+1)
};

// Scratch memory comes from the arena; with one that only counts nothing is launched.
void group_by_label(const ClusterShape& shape, const GroupRun& run, Arena& arena,
                    cudaStream_t stream);

}  // namespace coterie::cuda
