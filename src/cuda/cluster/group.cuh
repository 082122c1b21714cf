// SPDX-License-Identifier: MIT
// Stable counting sort of one problem's rows by cluster, by a team of blocks.
//
// Warps count the clusters of neighbouring parts of the rows. The blocks exchange their counts in
// global memory, which gives the place of each block's, and so each warp's, members of a cluster.
// Shared memory: group_shared_bytes, counters of the clusters for as many warps as fit into 96 KB,
// at least one. Called by all threads of the team's blocks, which are launched cooperatively.
#pragma once

#include <cstdint>

#include "cuda/cluster/group.h"
#include "cuda/prim/team.cuh"
#include "cuda/prim/warp.cuh"

namespace coterie::cuda {

struct GroupLists {
  const std::int32_t* labels;  // of the problem's rows, in [0, clusters)
  std::int32_t *order, *offsets;
  std::int32_t* histograms;  // (blocks of the team, clusters)
  int clusters;
};

// Shared memory of BlockCounts: one counter per cluster, for as many warps as fit beside `others`
// bytes. Throws if the device has no room for one warp's.
inline std::size_t group_shared_bytes(int clusters, int warps, int others = 0) {
  const int room = shared_for_tables() - others;
  const std::size_t one = static_cast<std::size_t>(clusters) * sizeof(std::int32_t);
  if (one > static_cast<std::size_t>(room))
    fail_more_than("cuda", room / static_cast<int>(sizeof(std::int32_t)),
                   "clusters of a head, for which this GPU has shared memory", clusters);
  const auto most = static_cast<std::size_t>(min(room, 96 * 1024));
  return one * min(max(most / one, std::size_t{1}), static_cast<std::size_t>(warps));
}

// The team's part of (2, blocks, clusters) histograms. Problems use the two sets in turn: a fast
// block may write the next problem's while a slow one reads this one's.
__device__ inline std::int32_t* histograms_of(std::int32_t* histograms, const Teams& teams,
                                              const Team& team, int turn, int clusters) {
  return histograms +
         static_cast<std::int64_t>(turn * teams.count + team.number) * team.size * clusters;
}

// Labels of rows first + 32 i + lane, -1 from `end` on; several loads in flight at a time.
constexpr int kLabelBatch = 8;
__device__ __forceinline__ void load_labels(const std::int32_t* labels, int first, int end,
                                            int (&label)[kLabelBatch]) {
#pragma unroll
  for (int i = 0; i < kLabelBatch; ++i) {
    const int row = first + 32 * i + static_cast<int>(threadIdx.x) % 32;
    label[i] = row < end ? labels[row] : -1;
  }
}

// Lanes with the same label, compared in `bits` bits; -1 matches only -1. If most labels differ,
// this is faster than __match_any_sync, and the batch's ballots overlap.
__device__ __forceinline__ void find_alike(const int (&label)[kLabelBatch], int bits,
                                           unsigned (&alike)[kLabelBatch]) {
#pragma unroll
  for (int i = 0; i < kLabelBatch; ++i) {
    const unsigned there = __ballot_sync(0xffffffffu, label[i] >= 0);
    alike[i] = label[i] >= 0 ? there : ~there;
  }
  for (int bit = 0; bit < bits; ++bit)
#pragma unroll
    for (int i = 0; i < kLabelBatch; ++i) {
      const bool set = label[i] >> bit & 1;
      const unsigned lanes = __ballot_sync(0xffffffffu, set);
      alike[i] &= set ? lanes : ~lanes;
    }
}

// The first place in [0, count) where the ascending `values` exceed `value`.
template <class Value>
__device__ __forceinline__ int upper_bound(const Value* values, int count, int value) {
  int first = 0;
  while (count > 0) {
    const int half = count / 2;
    if (values[first + half] <= value) {
      first += half + 1;
      count -= half + 1;
    } else {
      count = half;
    }
  }
  return first;
}

// Members of the clusters among some rows of a block, per warp; after place(), where the next go.
// kSides: label arrays of the same rows that are sorted together, with consecutive clusters.
template <int kSides = 1>
struct BlockCounts {
  const std::int32_t* labels[kSides];
  int clusters, warps;   // clusters of all sides; warps that have counters
  std::int32_t* counts;  // (warps, clusters)

  // `each` clusters per side; `shared` has `words` >= clusters.
  __device__ BlockCounts(const std::int32_t* const (&of)[kSides], int each, std::int32_t* shared,
                         int words)
      : clusters(kSides * each),
        warps(min(static_cast<int>(blockDim.x) / 32, words / clusters)),
        counts(shared) {
#pragma unroll
    for (int side = 0; side < kSides; ++side) labels[side] = of[side];
  }

  // The counters of this warp, and of the last warp that has any.
  __device__ std::int32_t* own_counts() const { return counts + threadIdx.x / 32 * clusters; }
  __device__ std::int32_t* last_counts() const { return counts + (warps - 1) * clusters; }

