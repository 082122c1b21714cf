// SPDX-License-Identifier: MIT
// The computing warpgroups of the backward pass of lists on Hopper: 64 owned rows of up to 64
// elements over the tiles of a step (backward_group.cuh).
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/lists/backward.h"
#include "cuda/lists/stream.cuh"
#include "cuda/prim/bands.cuh"
#include "cuda/prim/mma.cuh"
#include "cuda/prim/row_chunk.cuh"
#include "cuda/prim/store.cuh"
#include "cuda/prim/warp.cuh"

namespace coterie::cuda {

// The backward pass of lists on Hopper (backward_sm90a.cu) as a stream of steps
// (stream.cuh): owned rows are queries or keys, and what must be known of rows is copied
// beside them, so that computing warps read nothing from global memory.

// 64 queries as they are in global memory. Rows beyond the list have the range of its last one, and
// zeros.
struct QueryValuesRecord {
  alignas(16) float lse[kStreamRows];
  float delta[kStreamRows];
  int2 range[kStreamRows];  // of key ranks; ListRule::ends: only .y, as given
};
struct WeightedQueriesRecord : QueryValuesRecord {
  RowStatistics stats[kStreamRows];
  float weight[kStreamRows];
};
template <ListForm kForm>
using QueryRecord =
    std::conditional_t<kForm == ListForm::plain, QueryValuesRecord, WeightedQueriesRecord>;

// The same of 64 keys; unused in the plain form.
struct KeyRecord {
  alignas(16) RowStatistics stats[kStreamRows];
};
template <ListForm kForm>
constexpr int kKeyBytes = kForm == ListForm::plain ? 0 : sizeof(KeyRecord) / kStreamRows;
template <ListForm kForm>
constexpr int kQueryBytes = sizeof(QueryRecord<kForm>) / kStreamRows;

// kKeys: keys are owned.
// Short code: what all warps run in turn is more than the instruction caches hold.
template <ListForm kForm>
constexpr int kCopyUnroll = kForm == ListForm::plain ? 2 : 1;
template <ListForm kForm, bool kKeys>
using BackwardStream = StreamShape<kBackwardGroups, 64, 2, backward_ring(kForm, kKeys), 4,
                                   kKeys ? kKeyBytes<kForm> : kQueryBytes<kForm>,
                                   kKeys ? kQueryBytes<kForm> : kKeyBytes<kForm>>;

template <ListForm kForm, bool kKeys>
struct StreamBackwardShape : BackwardStream<kForm, kKeys> {
  using Base = BackwardStream<kForm, kKeys>;
  using Base::Base;
  using Owned = std::conditional_t<kKeys, KeyRecord, QueryRecord<kForm>>;
  using Streamed = std::conditional_t<kKeys, QueryRecord<kForm>, KeyRecord>;
  // Row numbers stay until results are stored, longer than the rows themselves.
  static constexpr int kRowPlaces = Base::kSlots + Base::kGroups;
  static constexpr int kBytes = Base::kBytes + kRowPlaces * kStreamRows * 4;
  static_assert(kBytes <= 227 * 1024, "more than the shared memory of a block");

  __device__ Owned& owned(int step) const {
    return *reinterpret_cast<Owned*>(this->own_facts(step));
  }
  __device__ int* owned_rows(int step) const {
    return reinterpret_cast<int*>(this->memory + Base::kBytes) + step % kRowPlaces * kStreamRows;
  }
  __device__ Streamed& streamed(int place) const {
    return *reinterpret_cast<Streamed*>(this->facts_at(place));
  }
};

// Owned keys are counted by those that are there: more change nothing, as they are not stored.
constexpr int kAnyKeys = 0x3fffffff;

// The loading warps.
template <class T, ListForm kForm, bool kKeys>
struct ListLoader {
  const ListBackwardArgs<T>& args;
  const StreamBackwardShape<kForm, kKeys>& shape;

