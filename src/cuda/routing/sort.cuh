// SPDX-License-Identifier: MIT
// Runs of strict routing (RoutingRuns in stages.h): a team sorts one problem's pairs (row,
// cluster) by cluster. A block sorts its share in shared memory, kSortPairs at a time, and writes
// the runs from there: stores of single words to places far apart take several times as long.
#pragma once

#include "cuda/cluster/group.cuh"
#include "cuda/routing/stages.h"

namespace coterie::cuda {

constexpr int kSortPairs = 16384;

inline std::size_t sort_shared_bytes(int clusters, int warps) {
  return group_shared_bytes(clusters, warps) + kSortPairs * sizeof(std::uint16_t);
}

// Numbers of the teams' blocks: histograms_of's, and where a block's next pairs of a cluster go.
inline std::int64_t sort_numbers(const Teams& teams, int clusters) {
  return 3 * static_cast<std::int64_t>(teams.blocks()) * clusters;
}
__device__ inline std::int32_t* starts_of(std::int32_t* numbers, const Teams& teams, int clusters) {
  return numbers +
         (2 * static_cast<std::int64_t>(teams.count) * teams.size + blockIdx.x) * clusters;
}

// The problems of one side, and where their runs go.
struct SortProblems {
  ClusterShape shape;  // of rows
  const std::int32_t* clusters;
  int per_row;
  RoutingRuns runs, copy;
};

// From counts to places in the order of a chunk, by all threads of a block.
__device__ inline void place_clusters(const BlockCounts& counts) {
  int carry = 0;
  for (int first = 0; first < counts.clusters; first += blockDim.x) {
    const int c = first + static_cast<int>(threadIdx.x);
    const int slot = block_exclusive_scan(c < counts.clusters ? counts.total(c) : 0, carry);
    if (c < counts.clusters) counts.place(c, slot);
  }
  __syncthreads();
}

// Sorts the pairs of a chunk in shared memory, by all threads of a block; their counts are there.
__device__ inline void sort_chunk(const BlockCounts& counts, const RowRange& chunk,
                                  std::uint16_t* sorted) {
  place_clusters(counts);
  counts.fill(chunk, [&](int slot, int pair) {
    sorted[slot] = static_cast<std::uint16_t>(pair - chunk.begin);
  });
  __syncthreads();
}

// write(place, pair) for the pairs of a sorted chunk; `starts` are where the clusters' next ones
// go. Lanes know a cluster each, and write the pairs of one after the other together.
template <class Write>
__device__ void store_chunk(const BlockCounts& counts, const RowRange& chunk,
                            const std::uint16_t* sorted, std::int32_t* starts, const Write& write) {
  const int lane = threadIdx.x % 32, all = blockDim.x / 32, clusters = counts.clusters;
  const std::int32_t* ends = counts.last_counts();
  const int each = (clusters + all - 1) / all, first = static_cast<int>(threadIdx.x) / 32 * each;
  const int stop = min(first + each, clusters);
  for (int base = first; base < stop; base += 32) {
    const int c = base + lane;
    const int begin = c > 0 && c < stop ? ends[c - 1] : 0, end = c < stop ? ends[c] : 0;
    const int start = c < stop ? starts[c] : 0;
    if (c < stop) starts[c] = start + end - begin;
    for (int k = 0; k < min(32, stop - base); ++k) {
      const int from = __shfl_sync(~0u, begin, k), to = __shfl_sync(~0u, end, k);
      const int place = __shfl_sync(~0u, start, k) - from;
      for (int i = from + lane; i < to; i += 32) write(place + i, chunk.begin + sorted[i]);
    }
  }
}

// By all threads of the team's blocks; the clusters of this block's share of the rows were written
// by this block, or before. `shared` has sort_shared_bytes, the numbers are sort_numbers.
__device__ inline void sort_problem(const SortProblems& side, int number, Team& team,
                                    std::int32_t* histograms, std::int32_t* starts,
                                    std::int32_t* shared, int shared_words) {
  const ClusterShape& shape = side.shape;
  const int item = number / shape.heads, head = number % shape.heads, m = side.per_row;
  const int threads = static_cast<int>(blockDim.x), clusters = shape.clusters;
  const ItemSpan span = shape.q.span(item);
  const std::int64_t start = shape.start(span, head) * m;
  const std::int64_t first_list = static_cast<std::int64_t>(number) * (clusters + 1);
  const RowRange range = team.share(span.length * m);
  const GroupLists lists{side.clusters + start, side.runs.order + start,
                         side.runs.offsets + first_list, histograms, clusters};
  std::int32_t* copy = side.copy.order ? side.copy.order + start : nullptr;
  shared_words -= kSortPairs / 2;
  auto* sorted = reinterpret_cast<std::uint16_t*>(shared + shared_words);
  const BlockCounts counts(lists.labels, clusters, shared, shared_words);
  counts.count(range);
  find_starts(team, counts, lists, [&](int c, int slot) { starts[c] = slot; });
  for (int first = range.begin; first < range.end; first += kSortPairs) {
    const RowRange chunk{first, min(first + kSortPairs, range.end)};
    if (range.end - range.begin > kSortPairs) counts.count(chunk);
    sort_chunk(counts, chunk, sorted);
    store_chunk(counts, chunk, sorted, starts, [&](int place, int pair) {
      const int row = m > 1 ? pair / m : pair;
      lists.order[place] = row;
      if (copy) copy[place] = row;
    });
  }
  if (!shape.q.cu_seqlens || item + 1 == shape.items)
    for (int i = span.length * m + team.rank * threads + threadIdx.x;
         i < (shape.rows - span.begin) * m; i += team.size * threads) {
      lists.order[i] = -1;
      if (copy) copy[i] = -1;
    }
  if (copy && team.rank == 0)
    for (int c = threadIdx.x; c <= clusters; c += threads)
      side.copy.offsets[first_list + c] = lists.offsets[c];
}

}  // namespace coterie::cuda
