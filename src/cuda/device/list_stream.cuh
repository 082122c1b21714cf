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

#include "cuda/device/list_problem.cuh"
#include "cuda/device/load.cuh"
#include "cuda/device/wgmma.cuh"

namespace coterie::cuda {

constexpr int kStreamBits = 6, kStreamRows = 1 << kStreamBits;  // of a tile, owned or streamed
constexpr int kStreamPlan = 128;                                // steps of a block, at most

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
  static constexpr int kGroups = kGroups_;  // warpgroups that compute
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
  static constexpr int kBytes = kBarriers + 2 * (kRing + kStreamPlan) * 8;
  static_assert(kRing <= 32, "a lane for every place");
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
  // A barrier for every step: places in the ring of owned tiles go from warpgroup to warpgroup,
  // which may be phases ahead of each other.
  __device__ std::uint32_t own_full(int step) const {
    return base + kBarriers + (2 * kRing + step) * 8;
  }
  __device__ std::uint32_t own_empty(int step) const { return own_full(step) + kStreamPlan * 8; }

  // By all threads, before plan_steps.
  __device__ void init() const {
    const int place = static_cast<int>(threadIdx.x);
    if (place < kRing) {
      mbarrier_init(full(place), 33);
      mbarrier_init(empty(place), kGroups * 4);
    }
    if (place < kStreamPlan) {
      mbarrier_init(own_full(place), 33);
      mbarrier_init(own_empty(place), 4);
    }
  }

  // Computing warps. fence_async_proxy() stands between waiting and warpgroup products.
  __device__ void wait_own(int step) const { mbarrier_wait(own_full(step), 0); }
  __device__ void release_own(int step) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(own_empty(step));
  }
  // Waits for all tiles below `number`, which are within reach: a lane for each.
  __device__ void wait_below(int number, StreamReader& reader) const {
    if (number <= reader.ready) return;
    const int tile = reader.ready + static_cast<int>(threadIdx.x) % 32;
    if (tile < number) mbarrier_wait(full(tile), tile / kRing & 1);
    __syncwarp();
    reader.ready = number;
  }
  // This warp is done with all tiles below `number`. Warps release every tile, used or not, once
  // it is there: so the arrivals of a barrier belong to one tile.
  __device__ void release_below(int number, StreamReader& reader) const {
#pragma unroll 1
    while (reader.released < number) {
      const int end = min(number, reach(reader));
      wait_below(end, reader);
      const int tile = reader.released + static_cast<int>(threadIdx.x) % 32;
      if (tile < end) mbarrier_arrive(empty(tile));
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
  long long sum = static_cast<long long>(step.fresh) << 10 | (step.rows > 0);
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const long long other = __shfl_up_sync(~0u, sum, offset);
    if (lane >= offset) sum += other;
  }
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

// Rows of 64 ranks from `at` on of a side's lists, of which `left` are there: this lane's are those
// of ranks lane and lane + 32, -1 beyond the last.
__device__ __forceinline__ void list_rows(int (&row)[2], const SlotSide& side, int at, int left) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int rank = static_cast<int>(threadIdx.x) % 32 + 32 * half;
    row[half] = rank >= left ? -1 : side.index ? side.index[at + rank] : at + rank * side.lists;
  }
}

// Row `number` of rows that are `pitch` bytes apart: one instruction.
template <class T>
__device__ __forceinline__ T* row_at(T* base, int number, std::uint32_t pitch) {
  std::uint64_t address;
  asm("mad.wide.u32 %0, %1, %2, %3;"
      : "=l"(address)
      : "r"(number), "r"(pitch), "l"(reinterpret_cast<std::uint64_t>(base)));
  return reinterpret_cast<T*>(address);
}

