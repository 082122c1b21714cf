// SPDX-License-Identifier: MIT
// Stable counting sort of one problem's pairs (row, cluster) by cluster, by a team of blocks, for
// many pairs: a block sorts its share in shared memory, kSortPairs at a time, and writes the runs
// from there. Stores of single words to places far apart (group_rows in group.cuh) take several
// times as long at 64k rows, and less time at 4k.
//
// By all threads of the team's blocks. Shared memory: sort_shared_bytes, up to 128 KB: counters of
// the clusters for as many warps as fit into 96 KB, and 32 KB of sorted pairs.
#pragma once

#include "cuda/cluster/group.cuh"
#include "cuda/cluster/group.h"

namespace coterie::cuda {

constexpr int kSortPairs = 16384;

// `clusters` of all sides.
inline std::size_t sort_shared_bytes(int clusters, int warps) {
  return group_shared_bytes(clusters, warps) + kSortPairs * sizeof(std::uint16_t);
}

// A chunk of a block's pairs, sorted in shared memory.
struct SortedChunk {
  const std::uint16_t* pairs;  // counted from the first of the chunk
  const std::int32_t* ends;    // of the clusters in it
  int begin;                   // its first pair
};

// Sorts this block's `range` of pairs, whose labels it wrote, or others before. start(c, slot,
// before) says where the block's first pair of cluster c goes, see share_counts, and is told the
// end of all; write(c, place, pair, sorted) stores one. `starts` has a number for each cluster:
// where the pairs of a chunk go while it is written. `shared` has sort_shared_bytes.
template <int kSides, class Start, class Write>
__device__ void sort_pairs(Team& team, const std::int32_t* const (&labels)[kSides], int clusters,
                           const RowRange& range, std::int32_t* histograms, std::int32_t* starts,
                           std::int32_t* shared, int shared_words, const Start& start,
                           const Write& write) {
  constexpr int kChunk = kSortPairs / kSides;
  const int room = shared_words - kSortPairs / 2, lane = static_cast<int>(threadIdx.x % 32u);
  auto* sorted = reinterpret_cast<std::uint16_t*>(shared + room);
  const BlockCounts<kSides> counts(labels, clusters, shared, room);
  const std::int32_t* ends = counts.last_counts();
  const int all = counts.clusters, warps = static_cast<int>(blockDim.x) / 32;
  const int each = (all + warps - 1) / warps, own = static_cast<int>(threadIdx.x) / 32 * each;
  counts.count(range);
  const int total = share_counts(team, counts, histograms, [&](int c, int slot, int before) {
    starts[c] = start(c, slot, before);
  });
  if (threadIdx.x == 0) start(all, total, 0);
  for (int first = range.begin; first < range.end; first += kChunk) {
    const RowRange chunk{first, min(first + kChunk, range.end)};
    if (range.end - range.begin > kChunk) counts.count(chunk);
    __syncthreads();
    int carry = 0;
    for (int base = 0; base < all; base += blockDim.x) {  // from counts to places
      const int c = base + static_cast<int>(threadIdx.x);
      const int slot = block_exclusive_scan(c < all ? counts.total(c) : 0, carry);
      if (c < all) counts.place(c, slot);
    }
    __syncthreads();
    counts.fill(chunk, [&](int slot, int pair) {
      sorted[slot] = static_cast<std::uint16_t>(pair - chunk.begin);
    });
    __syncthreads();
    // Lanes know a cluster each, and write the pairs of one after the other together.
    const int stop = min(own + each, all);
    for (int base = own; base < stop; base += 32) {
      const int c = base + lane;
      const int begin = c > 0 && c < stop ? ends[c - 1] : 0, end = c < stop ? ends[c] : 0;
      const int place = c < stop ? starts[c] - begin : 0;
      for (int k = 0; k < min(32, stop - base); ++k) {
        const int from = __shfl_sync(~0u, begin, k), to = __shfl_sync(~0u, end, k);
        const int target = __shfl_sync(~0u, place, k);
        for (int i = from + lane; i < to; i += 32)
          write(base + k, target + i, chunk.begin + sorted[i], SortedChunk{sorted, ends, first});
      }
    }
    if (chunk.end == range.end) break;
    __syncthreads();
    for (int c = threadIdx.x; c < all; c += blockDim.x)
      starts[c] += ends[c] - (c > 0 ? ends[c - 1] : 0);
  }
}

// The sort of a problem of one side. numbers (3, blocks, clusters): two sets of histograms, and
// `starts` of a block each.
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
  sort_pairs<1>(
      team, {side.labels + start}, clusters, team.share(span.length * m), histograms, starts,
      shared, shared_words,
      [&](int c, int slot, int before) {
        offset(c, slot);
        return slot + before;
      },
      [&](int, int place, int pair, const SortedChunk&) {
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
