// SPDX-License-Identifier: MIT
// Shared memory of the backward pass of lists on Hopper (attend_list_bwd_sm90a.cu): how rows reach
// the computing warpgroups.
//
// A block works in rounds. In a round it owns 128 ranks of a list, 64 for each of two warpgroups,
// and streams the tiles of the other list that any of them meets through a ring, which both
// warpgroups read:
//
//   owned    | 64 | 64 |         a tile of two tensors for each warpgroup; two rounds of them
//   ring     | 0 | 1 | 2 | ...   tiles of two tensors, numbered through all rounds of a block
//
// Two teams of two producing warps take the rounds in turn; a warp copies half the rows of a tile
// (list_bwd_producer.cuh). What must be known of the rows is copied beside them, so that computing
// warps read nothing from global memory.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/device/bands.cuh"
#include "cuda/device/list_bwd.cuh"

namespace coterie::cuda {

constexpr int kStreamGroups = 2;                       // computing warpgroups
constexpr int kStreamTeams = 2, kStreamTeamWarps = 2;  // that copy
constexpr int kStreamWarps = 4 * kStreamGroups;        // that compute
constexpr int kStreamRing = 8;
constexpr int kStreamTurns = 8;  // rounds that a warp may be ahead of its team's other, and more
constexpr int kStreamThreads = (kStreamGroups + 1) * kWarpgroup;
constexpr int kStreamRoundBits = 7;  // ranks of a round
constexpr int kStreamTileBytes = 64 * 128;

// 64 queries as they are in global memory; zeros beyond the list.
template <ListForm kForm>
struct QueryRecord {
  static constexpr int kMore = kForm == ListForm::plain ? 2 : 64;
  alignas(16) float lse[64];
  alignas(16) float delta[64];
  alignas(16) int2 range[64];  // of key ranks; ListRule::ends: only .y, as given
  alignas(16) float weight[kMore];
  alignas(16) RowStatistics stats[kMore];
};
// The same of 64 keys.
template <ListForm kForm>
struct KeyRecord {
  static constexpr int kMore = kForm == ListForm::plain ? 2 : 64;
  alignas(16) RowStatistics stats[kMore];
};

// What a warpgroup does in a round.
struct ListStep {
  int first, count;  // owned ranks; none if count is not above 0
  int tiles, rank;   // of the ring, and the rank of the first one's first row
  int number;        // of the first
  int head;          // that is owned
  int keys;          // of the key list
  ItemSpan span;
  std::int64_t slot;  // of owned rank 0
  int slot_step;
};

// A streamed tile.
struct TileFacts {
  int head, count;  // query head; rows
};

template <ListForm kForm, bool kKeys>
struct OwnedRecord {
  int row[64];
  std::conditional_t<kKeys, KeyRecord<kForm>, QueryRecord<kForm>> rows;
};

// kKeys: keys are owned.
template <ListForm kForm, bool kKeys>
struct StreamMemory {
  alignas(1024) unsigned char owned[2][kStreamGroups][2][kStreamTileBytes];
  unsigned char ring[kStreamRing][2][kStreamTileBytes];
  OwnedRecord<kForm, kKeys> owned_rows[2][kStreamGroups];
  std::conditional_t<kKeys, QueryRecord<kForm>, KeyRecord<kForm>> rows[kStreamRing];
  TileFacts facts[kStreamRing];
  ListStep step[2][kStreamGroups];
  std::uint64_t full[kStreamRing], owned_full[2][kStreamGroups], turn[kStreamTurns];
  // What computing warps are done with: tiles of the ring, and owned tiles. Counters, not barriers:
  // producing warps are several phases ahead of each other.
  int done[kStreamWarps], owned_done[kStreamWarps];
  int next[kStreamTurns];  // numbers of the ring, of the rounds whose turn it is

  // Of a tile: the copies of every lane, and a warp for what its lanes wrote.
  static constexpr int kArrivals = 33 * kStreamTeamWarps;

  __device__ void start() {
    if (threadIdx.x == 0) {
      for (auto& barrier : full) mbarrier_init(shared_address(&barrier), kArrivals);
      for (auto& stage : owned_full)
        for (auto& barrier : stage) mbarrier_init(shared_address(&barrier), kArrivals);
      for (auto& barrier : turn) mbarrier_init(shared_address(&barrier), 1);
      for (int warp = 0; warp < kStreamWarps; ++warp) done[warp] = owned_done[warp] = 0;
      next[0] = 0;
      mbarrier_arrive(shared_address(&turn[0]));
    }
    __syncthreads();
  }

  // By a producing warp: numbers of the ring for the tiles of a round. One of its team passes the
  // turn on.
  __device__ int take(int round, int tiles, bool passes) {
    const int at = round % kStreamTurns, then = (round + 1) % kStreamTurns;
    mbarrier_wait(shared_address(&turn[at]), round / kStreamTurns & 1);
    const int number = *const_cast<volatile int*>(&next[at]);
    __syncwarp();
    if (passes && threadIdx.x % 32 == 0) {
      *const_cast<volatile int*>(&next[then]) = number + tiles;
      mbarrier_arrive(shared_address(&turn[then]));
    }
    return number;
  }
  __device__ bool room(int number) const {
    return reached(done, kStreamWarps, number - kStreamRing + 1);
  }
  __device__ bool owned_room(int group, int round) const {
    return reached(owned_done + 4 * group, 4, round - 1);
  }

  // By computing warps, of every tile and round.
  __device__ void await_tile(int number) {
    mbarrier_wait(shared_address(&full[number % kStreamRing]), number / kStreamRing & 1);
    fence_async_proxy();
  }
  __device__ void release(int number) { count(done[threadIdx.x / 32], number + 1); }
  __device__ void await_owned(int group, int round) {
    mbarrier_wait(shared_address(&owned_full[round % 2][group]), round / 2 & 1);
    fence_async_proxy();
  }
  __device__ void release_owned(int round) { count(owned_done[threadIdx.x / 32], round + 1); }

 private:
  // Whether all of these warps have come to `least`. By all lanes of a warp.
  __device__ static bool reached(const int* counters, int warps, int least) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    int count = least;
    if (lane < warps)
      asm volatile("ld.acquire.cta.shared.b32 %0, [%1];"
                   : "=r"(count)
                   : "r"(shared_address(counters + lane))
                   : "memory");
    const bool all = __all_sync(~0u, count >= least);
    __syncwarp();  // orders what other lanes do after it, which a vote does not
    return all;
  }
  __device__ static void count(int& counter, int reached) {
    __syncwarp();
    if (threadIdx.x % 32 == 0)
      asm volatile("st.release.cta.shared.b32 [%0], %1;" ::"r"(shared_address(&counter)),
                   "r"(reached)
                   : "memory");
  }
};

}  // namespace coterie::cuda
