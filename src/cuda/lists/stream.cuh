// SPDX-License-Identifier: MIT
// A stream of steps over lists (lists.h), for long-running blocks on Hopper.
//
// A step is a tile of 64 ranks of a list, its owned rows, with the tiles of the other list that it
// uses. A block plans its steps at the start, one thread per step, and numbers the tiles that they
// use: each tile is loaded once and shared by consecutive steps. One warpgroup loads, two or three
// compute and take the steps in turn; owned and streamed tiles are in two rings in shared memory,
// with a full and an empty mbarrier for each place.
//
// If lists differ in length, equal numbers of steps are unequal work: each block then estimates the
// work of all lists, from their lengths alone, and finds its own share (WorkCut). The result of a
// step does not depend on the block that computes it.
#pragma once

#include <climits>
#include <cstdint>

#include "cuda/lists/plan.h"
#include "cuda/prim/load.cuh"
#include "cuda/prim/mma.cuh"
#include "cuda/prim/warp.cuh"
#include "cuda/prim/wgmma.cuh"

namespace coterie::cuda {

// Rows of 64 ranks from `at` on of a side's lists, of which `left` exist: this lane gets the rows
// of ranks lane and lane + 32, -1 beyond the last.
__device__ __forceinline__ void list_rows(int (&row)[2], const SlotSide& side, int at, int left) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int rank = static_cast<int>(threadIdx.x) % 32 + 32 * half;
    row[half] = rank >= left ? -1 : side.index ? side.index[at + rank] : at + rank * side.lists;
  }
}

// Row `number` of rows that are `pitch` bytes apart, in one instruction.
template <class T>
__device__ __forceinline__ T* row_at(T* base, int number, std::uint32_t pitch) {
  std::uint64_t address;
  asm("mad.wide.u32 %0, %1, %2, %3;"
      : "=l"(address)
      : "r"(number), "r"(pitch), "l"(reinterpret_cast<std::uint64_t>(base)));
  return reinterpret_cast<T*>(address);
}

// Copies 64 rows of an item, given by list_rows, of one or more tensors into tiles; zeros for rows
// of -1. Called by a warp. Rows are aligned (Rows::aligned) and less than 2 GiB apart. kUnroll:
// unroll factor of the loop over groups of four rows.
template <int kDim, int kUnroll = kStreamRows / 4, class T, int kTensors>
__device__ __forceinline__ void load_list_rows(const std::uint32_t (&to)[kTensors],
                                               const Rows<const T> (&rows)[kTensors],
                                               const int (&row)[2]) {
  const int lane = static_cast<int>(threadIdx.x) % 32, r = lane / 8, chunk = lane % 8;
  const bool inside = chunk * 8 < rows[0].width;
  const unsigned char* from[kTensors];  // stays valid for columns beyond the width
  std::uint32_t pitch[kTensors], even[kTensors];
#pragma unroll
  for (int x = 0; x < kTensors; ++x) {
    from[x] = reinterpret_cast<const unsigned char*>(rows[x].data + (inside ? chunk * 8 : 0));
    pitch[x] = static_cast<std::uint32_t>(rows[x].pitch * 2);
    even[x] = to[x] + r * 128 + ((chunk ^ r) << 4);
  }
#pragma unroll kUnroll
  for (int i = 0; i < kStreamRows / 4; ++i) {
    const int number = __shfl_sync(~0u, i < 8 ? row[0] : row[1], i % 8 * 4 + r);
    const int valid = max(number, 0);
#pragma unroll
    for (int x = 0; x < kTensors; ++x) {
      const unsigned char* source = row_at(from[x], valid, pitch[x]);
      // Every second group of four rows uses a different permutation of chunks.
      const std::uint32_t target = (even[x] ^ i % 2 * 64) + i * 512;
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
template <int kDim, int kUnroll = kStreamRows / 4, class T>
__device__ __forceinline__ void load_list_rows(std::uint32_t to, const Rows<const T>& rows,
                                               const int (&row)[2]) {
  const std::uint32_t tiles[1] = {to};
  const Rows<const T> tensors[1] = {rows};
  load_list_rows<kDim, kUnroll>(tiles, tensors, row);
}

// Stores a warp's 16 rows of sums, times the factors of a lane's two rows, rounded to T, to a tile
// of 128-byte rows: 16 columns at `at`, the others at ^ 32 bytes, 64 and so on.
template <class T, int kCount>
__device__ __forceinline__ void stage_sums(std::uint32_t at, const float (&sum)[kCount],
                                           const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < kCount / 8; ++i) {
    std::uint32_t word[4];
#pragma unroll
    for (int x = 0; x < 4; ++x)
      word[x] =
          pack2<T>(sum[8 * i + 2 * x] * factor[x % 2], sum[8 * i + 2 * x + 1] * factor[x % 2]);
    stmatrix_x4(at ^ i * 32, word);
  }
  __syncwarp();
}

// Copies 4 or 8 bytes, or zeros.
template <class Value>
__device__ __forceinline__ void cp_async_value(Value* to, const Value* from, bool there) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(to)), "l"(from),
               "n"(sizeof(Value)), "r"(there ? static_cast<int>(sizeof(Value)) : 0)
               : "memory");
}

