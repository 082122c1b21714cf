// SPDX-License-Identifier: MIT
// A stream of steps over lists (lists.h), for kernels on Hopper whose blocks live long.
//
// A step is a tile of 64 ranks of a list, its owned rows, with the tiles of the other list that it
// meets. A block plans a run of steps at its start, a thread each, and numbers the tiles that they
// meet: each is loaded once, and steps that follow each other share it. One warpgroup loads, two or
// three compute and take the steps in turn; owned and streamed tiles stand in two rings in shared
// memory.
#pragma once

#include <climits>
#include <cstdint>

#include "cuda/lists/stream_copy.cuh"
#include "cuda/prim/warp.cuh"

namespace coterie::cuda {

// `at` is a place in the side's index, or a row of the item where there is none (`SlotList::first`
// and on, `lists` apart).
struct alignas(16) StreamStep {
  int rows, first;             // owned ranks [first, first + rows)
  int low, tiles;              // streamed ranks from `low` on, in so many tiles
  int ring;                    // number of the first of them
  int fresh;                   // tiles that are loaded with this step, the last ones of it
  int span;                    // of a round: tiles of every head that is streamed
  int count;                   // ranks of the streamed list
  int shift;                   // r of ListRule, of rank 0 of the query list
  std::uint16_t head, batch;   // the query head
  int own_begin, other_begin;  // first row of the item
  int own_at, own_slot;        // of rank `first`
  int other_at, other_slot;    // of rank 0
};

// What a computing warp has seen of the ring: the numbers of tiles that it waited for and released.
struct StreamReader {
  int ready = 0, released = 0;
};

// Shared memory of a block. Streamed tiles are of two tensors; facts are bytes by row.
template <int kGroups_, int kDim, int kOwnTensors, int kRing_, int kSlots_, int kOwnFacts,
          int kOtherFacts>
struct StreamShape {
  static constexpr int kGroups = kGroups_, kLoaders = 4;  // warpgroups that compute, loading warps
  static constexpr int kThreads = (kGroups + 1) * kWarpgroup;
  static constexpr int kRing = kRing_, kSlots = kSlots_;
  static constexpr int kTensorBytes = kDim / 64 * kStreamRows * 128;
  static constexpr int kOwn = kRing * 2 * kTensorBytes;
  static constexpr int kPlanAt = kOwn + kSlots * kOwnTensors * kTensorBytes;
  static constexpr int kOwnFactsAt = kPlanAt + kStreamPlan * static_cast<int>(sizeof(StreamStep));
  static constexpr int kOwnFactBytes = kOwnFacts * kStreamRows;
  static constexpr int kOtherFactsAt = kOwnFactsAt + kSlots * kOwnFactBytes;
  static constexpr int kOtherFactBytes = kOtherFacts * kStreamRows;
  static constexpr int kBarriers = kOtherFactsAt + kRing * kOtherFactBytes;
  static constexpr int kBytes = kBarriers + 2 * (kRing + kSlots) * 8;
  static_assert(kRing <= 32, "a lane for every place");
  // So that a place of owned tiles serves one warpgroup: others may be phases ahead.
  static_assert(kSlots % kGroups == 0, "warpgroups have places of their own");
  static_assert(kBytes <= 227 * 1024, "more than the shared memory of a block");
  unsigned char* memory;
  std::uint32_t base;

  __device__ explicit StreamShape(unsigned char* at) : memory(at), base(shared_address(at)) {}

  __device__ std::uint32_t tile(int number, int tensor) const {
    return tile_at(number % kRing, tensor);
  }
  __device__ std::uint32_t tile_at(int place, int tensor) const {
    return base + (place * 2 + tensor) * kTensorBytes;
  }
  __device__ std::uint32_t own(int step, int tensor) const {
    return base + kOwn + (step % kSlots * kOwnTensors + tensor) * kTensorBytes;
  }
  __device__ unsigned char* own_facts(int step) const {
    return memory + kOwnFactsAt + step % kSlots * kOwnFactBytes;
  }
  __device__ unsigned char* facts_at(int place) const {
    return memory + kOtherFactsAt + place * kOtherFactBytes;
  }
  __device__ StreamStep* plan() const { return reinterpret_cast<StreamStep*>(memory + kPlanAt); }

