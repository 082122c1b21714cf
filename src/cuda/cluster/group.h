// SPDX-License-Identifier: MIT
// Stable counting sort of rows by cluster on the GPU (see core/clustering.h).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/arena.h"
#include "cuda/prim/team.cuh"

namespace coterie::cuda {

// order (B, heads, rows * per_row), -1 in padding, and offsets (items, heads, C + 1): rows by
// cluster, then row.
struct SortedRuns {
  std::int32_t *order = nullptr, *offsets = nullptr;
};
// Rows that are in `per_row` clusters each.
struct SortSide {
  ClusterShape shape;
  const std::int32_t* labels;  // (B, heads, rows, per_row), in [0, C) for rows of an item
  int per_row = 1;
  SortedRuns runs, copy;  // copy is optional, with the same contents
};
// Sorts the rows of one side or two in one launch. Scratch memory comes from the arena; if it only
// counts, nothing is launched.
void sort_by_cluster(const SortSide& first, const SortSide* second, Arena& arena,
                     cudaStream_t stream);

// The output of a clustering: labels of the rows of all items and heads, and their stable sort.
struct ClusterLists {
  std::int32_t* labels = nullptr;   // (B, H, N), -1 in padding
  std::int32_t* order = nullptr;    // (B, H, N), -1 in padding
  std::int32_t* offsets = nullptr;  // (items, H, C+1)
};

// order and offsets of labels in [0, C).
inline void group_by_label(const ClusterShape& shape, const ClusterLists& run, Arena& arena,
                           cudaStream_t stream) {
  sort_by_cluster({shape, run.labels, 1, {run.order, run.offsets}, {}}, nullptr, arena, stream);
}

}  // namespace coterie::cuda