// Statistics of a row, zeros if the row is absent; neutral values if there are no statistics.
__device__ __forceinline__ void copy_statistics(RowStatistics& to, const RowStatistics* stats,
                                                std::int64_t row, bool there) {
  if (stats)
    cp_async_value(reinterpret_cast<float2*>(&to), reinterpret_cast<const float2*>(stats + row),
                   there);
  else
    to = kNoStatistics;
}

// `at` is a place in the side's index, or a row of the item if there is no index (`SlotList::first`
// and on, `lists` apart).
struct alignas(16) StreamStep {
  int rows, first;             // owned ranks [first, first + rows)
  int low, tiles;              // streamed ranks from `low` on, in this many tiles
  int ring;                    // number of the first streamed tile
  int fresh;                   // tiles loaded with this step: its last ones
  int span;                    // of a round: tiles per streamed head
  int count;                   // ranks of the streamed list
  int shift;                   // r of ListRule for rank 0 of the query list
  std::uint16_t head, batch;   // the query head
  int own_begin, other_begin;  // first row of the item
  int own_at, own_slot;        // of rank `first`
  int other_at, other_slot;    // of rank 0
};

// A computing warp's progress along the ring: tiles waited for, and tiles released.
struct StreamReader {
  int ready = 0, released = 0;
};

// Shared memory of a block. Streamed tiles are of two tensors; facts are metadata bytes per row.
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
  // A place of owned tiles serves a single warpgroup: others may be phases ahead.
  static_assert(kSlots % kGroups == 0, "each place belongs to one warpgroup");
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

  // Called by all threads before plan_steps. Loading warps wait for every place and arrive at it.
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

  // Computing warps. fence_async_proxy() goes between waiting and warpgroup products.
  __device__ void wait_own(int step) const { mbarrier_wait(own_full(step), step / kSlots & 1); }
  __device__ void release_own(int step) const { mbarrier_arrive_warp(own_empty(step)); }
  // Waits for all tiles below `number`, which must be within reach: one lane per tile.
  __device__ void wait_below(int number, StreamReader& reader) const {
    if (number <= reader.ready) return;
    const auto wait = [&](int tile) { mbarrier_wait(full(tile), tile / kRing & 1); };
    mbarrier_wait_warp(reader.ready, number, wait);
    reader.ready = number;
  }
  // This warp is done with all tiles below `number`. Warps release every tile, used or not, after
  // it has arrived, so that the arrivals of a barrier belong to one tile.
  __device__ void release_below(int number, StreamReader& reader) const {
#pragma unroll 1
    while (reader.released < number) {
      const int end = min(number, reach(reader));
      wait_below(end, reader);
      mbarrier_arrive_warp(reader.released, end, [&](int tile) { return empty(tile); });
      reader.released = end;
    }
  }
  // Tiles from here on arrive only after this warp has released others.
  __device__ static int reach(const StreamReader& reader) { return reader.released + kRing; }

  // The place of a number below 2 kRing.
  __device__ static int ring_place(int number) { return number >= kRing ? number - kRing : number; }
};

// Result of plan_steps.
struct StreamPlan {
  int steps, tiles;
};

// Plans the steps [0, count), count <= kStreamPlan: make(number, step) fills all but ring, fresh
// and span. Called by all threads of the block. Steps without rows are dropped. In rounds, one step
// of each warpgroup, all of one list, walk over the same tiles together, any number of them, for
// `heads` heads in turn; else tiles stay until the last step that uses them, unless there are too
// many. Ranges never decrease along a list.
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
      // Tiles of a list are consecutive: numbers as far apart as their tiles are in one list.
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
  // Tiles and steps up to this thread; a long list has more tiles than fit in 22 bits.
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
// ready) and tile(number, step, place among the step's tiles, ready) start the copies of one tile
// and call ready() when they need its place, which may block for long. All warps wait for every
// place, so that tiles are fetched in the order of their use: if rows are far apart (strided lists,
// 128 elements) this saves a tenth of the time. A wait by parity must not miss a phase, so a warp
// that has seen a place free arrives at its barrier: the next phase ends only when all four have
// seen it, however quickly other warps load and release steps without keys.
template <class Shape, class Own, class Tile>
__device__ void load_steps(const Shape& shape, const StreamPlan& plan, bool rounds, const Own& own,
                           const Tile& tile) {
  static_assert(Shape::kRing >= 4 && Shape::kSlots >= Shape::kGroups, "room for a round");
  const int warp = static_cast<int>(threadIdx.x) / 32 % 4;
  // Steps of a round need all their owned rows before the first tile is released.
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
    // After the tiles that were loaded with earlier steps.
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
  asm volatile("cp.async.wait_all;" ::: "memory");  // copies must finish before their threads exit
}