  __device__ std::uint32_t full(int number) const { return base + kBarriers + number % kRing * 8; }
  __device__ std::uint32_t empty(int number) const { return full(number) + kRing * 8; }
  __device__ std::uint32_t own_full(int step) const {
    return base + kBarriers + (2 * kRing + step % kSlots) * 8;
  }
  __device__ std::uint32_t own_empty(int step) const { return own_full(step) + kSlots * 8; }

  // By all threads, before plan_steps. Loading warps wait for every place and arrive at it.
  __device__ void init() const {
    const int place = static_cast<int>(threadIdx.x);
    if (place < kRing) {
      mbarrier_init(full(place), 32 + kWarpArrivals);
      mbarrier_init(empty(place), (kGroups * 4 + kLoaders) * kWarpArrivals);
    }
    if (place < kSlots) {
      mbarrier_init(own_full(place), 32 + kWarpArrivals);
      mbarrier_init(own_empty(place), (4 + kLoaders) * kWarpArrivals);
    }
  }

  // Loading warps: wait until the place of a step's owned tile, or of a streamed tile, is free.
  __device__ void wait_place(int step) const {
    if (step >= kSlots) mbarrier_wait(own_empty(step), (step / kSlots - 1) & 1);
  }
  __device__ void wait_tile(int number) const {
    if (number >= kRing) mbarrier_wait(empty(number), (number / kRing - 1) & 1);
  }

  // Computing warps. fence_async_proxy() stands between waiting and warpgroup products.
  __device__ void wait_own(int step) const { mbarrier_wait(own_full(step), step / kSlots & 1); }
  __device__ void release_own(int step) const { mbarrier_arrive_warp(own_empty(step)); }
  // Waits for all tiles below `number`, which are within reach: a lane for each.
  __device__ void wait_below(int number, StreamReader& reader) const {
    if (number <= reader.ready) return;
    const auto wait = [&](int tile) { mbarrier_wait(full(tile), tile / kRing & 1); };
    mbarrier_wait_warp(reader.ready, number, wait);
    reader.ready = number;
  }
  // This warp is done with all tiles below `number`. Warps release every tile, used or not, once
  // it is there: so the arrivals of a barrier belong to one tile.
  __device__ void release_below(int number, StreamReader& reader) const {
#pragma unroll 1
    while (reader.released < number) {
      const int end = min(number, reach(reader));
      wait_below(end, reader);
      mbarrier_arrive_warp(reader.released, end, [&](int tile) { return empty(tile); });
      reader.released = end;
    }
  }
  // Tiles from here on come only after this warp has released others.
  __device__ static int reach(const StreamReader& reader) { return reader.released + kRing; }