  // 64 ranks from `first` on, whose rows are `row`: `at`, `slot` of rank 0 of the list.
  __device__ void load_queries(const std::uint32_t (&to)[2], QueryRecord<kForm>& record,
                               const StreamStep& step, int head, const int (&row)[2], int begin,
                               int first, int count, std::int64_t slot, int keys) const {
    const ListProblem& problem = args.problem;
    const Rows<const T> rows[2] = {args.q.rows(step.batch, head, begin),
                                   args.g.rows(step.batch, head, begin)};
    load_list_rows<64, kCopyUnroll<kForm>>(to, rows, row);
    const std::int64_t base = ListProblem::row_base(problem.q, {step.batch, begin, 0}, head);
    const int slot_step = problem.q.index ? 1 : problem.q.lists;
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      const int place = static_cast<int>(threadIdx.x) % 32 + 32 * half;
      const int own_row = half == 0 ? row[0] : row[1], rank = min(first + place, count - 1);
      const bool there = own_row >= 0;
      const std::int64_t by_row = base + max(own_row, 0);
      const std::int64_t by_slot = slot + static_cast<std::int64_t>(rank) * slot_step;
      const auto value = [&](float& to_place, const ListValues& values, float otherwise) {
        if (values.data)
          cp_async_value(&to_place, values.data + (values.by_slot ? by_slot : by_row), there);
        else
          to_place = otherwise;
      };
      value(record.lse[place], args.lse, 0.0f);
      value(record.delta[place], args.delta, 0.0f);
      if (problem.rule == ListRule::ends) {
        cp_async_value(&record.range[place].y, problem.ends + by_slot, true);
      } else {
        const RankRange range = problem.range_at(keys, rank + step.shift);
        record.range[place] = make_int2(range.low, range.high);
      }
      if constexpr (kForm != ListForm::plain) {
        value(record.weight[place], args.weight, 1.0f);
        copy_statistics(record.stats[place], problem.q_stats, by_row, there);
      }
    }
  }
  __device__ void load_keys(const std::uint32_t (&to)[2], KeyRecord& record, const StreamStep& step,
                            int head, const int (&row)[2], int begin) const {
    const ListProblem& problem = args.problem;
    const int key_head = head / problem.group;
    const Rows<const T> rows[2] = {args.k.rows(step.batch, key_head, begin),
                                   args.v.rows(step.batch, head / problem.value_group, begin)};
    load_list_rows<64, kCopyUnroll<kForm>>(to, rows, row);
    if constexpr (kForm != ListForm::plain) {
      const std::int64_t base = ListProblem::row_base(problem.k, {step.batch, begin, 0}, key_head);
#pragma unroll
      for (int half = 0; half < 2; ++half)
        copy_statistics(record.stats[threadIdx.x % 32 + 32 * half], problem.k_stats,
                        base + max(row[half], 0), row[half] >= 0);
    }
  }

  template <class Ready>
  __device__ void own(int number, const StreamStep& step, const Ready& ready) const {
    const ListProblem& problem = args.problem;
    const std::uint32_t to[2] = {shape.own(number, 0), shape.own(number, 1)};
    int row[2];
    list_rows(row, kKeys ? problem.k : problem.q, step.own_at, step.rows);
    ready();
#pragma unroll
    for (int half = 0; half < 2; ++half)
      shape.owned_rows(number)[threadIdx.x % 32 + 32 * half] = row[half];
    if constexpr (kKeys) {
      load_keys(to, shape.owned(number), step, step.head * problem.group, row, step.own_begin);
    } else {
      const int slot_step = problem.q.index ? 1 : problem.q.lists;
      load_queries(to, shape.owned(number), step, step.head, row, step.own_begin, step.first,
                   step.first + step.rows,
                   step.own_slot - static_cast<std::int64_t>(step.first) * slot_step, step.count);
    }
  }
  template <class Ready>
  __device__ void tile(int number, const StreamStep& step, int place, const Ready& ready) const {
    const ListProblem& problem = args.problem;
    const SlotSide& side = kKeys ? problem.q : problem.k;
    int head = step.head;
    if constexpr (kKeys) {
      const int turn = problem.group > 1 ? place / step.span : 0;
      head = head * problem.group + turn;
      place -= turn * step.span;
    }
    const int rank = step.low + place * kStreamRows, slot = number % shape.kRing;
    const std::uint32_t to[2] = {shape.tile_at(slot, 0), shape.tile_at(slot, 1)};
    int row[2];
    list_rows(row, side, step.other_at + (side.index ? rank : rank * side.lists),
              step.count - rank);
    ready();
    if constexpr (kKeys) {
      // Heads that share keys share lists: their slots are a head's apart.
      const std::int64_t heads_before = head - static_cast<std::int64_t>(step.head) * problem.group;
      load_queries(to, shape.streamed(slot), step, head, row, step.other_begin, rank, step.count,
                   step.other_slot + heads_before * problem.q.head_slots, kAnyKeys);
    } else {
      load_keys(to, shape.streamed(slot), step, head, row, step.other_begin);
    }
  }
};