// A tile of a side; ListTile::first is kNoRank if there is none.
struct StepPlace {
  int head;
  ListTile tile;
};

// Step `number` of the tiles of all heads; none below 0.
__device__ inline StepPlace numbered_step(const SlotSide& side, const ListTiles& tiles,
                                          int number) {
  if (number < 0) return {0, {0, 0, kNoRank}};
  const int head = number / tiles.total;
  return {head, tiles.find(side, head, number - head * tiles.total)};
}

// Fills a step except for its tiles in the ring; `rows` is not positive if there is none. kKeys:
// keys are owned.
template <bool kKeys>
__device__ void make_step(const ListProblem& problem, const StepPlace& at, StreamStep& step) {
  const SlotSide& own_side = kKeys ? problem.k : problem.q;
  const SlotSide& other_side = kKeys ? problem.q : problem.k;
  const int head = at.head;
  const ListTile& tile = at.tile;
  if (tile.first == kNoRank) return;
  const ListPair pair = problem.pair(tile.item, kKeys ? head * problem.group : head, tile.list);
  const SlotList& own = kKeys ? pair.k : pair.q;
  const SlotList& other = kKeys ? pair.q : pair.k;
  step.rows = min(own.count - tile.first, kStreamRows);
  if (step.rows <= 0) return;
  RankRange range;
  if constexpr (kKeys)
    range = problem.queries_of(pair, tile.first, tile.first + step.rows);
  else
    range = {problem.range(pair, tile.first).low,
             problem.range(pair, tile.first + step.rows - 1).high};
  const int low = range.low / kStreamRows;
  step.first = tile.first;
  step.low = low * kStreamRows;
  step.tiles = max((range.high + kStreamRows - 1) / kStreamRows - low, 0);
  step.count = other.count;
  step.shift = pair.shift;
  step.head = static_cast<std::uint16_t>(head);
  step.batch = static_cast<std::uint16_t>(pair.q_span.batch);
  step.own_begin = kKeys ? pair.k_span.begin : pair.q_span.begin;
  step.other_begin = kKeys ? pair.q_span.begin : pair.k_span.begin;
  step.own_at =
      own.index ? static_cast<int>(own.index - own_side.index) + tile.first : own.row(tile.first);
  step.own_slot = static_cast<int>(own.slot_of(tile.first));
  step.other_at = other.index ? static_cast<int>(other.index - other_side.index) : other.first;
  step.other_slot = static_cast<int>(other.slot);
}

constexpr int kCutBytes = (kCutLists + 33) * 8 + (kCutBlocks + 1) * 4;  // shared memory
constexpr int kStepWork = 176;  // fixed work of a step, in ranks

// A block's share of the steps of runs, without steps that have no rows.
template <bool kKeys>
class WorkCut {
 public:
  // `shared`: kCutBytes of memory.
  __device__ WorkCut(const ListProblem& problem, unsigned char* shared)
      : problem_(problem),
        before_(reinterpret_cast<std::int64_t*>(shared)),
        lists_(own().lists * own().items * own().heads),
        of_list_(1.0f / static_cast<float>(own().lists)) {}

  // Finds the steps of this block, at most kStreamPlan, and returns their number. Called by all
  // threads, which must synchronise before they reuse the shared memory.
  __device__ int take() {
    const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
    const int blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
    int* begins = reinterpret_cast<int*>(before_ + lists_ + 33);
    bool over = true;
    // If blocks would have too many steps, the fixed work per step is raised, and finally all steps
    // count the same.
#pragma unroll 1
    for (int tries = 0; over && tries < 4; ++tries) {
#pragma unroll 4
      for (int i = thread; i < lists_; i += threads)
        before_[i] = measure(i, kStepWork << 2 * tries);
      __syncthreads();
      add_up();
#pragma unroll 1
      for (int i = thread; i <= blocks; i += threads) begins[i] = begin_of(i, tries < 3);
      __syncthreads();
      over = false;
#pragma unroll 1
      for (int i = thread; i < blocks; i += threads)
        over = over || begins[i + 1] - begins[i] > kStreamPlan;
      over = __syncthreads_or(over);
    }
    first_ = begins[block];
    return begins[block + 1] - first_;
  }

