// SPDX-License-Identifier: MIT
// Runs of strict routing (RoutingRuns in routing.h): a team sorts one problem's pairs (row,
// cluster) by cluster. A block sorts its share in shared memory, kSortPairs at a time, and writes
// the runs from there: stores of single words to places far apart take several times as long.
#pragma once

#include <initializer_list>

#include "cuda/device/group.cuh"
#include "cuda/routing.h"

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

// Sets numbers by row to -1 where all rows are padding; null ones are left out.
inline void clear_without_items(const ClusterShape& shape, std::int64_t count,
                                std::initializer_list<std::int32_t*> numbers, cudaStream_t stream) {
  if (shape.items > 0) return;
  for (std::int32_t* each : numbers)
    if (each)
      COTERIE_CUDA(cudaMemsetAsync(each, 0xff,
                                   static_cast<std::size_t>(count) * sizeof(std::int32_t), stream));
}

// The problems of one side, and where their runs go.
struct SortProblems {
  ClusterShape shape;  // of rows
  const std::int32_t* clusters;
  int per_row;
  RoutingRuns runs, copy;
};

// A block's part of a problem, by all its threads.
struct PairSort {
  const std::int32_t* labels;
  int clusters, warps;    // warps that sort
  std::int32_t* starts;   // (clusters), see starts_of
  std::int32_t* counts;   // (warps, clusters)
  std::uint16_t* sorted;  // (kSortPairs): numbers in the chunk

  __device__ PairSort(const std::int32_t* all, int number, std::int32_t* places,
                      std::int32_t* shared, int words)
      : labels(all), clusters(number), starts(places), counts(shared) {
    words -= kSortPairs / 2;
    warps = min(static_cast<int>(blockDim.x) / 32, words / clusters);
    sorted = reinterpret_cast<std::uint16_t*>(shared + words);
  }

