// SPDX-License-Identifier: MIT
// Runs of queries and of keys of equal lengths, sorted together by a team (routing_sort.cuh), and
// how many keys of its cluster a query sees: those that are not after it. Both are counted in the
// order of their positions, so what a query sees is known where it is placed.
#pragma once

#include "cuda/device/routing_sort.cuh"

namespace coterie::cuda {

constexpr int kTwinRows = kSortPairs / 2;  // of either side, that are sorted at a time

// Counters of queries, then of keys; rows in order; and what queries see.
inline std::size_t twin_shared_bytes(int clusters, int warps) {
  return group_shared_bytes(2 * clusters, warps) + (kSortPairs + kTwinRows) * sizeof(std::uint16_t);
}

// Numbers of a block, C of each: two sets of histograms of both sides, where the next queries and
// keys of a cluster go, and how many keys of it there are before.
constexpr int kTwinNumbers = 7;

struct TwinLists {
  const std::int32_t *q_labels, *k_labels;
  RoutingRuns q, k;
  std::int32_t* ends;  // by query slot
  int clusters;
};

struct TwinShared {
  BlockCounts counts;    // of clusters of queries, then of keys
  std::uint16_t* rows;   // in order
  std::uint16_t* sight;  // of queries: place behind the last key in sight
};

// This warp's rows of a chunk: visit(first, parts, q labels, k labels) for up to kLabelBatch parts
// of 32 rows at a time.
template <class Visit>
__device__ __forceinline__ void for_twins(const TwinLists& lists, const BlockCounts& counts,
                                          const RowRange& chunk, const Visit& visit) {
  const RowRange mine = counts.own(chunk);
  for (int first = mine.begin; first < mine.end; first += 32 * kLabelBatch) {
    int q[kLabelBatch], k[kLabelBatch];
    load_labels(lists.q_labels, first, mine.end, q);
    load_labels(lists.k_labels, first, mine.end, k);
    visit(first, uniform_trips((mine.end - first + 31) / 32), q, k);
  }
}

__device__ inline void count_twins(const TwinLists& lists, const BlockCounts& counts,
                                   const RowRange& chunk) {
  counts.clear();
  std::int32_t* count = counts.own_counts();
  for_twins(lists, counts, chunk,
            [&](int, int, const int(&q)[kLabelBatch], const int(&k)[kLabelBatch]) {
#pragma unroll
              for (int i = 0; i < kLabelBatch; ++i)
                if (q[i] >= 0) {
                  atomicAdd(&count[q[i]], 1);
                  atomicAdd(&count[lists.clusters + k[i]], 1);
                }
            });
  __syncthreads();
}

// Lanes whose label is this lane's: queries and keys among themselves, and keys like this query.
struct TwinLanes {
  unsigned q, k, cross;
};
__device__ __forceinline__ void find_twin_lanes(const int (&q)[kLabelBatch],
                                                const int (&k)[kLabelBatch], int parts, int bits,
                                                TwinLanes (&lanes)[kLabelBatch]) {
#pragma unroll
  for (int i = 0; i < kLabelBatch; ++i) {
    const unsigned there = __ballot_sync(~0u, q[i] >= 0);
    lanes[i] = {there, there, there};
  }
  for (int bit = 0; bit < bits; ++bit)
#pragma unroll
    for (int i = 0; i < kLabelBatch; ++i) {
      if (i >= parts) break;
      const bool q_set = q[i] >> bit & 1, k_set = k[i] >> bit & 1;
      const unsigned q_lanes = __ballot_sync(~0u, q_set), k_lanes = __ballot_sync(~0u, k_set);
      lanes[i].q &= q_set ? q_lanes : ~q_lanes;
      lanes[i].k &= k_set ? k_lanes : ~k_lanes;
      lanes[i].cross &= q_set ? k_lanes : ~k_lanes;
    }
}

// Sorts a chunk in shared memory, whose counts are there.
__device__ inline void sort_twins(const TwinLists& lists, const TwinShared& shared,
                                  const RowRange& chunk) {
  place_clusters(shared.counts);
  const int lane = static_cast<int>(threadIdx.x % 32u), clusters = lists.clusters;
  const unsigned below = (1u << lane) - 1;
  const int bits = 32 - __clz(clusters - 1);
  std::int32_t* slots = shared.counts.own_counts();
  for_twins(lists, shared.counts, chunk,
            [&](int first, int parts, const int(&q)[kLabelBatch], const int(&k)[kLabelBatch]) {
              TwinLanes lanes[kLabelBatch];
              find_twin_lanes(q, k, parts, bits, lanes);
#pragma unroll
              for (int i = 0; i < kLabelBatch; ++i) {
                if (i >= parts) break;
                const bool in = q[i] >= 0;
                int q_slot = 0, k_slot = 0, seen = 0;
                if (in) {
                  q_slot = slots[q[i]];
                  k_slot = slots[clusters + k[i]];
                  seen = slots[clusters + q[i]];
                }
                __syncwarp();
                if (in && (lanes[i].q & below) == 0) slots[q[i]] = q_slot + __popc(lanes[i].q);
                if (in && (lanes[i].k & below) == 0)
                  slots[clusters + k[i]] = k_slot + __popc(lanes[i].k);
                __syncwarp();
                if (!in) continue;
                const auto row = static_cast<std::uint16_t>(first + 32 * i + lane - chunk.begin);
                q_slot += __popc(lanes[i].q & below);
                shared.rows[q_slot] = row;
                shared.rows[k_slot + __popc(lanes[i].k & below)] = row;
                seen += __popc(lanes[i].cross & (2 * below + 1));
                shared.sight[q_slot] = static_cast<std::uint16_t>(seen);
              }
            });
  __syncthreads();
}

// Writes a sorted chunk. starts: where the next queries and keys of the clusters go; before: how
// many of these keys there are already. Lanes know a cluster each, and write its rows together.
__device__ inline void store_twins(const TwinLists& lists, const TwinShared& shared,
                                   const RowRange& chunk, std::int32_t* starts,
                                   std::int32_t* before) {
  const std::int32_t* ends = shared.counts.last_counts();
  const int clusters = lists.clusters, warps = static_cast<int>(blockDim.x) / 32;
  const int lane = static_cast<int>(threadIdx.x % 32u);
  const int each = (clusters + warps - 1) / warps, own = static_cast<int>(threadIdx.x) / 32 * each;
  const int stop = min(own + each, clusters);
  for (int side = 0; side < 2; ++side) {
    const bool queries = side == 0;
    std::int32_t* order = queries ? lists.q.order : lists.k.order;
    for (int base = own; base < stop; base += 32) {
      const int c = base + lane, place = side * clusters + c;
      int begin = 0, end = 0, start = 0, shift = 0;
      if (c < stop) {
        begin = place > 0 ? ends[place - 1] : 0;
        end = ends[place];
        start = starts[place];
        starts[place] = start + end - begin;
      }
      if (queries && c < stop) {
        shift = before[c] - ends[clusters + c - 1];
        before[c] = shift + ends[clusters + c];
      }
      for (int k = 0; k < min(32, stop - base); ++k) {
        const int from = __shfl_sync(~0u, begin, k), to = __shfl_sync(~0u, end, k);
        const int target = __shfl_sync(~0u, start, k) - from, add = __shfl_sync(~0u, shift, k);
        for (int i = from + lane; i < to; i += 32) {
          order[target + i] = chunk.begin + shared.rows[i];
          if (queries) lists.ends[target + i] = shared.sight[i] + add;
        }
      }
    }
  }
}

// By all threads of the team's blocks, after labels of this block's `range` of `rows` rows were
// written by it. `memory` has twin_shared_bytes, numbers are those of the block beside
// `histograms`.
__device__ inline void sort_twin_runs(const TwinLists& lists, Team& team, const RowRange& range,
                                      int rows, std::int32_t* histograms, std::int32_t* numbers,
                                      std::int32_t* memory, int words) {
  const int clusters = lists.clusters, room = words - (kSortPairs + kTwinRows) / 2;
  auto* sorted = reinterpret_cast<std::uint16_t*>(memory + room);
  const TwinShared shared{BlockCounts(nullptr, 2 * clusters, memory, room), sorted,
                          sorted + kSortPairs};
  std::int32_t *starts = numbers, *before = numbers + 2 * clusters;
  count_twins(lists, shared.counts, range);
  share_counts(team, shared.counts, histograms, [&](int c, int slot, int members) {
    const bool keys = c >= clusters;
    const int first = keys ? slot - rows : slot;
    if (team.rank == 0) (keys ? lists.k.offsets + c - clusters : lists.q.offsets + c)[0] = first;
    starts[c] = first + members;
    if (keys) before[c - clusters] = members;
  });
  if (team.rank == 0 && threadIdx.x < 2)
    (threadIdx.x ? lists.k.offsets : lists.q.offsets)[clusters] = rows;
  __syncthreads();
  for (int first = range.begin; first < range.end; first += kTwinRows) {
    const RowRange chunk{first, min(first + kTwinRows, range.end)};
    if (range.end - range.begin > kTwinRows) count_twins(lists, shared.counts, chunk);
    sort_twins(lists, shared, chunk);
    store_twins(lists, shared, chunk, starts, before);
  }
}

}  // namespace coterie::cuda