  // Step `place` of this block.
  __device__ StepPlace find(int place) const {
    const int step = first_ + place;
    const int number = last_list([&](std::int64_t sum) { return steps_of(sum) <= step; });
    const int row = row_of(number), item = row / own().heads;
    return {row - item * own().heads,
            {item, number - row * own().lists, (step - steps_of(before_[number])) * kStreamRows}};
  }

 private:
  __device__ const SlotSide& own() const { return kKeys ? problem_.k : problem_.q; }
  // Number of items and heads before that of a list.
  __device__ int row_of(int number) const {
    return static_cast<int>((static_cast<float>(number) + 0.5f) * of_list_);
  }
  __device__ static int steps_of(std::int64_t sum) {
    return static_cast<int>(sum & ((1 << kStepBits) - 1));
  }

  // Work << kStepBits | steps of a list. A step uses the same fraction of the other list as its
  // ranks are of their own, plus what the window adds, which is cut off at the start of a list.
  __device__ std::int64_t measure(int number, int step_work) const {
    const int row = row_of(number), list = number - row * own().lists;
    const auto length = [&](const SlotSide& side, int of_row) {
      const std::int32_t* starts = side.offsets + of_row * (side.lists + 1) + list;
      return starts[1] - starts[0];
    };
    const int queries = length(problem_.q, kKeys ? row * problem_.group : row);
    const int keys = length(problem_.k, kKeys || problem_.group == 1 ? row : row / problem_.group);
    const int steps = ((kKeys ? keys : queries) + kStreamRows - 1) / kStreamRows;
    if (steps == 0) return 0;
    const float window = keys > problem_.window ? __fdividef(problem_.window, keys) : 1.0f;
    const float part = __fdividef(1.0f, steps) + window * (1.0f - 0.5f * window);
    const int met = static_cast<int>(static_cast<float>(kKeys ? queries : keys) * part);
    return (static_cast<std::int64_t>(steps) * (step_work + met)) << kStepBits | steps;
  }

  // Turns the values of lists into sums over the lists before them.
  __device__ void add_up() {
    const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
    std::int64_t* sums = before_ + lists_ + 1;              // of warps
    const int part = (lists_ + threads - 1) / threads | 1;  // odd: lanes use different banks
    const int begin = min(thread * part, lists_), end = min(begin + part, lists_);
    std::int64_t own = 0;
#pragma unroll 1
    for (int i = begin; i < end; ++i) own += before_[i];
    std::int64_t sum = warp_inclusive_scan(own);
    if (thread % 32 == 31) sums[thread / 32] = sum;
    __syncthreads();
    sum -= own;
#pragma unroll 1
    for (int warp = 0; warp < thread / 32; ++warp) sum += sums[warp];
#pragma unroll 1
    for (int i = begin; i < end; ++i) {
      const std::int64_t list = before_[i];
      before_[i] = sum;
      sum += list;
    }
    if (thread == threads - 1) before_[lists_] = sum;
    __syncthreads();
  }

  // The last list for which `holds` is true; it is true for all lists before it.
  template <class Holds>
  __device__ int last_list(const Holds& holds) const {
    int low = 0;
#pragma unroll 1
    for (int high = lists_; high - low > 1;) {
      const int middle = (low + high) / 2;
      (holds(before_[middle]) ? low : high) = middle;
    }
    return low;
  }

  // The first step of a block; all steps of a list count the same.
  __device__ int begin_of(int block, bool by_work) const {
    const int blocks = static_cast<int>(gridDim.x), steps = steps_of(before_[lists_]);
    if (block == blocks) return steps;
    if (!by_work) return min(block * ((steps + blocks - 1) / blocks), steps);
    const float share = __fdividef(static_cast<float>(block), static_cast<float>(blocks));
    const auto work = static_cast<float>(before_[lists_] >> kStepBits);
    const auto target = static_cast<std::int64_t>(work * share);
    const int list = last_list([&](std::int64_t sum) { return sum >> kStepBits <= target; });
    const std::int64_t from = before_[list], to = before_[list + 1];
    const auto passed = static_cast<float>(target - (from >> kStepBits));
    const auto of_list = static_cast<float>((to >> kStepBits) - (from >> kStepBits));
    const auto list_steps = static_cast<float>(steps_of(to) - steps_of(from));
    return steps_of(from) + static_cast<int>(__fdividef(passed, of_list) * list_steps + 0.5f);
  }

  const ListProblem& problem_;
  std::int64_t* before_;  // work << kStepBits | steps of all lists before each; then the total
  int lists_;             // of all heads and items
  float of_list_;         // 1 / lists of a head
  int first_ = 0;         // first step of this block
};

}  // namespace coterie::cuda
