// SPDX-License-Identifier: MIT
// The n-th largest of words that the threads of a part of a block know, by counting in bins.
#pragma once

#include <cstdint>

#include "cuda/device/mbarrier.cuh"
#include "cuda/device/tile.cuh"

namespace coterie::cuda {

// Threads that search, the first of a block. They meet at barriers: the fewer warps, the sooner.
constexpr int kSearch = 256, kSearchWarps = kSearch / 32;

struct SearchMemory {
  alignas(16) int bins[3][kSearch];
  std::uint32_t least[3][kSearchWarps], most[3][kSearchWarps];
  std::uint64_t barrier;

  __device__ PartBarrier<kSearch> searchers() { return {1, shared_address(&barrier)}; }
  // By one thread, before the block meets.
  __device__ void init() { searchers().init(); }
};

// A search by kSearch threads, each of which knows some of the words. Memory is used in turns: a
// step needs one barrier, and those who read what it counted may be overtaken by one step.
template <int kEach>
struct WordSearch {
  SearchMemory& memory;
  int turn = 0;

  __device__ int next_turn() const { return turn == 2 ? 0 : turn + 1; }

  // The range of all words; zeros are none.
  __device__ void find_range(const std::uint32_t (&words)[kEach], std::uint32_t& low,
                             std::uint32_t& high) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    low = ~0u;
    high = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      low = min(low, words[i] - 1);  // none is the last one to be chosen
      high = max(high, words[i]);
    }
    low = __reduce_min_sync(~0u, low);
    high = __reduce_max_sync(~0u, high);
    if (lane == 0) {
      memory.least[turn][warp] = low;
      memory.most[turn][warp] = high;
    }
    memory.bins[turn][threadIdx.x] = 0;
    memory.searchers().sync();
    low = __reduce_min_sync(~0u, memory.least[turn][lane % kSearchWarps]) + 1;
    high = __reduce_max_sync(~0u, memory.most[turn][lane % kSearchWarps]) + 1;
  }

  // The largest word that at least `wanted` are not below, or one that no more than `enough` are
  // not below. Of all `count` words. Counts those that are not below the result, and, where these
  // are more than enough, how many are above it.
  __device__ std::uint32_t find(const std::uint32_t (&words)[kEach], int wanted, int enough,
                                int& count, int& above) {
    const int lane = threadIdx.x % 32;
    std::uint32_t low, high;
    find_range(words, low, high);
    above = 0;
    while (high - low > 1 && count > enough) {
      const int shift = max(32 - __clz(high - low - 1) - 8, 0);
#pragma unroll
      for (int i = 0; i < kEach; ++i)
        if (words[i] - low < high - low)
          atomicAdd(&memory.bins[turn][(words[i] - low) >> shift], 1);
      memory.bins[next_turn()][threadIdx.x] = 0;
      memory.searchers().sync();
      // Every warp finds the bin of the last one that is wanted; a lane has eight.
      const int4* own = reinterpret_cast<const int4*>(memory.bins[turn]) + 2 * lane;
      const int4 first = own[0], second = own[1];
      const int sizes[8] = {first.x,  first.y,  first.z,  first.w,
                            second.x, second.y, second.z, second.w};
      int sum = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) sum += sizes[i];
      int after = sum;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_down_sync(~0u, after, step);
        after += lane + step < 32 ? other : 0;
      }
      after += above;
      const unsigned reached = __ballot_sync(~0u, after >= wanted);
      const int source = 31 - __clz(reached);
      int running = after - sum, bin = 0, beyond = 0;
#pragma unroll
      for (int i = 7; i >= 0; --i) {
        if (running < wanted) {
          bin = 8 * lane + i;
          beyond = running;
          running += sizes[i];
        }
      }
      above = __shfl_sync(~0u, beyond, source);
      count = __shfl_sync(~0u, running, source);
      low += static_cast<std::uint32_t>(__shfl_sync(~0u, bin, source)) << shift;
      high = min(high - low, 1u << shift) + low;
      turn = next_turn();
    }
    turn = next_turn();
    return low;
  }
};

}  // namespace coterie::cuda
