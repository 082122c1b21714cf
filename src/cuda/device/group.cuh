// SPDX-License-Identifier: MIT
// Stable counting sort of one problem's rows by cluster, by a team of blocks.
#pragma once

#include <cstdint>

#include "cuda/device/team.cuh"

namespace coterie::cuda {

struct GroupLists {
  const std::int32_t* labels;  // of the problem's rows, in [0, clusters)
  std::int32_t *order, *offsets;
  std::int32_t* histograms;  // (blocks of the team, clusters)
  int clusters;
};

// Shared memory for group_rows: one counter a cluster, for as many warps as fit well.
inline std::size_t group_shared_bytes(int clusters, int warps) {
  const std::size_t one = static_cast<std::size_t>(clusters) * sizeof(std::int32_t);
  return one * std::clamp<std::size_t>(96 * 1024 / one, 1, static_cast<std::size_t>(warps));
}

// The team's part of (2, blocks, clusters) histograms. Problems use the two sets in turn: a fast
// block may write the next problem's while a slow one reads this one's.
__device__ inline std::int32_t* histograms_of(std::int32_t* histograms, const Teams& teams,
                                              const Team& team, int turn, int clusters) {
  return histograms +
         static_cast<std::int64_t>(turn * teams.count + team.number) * team.size * clusters;
}

// Sum of `value` over the threads before this one; `carry` is added, and becomes the next carry.
__device__ inline int block_exclusive_scan(int value, int& carry) {
  __shared__ int warp_sums[32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int sum = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, sum, step);
    if (lane >= step) sum += other;
  }
  if (lane == 31) warp_sums[warp] = sum;
  __syncthreads();
  int before = 0, total = 0;
  for (int w = 0; w < static_cast<int>(blockDim.x) / 32; ++w) {
    before += w < warp ? warp_sums[w] : 0;
    total += warp_sums[w];
  }
  __syncthreads();
  const int result = carry + before + sum - value;
  carry += total;
  return result;
}

// Turns the warps' counts into the slots where their first members go; writes the offsets.
__device__ inline void scan_counts(const Team& team, const GroupLists& lists, int warps,
                                   std::int32_t* counts) {
  const int clusters = lists.clusters;
  int carry = 0;
  for (int first = 0; first < clusters; first += blockDim.x) {
    const int c = first + threadIdx.x;
    int total = 0, before = 0;
    if (c < clusters)
#pragma unroll 8
      for (int rank = 0; rank < team.size; ++rank) {
        const int members = lists.histograms[static_cast<std::int64_t>(rank) * clusters + c];
        before += rank < team.rank ? members : 0;
        total += members;
      }
    const int start = block_exclusive_scan(total, carry);
    if (c >= clusters) continue;
    if (team.rank == 0) lists.offsets[c] = start;
    int slot = start + before;
    for (int w = 0; w < warps; ++w) {
      const int members = counts[w * clusters + c];
      counts[w * clusters + c] = slot;
      slot += members;
    }
  }
  if (team.rank == 0 && threadIdx.x == 0) lists.offsets[clusters] = carry;
}

// Labels of rows first + 32 i + lane, -1 from `end` on; several loads on their way at a time.
constexpr int kLabelBatch = 8;
__device__ __forceinline__ void load_labels(const std::int32_t* labels, int first, int end,
                                            int (&label)[kLabelBatch]) {
#pragma unroll
  for (int i = 0; i < kLabelBatch; ++i) {
    const int row = first + 32 * i + static_cast<int>(threadIdx.x) % 32;
    label[i] = row < end ? labels[row] : -1;
  }
}

// Lanes with the same label, of which `bits` bits count; -1 is like itself only. Where most labels
// differ this is faster than __match_any_sync, and the batch's ballots overlap.
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

// Rows of the range to their slots, in order; `slots` are this warp's.
__device__ inline void fill_order(const GroupLists& lists, const RowRange& range,
                                  std::int32_t* slots) {
  const int lane = threadIdx.x % 32, bits = 32 - __clz(lists.clusters - 1);
  for (int first = range.begin; first < range.end; first += 32 * kLabelBatch) {
    int label[kLabelBatch];
    unsigned alike[kLabelBatch];
    load_labels(lists.labels, first, range.end, label);
    find_alike(label, bits, alike);
#pragma unroll
    for (int i = 0; i < kLabelBatch; ++i) {
      const int before = __popc(alike[i] & ((1u << lane) - 1));
      const int slot = label[i] >= 0 ? slots[label[i]] : 0;
      __syncwarp();
      if (label[i] >= 0 && before == 0) slots[label[i]] = slot + __popc(alike[i]);
      __syncwarp();
      if (label[i] >= 0) lists.order[slot + before] = first + 32 * i + lane;
    }
  }
}

// order and offsets of a problem; `range` is this block's share of its rows, `shared` room for
// `shared_words` >= clusters. Labels of the range were written by this block.
__device__ inline void group_rows(Team& team, const RowRange& range, const GroupLists& lists,
                                  std::int32_t* shared, int shared_words) {
  const int clusters = lists.clusters, warp = threadIdx.x / 32;
  const int warps = min(static_cast<int>(blockDim.x) / 32, shared_words / clusters);
  const int each = ((range.end - range.begin + warps - 1) / warps + 31) / 32 * 32;
  const int begin = min(range.begin + warp * each, range.end);
  const RowRange mine{begin, warp < warps ? min(begin + each, range.end) : begin};
  __syncthreads();  // whoever used `shared` before
  for (int i = threadIdx.x; i < warps * clusters; i += blockDim.x) shared[i] = 0;
  __syncthreads();
  for (int first = mine.begin; first < mine.end; first += 32 * kLabelBatch) {
    int label[kLabelBatch];
    load_labels(lists.labels, first, mine.end, label);
#pragma unroll
    for (int i = 0; i < kLabelBatch; ++i)
      if (label[i] >= 0) atomicAdd(&shared[warp * clusters + label[i]], 1);
  }
  __syncthreads();
  for (int c = threadIdx.x; c < clusters; c += blockDim.x) {
    int members = 0;
    for (int w = 0; w < warps; ++w) members += shared[w * clusters + c];
    lists.histograms[static_cast<std::int64_t>(team.rank) * clusters + c] = members;
  }
  team.sync();
  scan_counts(team, lists, warps, shared);
  __syncthreads();
  fill_order(lists, mine, shared + warp * clusters);
}

}  // namespace coterie::cuda