// Calls start with 0 .. 3. Products of different accumulators take turns, as those of one wait for
// each other.
template <class Start>
__device__ __forceinline__ void for_depths(const Start& start) {
#pragma unroll
  for (int k = 0; k < 4; ++k) start(k);
}

// Owned rows of two tensors as left factors, in registers.
template <class T>
struct OwnedFactors {
  std::uint32_t a[2][4][4];

  __device__ OwnedFactors(std::uint32_t first, std::uint32_t second) {
    const std::uint32_t tiles[2] = {first, second};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      FragmentA<T> fragment;
      load_a(fragment, Tile<T, 64>{tiles[i / 4]},
             static_cast<int>(threadIdx.x) % kWarpgroup / 32 * 16, i % 4 * 16);
#pragma unroll
      for (int word = 0; word < 4; ++word) a[i / 4][i % 4][word] = fragment.r[word];
    }
  }
  // Starts depth k of the products with both tensors' tiles.
  __device__ void start(int k, float (&s)[32], float (&d)[32], std::uint32_t first,
                        std::uint32_t second) const {
    const std::uint64_t b[2] = {Bands<T, 64, 64>{first}.by_columns(0, k),
                                Bands<T, 64, 64>{second}.by_columns(0, k)};
    if (k == 0) {
      wgmma<T, 0, 0>(s, a[0][k], b[0]);
      wgmma<T, 0, 0>(d, a[1][k], b[1]);
    } else {
      wgmma<T, 1, 0>(s, a[0][k], b[0]);
      wgmma<T, 1, 0>(d, a[1][k], b[1]);
    }
  }
  // The products with a step's first tile.
  __device__ void multiply(float (&s)[32], float (&d)[32], std::uint32_t first,
                           std::uint32_t second) const {
    wgmma_fence();
    for_depths([&](int k) { start(k, s, d, first, second); });
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_settle(s);
    wgmma_settle(d);
  }
  // A use behind the loop that multiplies: without one ptxas 13.0 gives the registers away in it.
  __device__ void keep(float& value) const {
    std::uint32_t all = 0;
#pragma unroll
    for (int i = 0; i < 32; ++i) all ^= a[i / 16][i / 4 % 4][i % 4];
    asm volatile("{.reg .pred p; setp.eq.u32 p, %1, 0x7f123457; @p add.f32 %0, %0, 0f00000000;}"
                 : "+f"(value)
                 : "r"(all));
  }
};
// Starts depth k of sums: 16 of the rows of a tile, with their factors.
template <class T>
__device__ __forceinline__ void start_sum(int k, float (&sum)[32],
                                          const std::uint32_t (&factor)[4][4], std::uint32_t tile) {
  wgmma<T, 1, 1>(sum, factor[k], Bands<T, 64, 64>{tile}.by_rows(16 * k, 0));
}
// Two neighbouring columns of a record: columns 8 j + 2 (l%4) and the next.
template <class Both, class One>
__device__ __forceinline__ Both column_pair(const One* record, int j) {
  return *reinterpret_cast<const Both*>(record + 8 * j + threadIdx.x % 4 * 2);
}

// What a query of a record sees of `keys` keys.
__device__ __forceinline__ RankRange range_of(int2 range, const ListProblem& problem, int keys) {
  if (problem.rule != ListRule::ends) return {range.x, range.y};
  const int high = min(range.y, keys);
  return {max(high - problem.window, 0), max(high, 0)};
}