  // This warp's part of a chunk.
  __device__ RowRange own(const RowRange& chunk) const {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int each = ((chunk.end - chunk.begin + warps - 1) / warps + 31) / 32 * 32;
    const int begin = min(chunk.begin + warp * each, chunk.end);
    return {begin, warp < warps ? min(begin + each, chunk.end) : begin};
  }
  __device__ void count(const RowRange& chunk) const {
    __syncthreads();
    for (int i = threadIdx.x; i < warps * clusters; i += blockDim.x) counts[i] = 0;
    __syncthreads();
    const RowRange mine = own(chunk);
    std::int32_t* count = counts + threadIdx.x / 32 * clusters;
    for (int first = mine.begin; first < mine.end; first += 32 * kLabelBatch) {
      int label[kLabelBatch];
      load_labels(labels, first, mine.end, label);
#pragma unroll
      for (int i = 0; i < kLabelBatch; ++i)
        if (label[i] >= 0) atomicAdd(&count[label[i]], 1);
    }
    __syncthreads();
  }
  __device__ int total(int cluster) const {
    int members = 0;
    for (int w = 0; w < warps; ++w) members += counts[w * clusters + cluster];
    return members;
  }
  // Where the block's pairs go, and the offsets of the problem.
  __device__ void find_starts(const Team& team, const std::int32_t* histograms,
                              std::int32_t* offsets) const {
    int carry = 0;
    for (int first = 0; first < clusters; first += blockDim.x) {
      const int c = first + static_cast<int>(threadIdx.x);
      int all = 0, before = 0;
      if (c < clusters)
#pragma unroll 8
        for (int rank = 0; rank < team.size; ++rank) {
          const int members = histograms[static_cast<std::int64_t>(rank) * clusters + c];
          before += rank < team.rank ? members : 0;
          all += members;
        }
      const int start = block_exclusive_scan(all, carry);
      if (c >= clusters) continue;
      starts[c] = start + before;
      if (team.rank == 0) offsets[c] = start;
    }
    if (team.rank == 0 && threadIdx.x == 0) offsets[clusters] = carry;
  }
  // Sorts a chunk whose counts are there.
  __device__ void sort(const RowRange& chunk) const {
    int carry = 0;
    for (int first = 0; first < clusters; first += blockDim.x) {
      const int c = first + static_cast<int>(threadIdx.x);
      int slot = block_exclusive_scan(c < clusters ? total(c) : 0, carry);
      if (c >= clusters) continue;
      for (int w = 0; w < warps; ++w) {
        const int members = counts[w * clusters + c];
        counts[w * clusters + c] = slot;
        slot += members;
      }
    }
    __syncthreads();
    const RowRange mine = own(chunk);
    const int lane = threadIdx.x % 32, bits = 32 - __clz(clusters - 1);
    std::int32_t* slots = counts + threadIdx.x / 32 * clusters;
    for (int first = mine.begin; first < mine.end; first += 32 * kLabelBatch) {
      int label[kLabelBatch];
      unsigned alike[kLabelBatch];
      load_labels(labels, first, mine.end, label);
      find_alike(label, bits, alike);
#pragma unroll
      for (int i = 0; i < kLabelBatch; ++i) {
        const int before = __popc(alike[i] & ((1u << lane) - 1));
        const int slot = label[i] >= 0 ? slots[label[i]] : 0;
        __syncwarp();
        if (label[i] >= 0 && before == 0) slots[label[i]] = slot + __popc(alike[i]);
        if (label[i] >= 0)
          sorted[slot + before] = static_cast<std::uint16_t>(first - chunk.begin + 32 * i + lane);
        __syncwarp();
      }
    }
    __syncthreads();
  }
  // write(place, pair) for the pairs of a sorted chunk. Lanes know a cluster each, and write the
  // pairs of one after the other together.
  template <class Write>
  __device__ void store(const RowRange& chunk, const Write& write) const {
    const int lane = threadIdx.x % 32, all = blockDim.x / 32;
    const std::int32_t* ends = counts + (warps - 1) * clusters;
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
};

// By all threads of the team's blocks; the clusters of this block's share of the rows were written
// by this block, or before. `shared` has sort_shared_bytes,
// the numbers are sort_numbers.
__device__ inline void sort_problem(const SortProblems& side, int number, Team& team,
                                    std::int32_t* histograms, std::int32_t* starts,
                                    std::int32_t* shared, int shared_words) {
  const ClusterShape& shape = side.shape;
  const int item = number / shape.heads, head = number % shape.heads, m = side.per_row;
  const int threads = static_cast<int>(blockDim.x), clusters = shape.clusters;
  const ItemSpan span = shape.q.span(item);
  const std::int64_t start = shape.start(span, head) * m;
  const std::int64_t lists = static_cast<std::int64_t>(number) * (clusters + 1);
  const RowRange range = team.share(span.length * m);
  const PairSort pairs(side.clusters + start, clusters, starts, shared, shared_words);
  std::int32_t *order = side.runs.order + start, *offsets = side.runs.offsets + lists;
  std::int32_t* copy = side.copy.order ? side.copy.order + start : nullptr;
  pairs.count(range);
  for (int c = threadIdx.x; c < clusters; c += threads)
    histograms[static_cast<std::int64_t>(team.rank) * clusters + c] = pairs.total(c);
  team.sync();
  pairs.find_starts(team, histograms, offsets);
  for (int first = range.begin; first < range.end; first += kSortPairs) {
    const RowRange chunk{first, min(first + kSortPairs, range.end)};
    if (range.end - range.begin > kSortPairs) pairs.count(chunk);
    pairs.sort(chunk);
    pairs.store(chunk, [&](int place, int pair) {
      const int row = m > 1 ? pair / m : pair;
      order[place] = row;
      if (copy) copy[place] = row;
    });
  }
  if (!shape.q.cu_seqlens || item + 1 == shape.items)
    for (int i = span.length * m + team.rank * threads + threadIdx.x;
         i < (shape.rows - span.begin) * m; i += team.size * threads) {
      order[i] = -1;
      if (copy) copy[i] = -1;
    }
  if (copy && team.rank == 0) {
    __syncthreads();
    for (int c = threadIdx.x; c <= clusters; c += threads)
      side.copy.offsets[lists + c] = offsets[c];
  }
}

}  // namespace coterie::cuda
