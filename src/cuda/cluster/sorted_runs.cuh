// SPDX-License-Identifier: MIT
// Stable counting sort of one problem's pairs (row, cluster) by cluster, by a team of blocks, for
// many pairs: a block sorts its share in shared memory, kSortPairs at a time, and writes the runs
// from there. Scattered stores of single words (group_rows in group.cuh) take several times as long
// at 64k rows, but less time at 4k.
//
// Called by all threads of the team's blocks. Shared memory: sort_shared_bytes, up to 128 KB:
// counters of the clusters for as many warps as fit into 96 KB, or into what the device has, and 32
// KB of sorted pairs.
#pragma once

#include "cuda/cluster/group.cuh"
#include "cuda/cluster/group.h"

namespace coterie::cuda {

constexpr int kSortPairs = 16384;

// `clusters` counts those of all sides.
inline std::size_t sort_shared_bytes(int clusters, int warps) {
  constexpr int kPairBytes = kSortPairs * static_cast<int>(sizeof(std::uint16_t));
  return group_shared_bytes(clusters, warps, kPairBytes) + kPairBytes;
}

// Turns counts into positions in the order of a chunk. Called by all threads of a block.
template <int kSides>
__device__ void place_clusters(const BlockCounts<kSides>& counts) {
  int carry = 0;
  for (int first = 0; first < counts.clusters; first += blockDim.x) {
    const int c = first + static_cast<int>(threadIdx.x);
    const int slot = block_exclusive_scan(c < counts.clusters ? counts.total(c) : 0, carry);
    if (c < counts.clusters) counts.place(c, slot);
  }
  __syncthreads();
}

// All lanes of a warp call write(cluster, first place, begin, end) for the pairs [begin, end) of a
// cluster in a sorted chunk, for clusters [first, first + count) of `ends`; `starts` says where
// their next pairs go. A lane reads the places of one cluster; a warp writes its pairs together.
template <class Write>
__device__ __forceinline__ void store_clusters(const std::int32_t* ends, int first, int count,
                                               std::int32_t* starts, const Write& write) {
  const int lane = static_cast<int>(threadIdx.x % 32u), warps = static_cast<int>(blockDim.x) / 32;
  const int each = (count + warps - 1) / warps;
  const int own = first + static_cast<int>(threadIdx.x) / 32 * each;
  const int stop = min(own + each, first + count);
  for (int base = own; base < stop; base += 32) {
    const int c = base + lane;
    const int begin = c > 0 && c < stop ? ends[c - 1] : 0, end = c < stop ? ends[c] : 0;
    const int start = c < stop ? starts[c] : 0;
    if (c < stop) starts[c] = start + end - begin;
    for (int k = 0; k < min(32, stop - base); ++k)
      write(base + k, __shfl_sync(~0u, start, k), __shfl_sync(~0u, begin, k),
            __shfl_sync(~0u, end, k));
  }
}

// Sorts this block's `range` of pairs; this block or an earlier kernel wrote their labels. start(c,
// slot, before) returns the place of the block's first pair of cluster c, see share_counts; it is
// also called for the end. write(place, pair) stores one pair. `starts` has a number per cluster:
// where the pairs of a chunk go while it is written. `shared` has sort_shared_bytes.
template <class Start, class Write>
__device__ void sort_pairs(Team& team, const std::int32_t* labels, int clusters,
                           const RowRange& range, std::int32_t* histograms, std::int32_t* starts,
                           std::int32_t* shared, int shared_words, const Start& start,
                           const Write& write) {
  const int room = shared_words - kSortPairs / 2, lane = static_cast<int>(threadIdx.x % 32u);
  auto* sorted = reinterpret_cast<std::uint16_t*>(shared + room);
  const BlockCounts<> counts({labels}, clusters, shared, room);
  counts.count(range);
  const int total = share_counts(team, counts, histograms, [&](int c, int slot, int before) {
    starts[c] = start(c, slot, before);
  });
  if (threadIdx.x == 0) start(clusters, total, 0);
  __syncthreads();
  for (int first = range.begin; first < range.end; first += kSortPairs) {
    const RowRange chunk{first, min(first + kSortPairs, range.end)};
    if (range.end - range.begin > kSortPairs) counts.count(chunk);
    place_clusters(counts);
    counts.fill(chunk, [&](int slot, int pair) {
      sorted[slot] = static_cast<std::uint16_t>(pair - chunk.begin);
    });
    __syncthreads();
    store_clusters(counts.last_counts(), 0, clusters, starts,
                   [&](int, int place, int begin, int end) {
                     for (int i = begin + lane; i < end; i += 32)
                       write(place - begin + i, chunk.begin + sorted[i]);
                   });
  }
}

// The sort of a problem of one side. numbers (3, blocks, clusters): two sets of histograms, then
// the `starts` of each block.
__device__ inline std::int32_t* starts_of(std::int32_t* numbers, const Teams& teams, int clusters) {
  return numbers +
         (2 * static_cast<std::int64_t>(teams.count) * teams.size + blockIdx.x) * clusters;
}
__device__ inline void sort_problem(const SortSide& side, int number, Team& team,
                                    std::int32_t* histograms, std::int32_t* starts,
                                    std::int32_t* shared, int shared_words) {
  const ClusterShape& shape = side.shape;
  const int item = number / shape.heads, head = number % shape.heads, m = side.per_row;
  const int threads = static_cast<int>(blockDim.x), clusters = shape.clusters;
  const ItemSpan span = shape.q.span(item);
  const std::int64_t start = shape.start(span, head) * m;
  const std::int64_t first_list = static_cast<std::int64_t>(number) * (clusters + 1);
  std::int32_t *order = side.runs.order + start, *offsets = side.runs.offsets + first_list;
  std::int32_t* copy = side.copy.order ? side.copy.order + start : nullptr;
  std::int32_t* offsets_copy = copy ? side.copy.offsets + first_list : nullptr;
  const auto offset = [&](int c, int slot) {
    if (team.rank != 0) return;
    offsets[c] = slot;
    if (copy) offsets_copy[c] = slot;
  };
  sort_pairs(
      team, side.labels + start, clusters, team.share(span.length * m), histograms, starts, shared,
      shared_words,
      [&](int c, int slot, int before) {
        offset(c, slot);
        return slot + before;
      },
      [&](int place, int pair) {
        const int row = m > 1 ? pair / m : pair;
        order[place] = row;
        if (copy) copy[place] = row;
      });
  if (!shape.q.cu_seqlens || item + 1 == shape.items)
    for (int i = span.length * m + team.rank * threads + threadIdx.x;
         i < (shape.rows - span.begin) * m; i += team.size * threads) {
      order[i] = -1;
      if (copy) copy[i] = -1;
    }
}

}  // namespace coterie::cuda
