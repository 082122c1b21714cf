// SPDX-License-Identifier: MIT
// Which steps of a stream (stream.cuh) a block takes. Where lists differ in length, equal
// numbers of steps are unequal work: blocks then measure all lists, by their lengths alone, and
// each finds its own share. What a step computes does not depend on the block that does it.
#pragma once

#include <cstdint>

#include "cuda/lists/stream.cuh"
#include "cuda/prim/warp.cuh"

namespace coterie::cuda {

// A tile of a side; ListTile::first is kNoRank where there is none.
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

// What a step is, but for its tiles in the ring; `rows` is not above 0 where there is none. kKeys:
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

constexpr int kCutBytes = (kCutLists + 33) * 8 + (kCutBlocks + 1) * 4;  // of shared memory
constexpr int kStepWork = 176;  // of a step beside its tiles: as of so many ranks

// A block's share of the steps of runs, without those that have no rows.
template <bool kKeys>
class WorkCut {
 public:
  // `shared` has kCutBytes.
  __device__ WorkCut(const ListProblem& problem, unsigned char* shared)
      : problem_(problem),
        before_(reinterpret_cast<std::int64_t*>(shared)),
        lists_(own().lists * own().items * own().heads),
        of_list_(1.0f / static_cast<float>(own().lists)) {}

  // Finds the steps of this block, kStreamPlan at most, and returns their number. By all threads,
  // which synchronise before they use the shared memory for something else.
  __device__ int take() {
    const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
    const int blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
    int* begins = reinterpret_cast<int*>(before_ + lists_ + 33);
    bool over = true;
    // Where blocks would have too many steps, steps without many tiles are taken for longer, and at
    // last all for the same.
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
  // Items and heads before that of a list.
  __device__ int row_of(int number) const {
    return static_cast<int>((static_cast<float>(number) + 0.5f) * of_list_);
  }
  __device__ static int steps_of(std::int64_t sum) {
    return static_cast<int>(sum & ((1 << kStepBits) - 1));
  }

  // Work << kStepBits | steps of a list. A step meets as much of the other list as its own ranks
  // are of theirs, and what the window adds, which the start of a list cuts off.
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

  // Turns what lists have into what those before them have.
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

  // The last list whose sum `holds`, as those of all lists before it do.
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

  // The first step of a block; the steps of a list count the same.
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
  std::int64_t* before_;  // work << kStepBits | steps of all lists before each, and of all
  int lists_;             // of all heads and items
  float of_list_;         // 1 / lists of a head
  int first_ = 0;         // step of this block
};

}  // namespace coterie::cuda