  // The place of a number below 2 kRing.
  __device__ static int ring_place(int number) { return number >= kRing ? number - kRing : number; }
};

// What plan_steps found.
struct StreamPlan {
  int steps, tiles;
};

// Plans the steps [0, count), count <= kStreamPlan: make(number, step) fills all but ring, fresh
// and span. By all threads of the block. Steps without rows are left out. In rounds, three steps of
// a list, one of every three numbers, walk over the same tiles together, however many there are, of
// `heads` heads one after the other; else tiles stay until the last step that meets them, unless
// they are too many. Ranges never decrease along a list.
template <class Shape, class Make>
__device__ StreamPlan plan_steps(const Shape& shape, int count, bool rounds, int heads,
                                 const Make& make) {
  struct Range {
    int first, low, high;  // tiles
  };
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  Range* ranges = reinterpret_cast<Range*>(shape.plan());
  auto* sums = reinterpret_cast<long long*>(ranges + kStreamPlan);
  StreamStep step;
  step.rows = 0;
  if (thread < count) {
    make(thread, step);
    ranges[thread] = {step.rows > 0 ? step.first / kStreamRows : -1, step.low / kStreamRows,
                      step.low / kStreamRows + step.tiles};
  }
  __syncthreads();
  step.fresh = 0;
  int before = 0;  // tiles from its first on that earlier steps load
  if (step.rows > 0) {
    const Range own = ranges[thread];
    if (rounds) {
      // Tiles of a list follow each other, so that numbers as far apart as tiles are of one list.
      const auto joined = [&](int other) {
        return other < count && ranges[other].first >= 0 &&
               ranges[other].first - own.first == other - thread;
      };
      int lead = thread, last = thread;
      while (lead % Shape::kGroups > 0 && joined(lead - 1)) --lead;
      while (last % Shape::kGroups < Shape::kGroups - 1 && joined(last + 1)) ++last;
      step.span = ranges[last].high - ranges[lead].low;
      const int all = heads * step.span, ahead = own.low - ranges[lead].low;
      (lead == thread ? step.fresh : before) = all - ahead;
    } else {
      constexpr int kMost = Shape::kRing - 2;
      if (own.first > 0 && thread > 0 && step.tiles <= kMost) {
        const Range last = ranges[thread - 1];
        if (last.high - last.low <= kMost) before = max(last.high - own.low, 0);
      }
      step.fresh = step.tiles - before;
      step.span = step.tiles;
    }
  }
  // Tiles and steps up to this thread; a long list has more tiles than 22 bits count.
  const long long sum =
      warp_inclusive_scan(static_cast<long long>(step.fresh) << 10 | (step.rows > 0));
  if (lane == 31) sums[thread / 32] = sum;
  __syncthreads();
  long long ahead = 0, total = 0;
  for (int warp = 0; warp < Shape::kThreads / 32; ++warp) {
    if (warp < thread / 32) ahead += sums[warp];
    total += sums[warp];
  }
  const int loaded = static_cast<int>((ahead + sum) >> 10) - step.fresh;  // before this step
  __syncthreads();
  if (step.rows > 0) {
    step.ring = loaded - before;
    shape.plan()[((ahead + sum) & 1023) - 1] = step;
  }
  __syncthreads();
  return {static_cast<int>(total & 1023), static_cast<int>(total >> 10)};
}

// The loading warpgroup. Its warps take owned and streamed tiles in turn: own(step number, step,
// ready) and tile(number, step, place among the step's tiles, ready) start the copies of one; they
// call ready() when they need its place, which may take long. All warps wait for every place, so
// that tiles are fetched in the order of their need: where rows lie far apart (strided lists, 128
// elements) that takes a tenth less time. A wait by parity must not miss a phase. So a warp that
// has seen a place free arrives at its barrier: the next phase ends only when all four have looked,
// however quickly steps without keys are loaded by others and released.
template <class Shape, class Own, class Tile>
__device__ void load_steps(const Shape& shape, const StreamPlan& plan, bool rounds, const Own& own,
                           const Tile& tile) {
  static_assert(Shape::kRing >= 4 && Shape::kSlots >= Shape::kGroups, "room for a round");
  const int warp = static_cast<int>(threadIdx.x) / 32 % 4;
  // Steps of a round need all their owned rows before the first tile is done with.
  const int ahead = rounds ? Shape::kGroups : 1;
  int next = 0, owned = 0, turn = 0;
  const auto mine = [&] { return turn++ % 4 == warp; };
#pragma unroll 1
  for (int number = 0; number < plan.steps; ++number) {
    const StreamStep& step = shape.plan()[number];
#pragma unroll 1
    for (; owned < min(number + ahead, plan.steps); ++owned) {
      const auto ready = [&] {
        shape.wait_place(owned);
        mbarrier_arrive_warp(shape.own_empty(owned));
      };
      if (!mine()) {
        ready();
        continue;
      }
      own(owned, shape.plan()[owned], ready);
      arrive_filled(shape.own_full(owned));
    }
    // Behind the tiles that were loaded with the steps before.
    const int end = next + step.fresh;
    int place = max(step.tiles - step.fresh, 0);
#pragma unroll 1
    for (; next < end; ++next, ++place) {
      const auto ready = [&] {
        shape.wait_tile(next);
        mbarrier_arrive_warp(shape.empty(next));
      };
      if (!mine()) {
        ready();
        continue;
      }
      tile(next, step, place, ready);
      arrive_filled(shape.full(next));
    }
  }
  asm volatile("cp.async.wait_all;" ::: "memory");  // threads that end take their copies along
}

}  // namespace coterie::cuda
