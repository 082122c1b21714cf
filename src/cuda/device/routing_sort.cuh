// SPDX-License-Identifier: MIT
// Runs of strict routing (RoutingRuns in routing.h): a team sorts one problem's rows by cluster.
#pragma once

#include "cuda/device/group.cuh"
#include "cuda/routing.h"

namespace coterie::cuda {

// The problems of one side, and where their runs go.
struct SortProblems {
  ClusterShape shape;  // of rows
  const std::int32_t* clusters;
  int per_row;
  RoutingRuns runs, copy;
};

// By all threads of the team's blocks; the clusters of this block's share of the rows were written
// by this block, or before. `shared` has room for shared_words >= clusters.
__device__ inline void sort_problem(const SortProblems& side, int number, Team& team,
                                    std::int32_t* histograms, std::int32_t* shared,
                                    int shared_words) {
  const ClusterShape& shape = side.shape;
  const int item = number / shape.heads, head = number % shape.heads, m = side.per_row;
  const int threads = static_cast<int>(blockDim.x);
  const ItemSpan span = shape.q.span(item);
  const std::int64_t start = shape.start(span, head) * m;
  const std::int64_t starts = static_cast<std::int64_t>(number) * (shape.clusters + 1);
  std::int32_t* order = side.runs.order + start;
  const RowRange range = team.share(span.length * m);
  group_rows(team, range,
             {side.clusters + start, order, side.runs.offsets + starts, histograms, shape.clusters},
             shared, shared_words);
  if (!shape.q.cu_seqlens || item + 1 == shape.items)
    for (int i = span.length * m + team.rank * threads + threadIdx.x;
         i < (shape.rows - span.begin) * m; i += team.size * threads) {
      order[i] = -1;
      if (side.copy.order) side.copy.order[start + i] = -1;
    }
  if (m == 1 && !side.copy.order) return;
  team.sync();
  for (int i = range.begin + threadIdx.x; i < range.end; i += threads) {
    if (m > 1) order[i] /= m;
    if (side.copy.order) side.copy.order[start + i] = order[i];
  }
  if (side.copy.order && team.rank == 0)
    for (int c = threadIdx.x; c <= shape.clusters; c += threads)
      side.copy.offsets[starts + c] = side.runs.offsets[starts + c];
}

}  // namespace coterie::cuda