// A lane has elements of two owned rows. What becomes of sums at the end of a step is done for one
// row after the other: those of the row at work are i with i % 4 < 2. The same instructions do both
// where they are many, in the way back through the normalisation: what runs once a step takes as
// long as its code.
template <ListForm kForm, class Finish>
__device__ __forceinline__ void for_sides(const Finish& finish) {
  constexpr int kTurns = kForm == ListForm::plain ? 2 : 1;
#pragma unroll kTurns
  for (int side = 0; side < 2; ++side) finish(side);
}
__device__ __forceinline__ void next_side(float (&sum)[32]) {
#pragma unroll
  for (int i = 0; i < 32; i += 4) {
    sum[i] = sum[i + 2];
    sum[i + 1] = sum[i + 3];
  }
}

// Sums of owned row `own` times a factor, to a row of a tensor or to a slot, both aligned.
template <class T>
__device__ __forceinline__ void store_owned(const float (&sum)[32], float factor,
                                            const ListSums<T>& to, const StreamStep& step, int own,
                                            const int* rows, int slot_step, int width) {
  if (!to.wanted()) return;
  const int lane = static_cast<int>(threadIdx.x) % 4;
  const bool there = own < step.rows;
  const std::int64_t row =
      to.rows.data ? rows[own] : step.own_slot + static_cast<std::int64_t>(own) * slot_step;
  if (to.rows.data || to.rounded) {
    const Rows<T> out = to.rows_of({step.batch, step.own_begin, 0}, step.head, width);
    T* row_of = out.row(there ? row : 0) + 8 * lane;
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      std::uint32_t word[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int i = 16 * part + 4 * n;
        word[n] = pack2<T>(sum[i] * factor, sum[i + 1] * factor);
      }
      transpose_quad(word);
      if (there && 32 * part + 8 * lane < width) store_global(row_of + 32 * part, word);
    }
  } else if (there) {
    float* slot_of = static_cast<float*>(to.slots) + row * width + 2 * lane;
#pragma unroll
    for (int j = 0; j < 8; ++j)
      if (8 * j + 2 * lane < width)
        store2(slot_of + 8 * j, sum[4 * j] * factor, sum[4 * j + 1] * factor);
  }
}

// A warp's way along the tiles of the ring, as StreamReader, one tile after the other: so that all
// of it stays in uniform registers.
template <class Shape>
struct TileWalk {
  const Shape& shape;
  int ready = 0, place = 0, phase = 0;  // tiles that it waited for; where the next will be
  int released = 0;

  __device__ explicit TileWalk(const Shape& stream) : shape(stream) {}

  // Waits for tile `number` and, as far as they come by themselves, some that follow below `end`.
  __device__ void await(int number, int end) {
    if (number < ready) return;
    wait_below(min(min(end, number + Shape::kRing / 2), released + Shape::kRing));
    fence_async_proxy();
  }
  // This warp is done with all tiles below `number`, used or not.
  __device__ void release_below(int number) {
#pragma unroll 1
    while (released < number) {
      const int end = min(number, released + Shape::kRing);
      wait_below(end);
      mbarrier_arrive_warp(released, end, [&](int tile) { return shape.empty(tile); });
      released = end;
    }
  }

 private:
  __device__ void wait_below(int number) {
#pragma unroll 1
    for (; ready < number; ++ready) {
      mbarrier_wait(shape.full(place), phase);
      phase ^= place + 1 == Shape::kRing;
      place = Shape::ring_place(place + 1);
    }
  }
};

// Of 8 sums each lane keeps one, over all keys of its warp: of column 8 (l/8) + 2 (l%4) + l/4%2.
__device__ __forceinline__ float reduce_columns(const float (&sum)[8], unsigned lane) {
  float four[4], two[2];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float kept = lane & 16 ? sum[i + 4] : sum[i], sent = lane & 16 ? sum[i] : sum[i + 4];
    four[i] = kept + __shfl_xor_sync(~0u, sent, 16);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float kept = lane & 8 ? four[i + 2] : four[i], sent = lane & 8 ? four[i] : four[i + 2];
    two[i] = kept + __shfl_xor_sync(~0u, sent, 8);
  }
  const float kept = lane & 4 ? two[1] : two[0], sent = lane & 4 ? two[0] : two[1];
  return kept + __shfl_xor_sync(~0u, sent, 4);
}

}  // namespace coterie::cuda