// Copies 64 rows of an item, as list_rows left them, of one or more tensors into tiles; zeros for
// rows of -1. By a warp. Rows are aligned (Rows::aligned) and less than 2 GiB apart.
template <int kDim, class T, int kTensors>
__device__ __forceinline__ void load_list_rows(const std::uint32_t (&to)[kTensors],
                                               const Rows<const T> (&rows)[kTensors],
                                               const int (&row)[2]) {
  const int lane = static_cast<int>(threadIdx.x) % 32, r = lane / 8, chunk = lane % 8;
  const bool inside = chunk * 8 < rows[0].width;
  const unsigned char* from[kTensors];  // a valid address, where columns are beyond the width
  std::uint32_t pitch[kTensors], even[kTensors];
#pragma unroll
  for (int x = 0; x < kTensors; ++x) {
    from[x] = reinterpret_cast<const unsigned char*>(rows[x].data + (inside ? chunk * 8 : 0));
    pitch[x] = static_cast<std::uint32_t>(rows[x].pitch * 2);
    even[x] = to[x] + r * 128 + ((chunk ^ r) << 4);
  }
#pragma unroll
  for (int i = 0; i < kStreamRows / 4; ++i) {
    const int number = __shfl_sync(~0u, row[i / 8], i % 8 * 4 + r);
    const int valid = max(number, 0);
#pragma unroll
    for (int x = 0; x < kTensors; ++x) {
      const unsigned char* source = row_at(from[x], valid, pitch[x]);
      // Chunks of every second four rows are permuted differently.
      const std::uint32_t target = (i % 2 == 0 ? even[x] : even[x] ^ 64) + i * 512;
      cp_async16(target, source, number >= 0 && inside ? 16 : 0);
#pragma unroll
      for (int band = 1; band < kDim / 64; ++band) {
        const bool there = number >= 0 && 64 * band + chunk * 8 < rows[0].width;
        cp_async16(target + band * kStreamRows * 128, there ? source + band * 128 : source,
                   there ? 16 : 0);
      }
    }
  }
}
template <int kDim, class T>
__device__ __forceinline__ void load_list_rows(std::uint32_t to, const Rows<const T>& rows,
                                               const int (&row)[2]) {
  const std::uint32_t tiles[1] = {to};
  const Rows<const T> tensors[1] = {rows};
  load_list_rows<kDim>(tiles, tensors, row);
}

// 4 or 8 bytes, or zeros.
template <class Value>
__device__ __forceinline__ void cp_async_value(Value* to, const Value* from, bool there) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(to)), "l"(from),
               "n"(sizeof(Value)), "r"(there ? static_cast<int>(sizeof(Value)) : 0)
               : "memory");
}

// The 33 arrivals of a warp that fills a tile: of each lane when its copies are there, and one for
// what the lanes stored themselves.
__device__ __forceinline__ void arrive_filled(std::uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
  __syncwarp();
  if (threadIdx.x % 32 == 0) mbarrier_arrive(barrier);
}

// The loading warpgroup. Its warps take owned and streamed tiles in turn: own(step number, step,
// ready) and tile(number, step, place among the step's tiles, ready) start the copies of one; they
// call ready() when they need its place, which may take long. A warp waits for its own places only:
// consumers go on in order, so that no barrier is more than a phase behind.
template <class Shape, class Own, class Tile>
__device__ void load_steps(const Shape& shape, const StreamPlan& plan, bool rounds, const Own& own,
                           const Tile& tile) {
  static_assert(Shape::kRing >= 4 && Shape::kSlots >= Shape::kGroups, "room for a round");
  const int warp = static_cast<int>(threadIdx.x) / 32 % 4;
  // Steps of a round need all their owned rows before the first tile is done with.
  const int ahead = rounds ? Shape::kGroups : 1;
  int next = 0, owned = warp;
#pragma unroll 1
  for (int number = 0; number < plan.steps; ++number) {
    const StreamStep& step = shape.plan()[number];
#pragma unroll 1
    for (; owned < min(number + ahead, plan.steps); owned += 4) {
      own(owned, shape.plan()[owned], [&] {
        if (owned >= Shape::kSlots) mbarrier_wait(shape.own_empty(owned - Shape::kSlots), 0);
      });
      arrive_filled(shape.own_full(owned));
    }
    // Behind the tiles that were loaded with the steps before.
    const int end = next + step.fresh, skipped = max(step.tiles - step.fresh, 0) - next;
#pragma unroll 1
    for (int mine = next + ((warp - next - 2) & 3); mine < end; mine += 4) {
      tile(mine, step, mine + skipped, [&] {
        if (mine >= Shape::kRing) mbarrier_wait(shape.empty(mine), (mine / Shape::kRing - 1) & 1);
      });
      arrive_filled(shape.full(mine));
    }
    next = end;
  }
  asm volatile("cp.async.wait_all;" ::: "memory");  // threads that end take their copies along
}

}  // namespace coterie::cuda