  // This warp's part of the rows.
  __device__ RowRange own(const RowRange& rows) const {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int each = ((rows.end - rows.begin + warps - 1) / warps + 31) / 32 * 32;
    const int begin = min(rows.begin + warp * each, rows.end);
    return {begin, warp < warps ? min(begin + each, rows.end) : begin};
  }
  // Calls visit(first row, labels of all sides) for batches of this warp's part.
  template <class Visit>
  __device__ __forceinline__ void for_batches(const RowRange& rows, const Visit& visit) const {
    const RowRange mine = own(rows);
    for (int first = mine.begin; first < mine.end; first += 32 * kLabelBatch) {
      int label[kSides][kLabelBatch];
#pragma unroll
      for (int side = 0; side < kSides; ++side)
        load_labels(labels[side], first, mine.end, label[side]);
      visit(first, label);
    }
  }
  __device__ void count(const RowRange& rows) const {
    __syncthreads();  // earlier users of the memory
    for (int i = threadIdx.x; i < warps * clusters; i += blockDim.x) counts[i] = 0;
    __syncthreads();
    std::int32_t* count = own_counts();
    for_batches(rows, [&](int, const int(&label)[kSides][kLabelBatch]) {
#pragma unroll
      for (int side = 0; side < kSides; ++side)
#pragma unroll
        for (int i = 0; i < kLabelBatch; ++i)
          if (label[side][i] >= 0)
            atomicAdd(&count[side * (clusters / kSides) + label[side][i]], 1);
    });
    __syncthreads();
  }
  __device__ int total(int cluster) const {
    int members = 0;
    for (int w = 0; w < warps; ++w) members += counts[w * clusters + cluster];
    return members;
  }
  // Turns counts into places: this block's first member of the cluster goes to `slot`.
  __device__ void place(int cluster, int slot) const {
    for (int w = 0; w < warps; ++w) {
      const int members = counts[w * clusters + cluster];
      counts[w * clusters + cluster] = slot;
      slot += members;
    }
  }
  // Calls write(slot, row) for the rows in order, after place() for their clusters.
  template <class Write>
  __device__ void fill(const RowRange& rows, const Write& write) const {
    const int lane = threadIdx.x % 32, each = clusters / kSides, bits = 32 - __clz(each - 1);
    for_batches(rows, [&](int first, const int(&labels_of)[kSides][kLabelBatch]) {
#pragma unroll
      for (int side = 0; side < kSides; ++side) {
        const int(&label)[kLabelBatch] = labels_of[side];
        std::int32_t* slots = own_counts() + side * each;
        unsigned alike[kLabelBatch];
        find_alike(label, bits, alike);
#pragma unroll
        for (int i = 0; i < kLabelBatch; ++i) {
          const int before = __popc(alike[i] & ((1u << lane) - 1));
          const int slot = label[i] >= 0 ? slots[label[i]] : 0;
          __syncwarp();
          if (label[i] >= 0 && before == 0) slots[label[i]] = slot + __popc(alike[i]);
          __syncwarp();
          if (label[i] >= 0) write(slot + before, first + 32 * i + lane);
        }
      }
    });
  }
};

// Combines the counts of all blocks of the team, which it synchronises. One thread per cluster
// calls visit(cluster, slot, before) with the place of its first member and the number of members
// in blocks before this one. Returns the number of all members.
template <int kSides, class Visit>
__device__ int share_counts(Team& team, const BlockCounts<kSides>& counts, std::int32_t* histograms,
                            const Visit& visit) {
  const int clusters = counts.clusters;
  for (int c = threadIdx.x; c < clusters; c += blockDim.x)
    histograms[static_cast<std::int64_t>(team.rank) * clusters + c] = counts.total(c);
  team.sync();
  int carry = 0;
  for (int first = 0; first < clusters; first += blockDim.x) {
    const int c = first + static_cast<int>(threadIdx.x);
    int total = 0, before = 0;
    if (c < clusters)
#pragma unroll 8
      for (int rank = 0; rank < team.size; ++rank) {
        const int members = histograms[static_cast<std::int64_t>(rank) * clusters + c];
        before += rank < team.rank ? members : 0;
        total += members;
      }
    const int slot = block_exclusive_scan(total, carry);
    if (c < clusters) visit(c, slot, before);
  }
  return carry;
}

// order and offsets of a problem; `range` is this block's share of its rows; this block wrote their
// labels. `shared` has `shared_words` >= clusters.
__device__ inline void group_rows(Team& team, const RowRange& range, const GroupLists& lists,
                                  std::int32_t* shared, int shared_words) {
  const BlockCounts<> counts({lists.labels}, lists.clusters, shared, shared_words);
  counts.count(range);
  const int all = share_counts(team, counts, lists.histograms, [&](int c, int slot, int before) {
    if (team.rank == 0) lists.offsets[c] = slot;
    counts.place(c, slot + before);
  });
  if (team.rank == 0 && threadIdx.x == 0) lists.offsets[lists.clusters] = all;
  __syncthreads();
  counts.fill(range, [&](int slot, int row) { lists.order[slot] = row; });
}

// A problem of a team.
struct TeamProblem {
  int number, item, head;
  ItemSpan span;
  std::int64_t start;  // of its rows in (B, heads, rows)
  RowRange range;      // this block's share of them
};

// Labels, order and offsets of all problems, divided among the teams. label(team, problem) labels
// the block's rows.
template <class Label>
__device__ __forceinline__ void group_problems(const ClusterShape& shape, const Teams& teams,
                                               const ClusterLists& all, std::int32_t* histograms,
                                               std::int32_t* shared, int shared_words,
                                               const Label& label) {
  Team team(teams);
  int turn = 0;
  for (int number = team.number; number < shape.problems(); number += teams.count, turn ^= 1) {
    const int item = number / shape.heads, head = number % shape.heads;
    const ItemSpan span = shape.q.span(item);
    const TeamProblem problem{
        number, item, head, span, shape.start(span, head), team.share(span.length)};
    __syncthreads();  // the sort of the last problem used the same memory
    label(team, problem);
    fill_padding(shape, team, item, head, all.labels, all.order);
    const GroupLists lists{all.labels + problem.start, all.order + problem.start,
                           all.offsets + static_cast<std::int64_t>(number) * (shape.clusters + 1),
                           histograms_of(histograms, teams, team, turn, shape.clusters),
                           shape.clusters};
    group_rows(team, problem.range, lists, shared, shared_words);
  }
}

}  // namespace coterie::cuda
