// SPDX-License-Identifier: MIT
// The backward pass of lists on Hopper (attend_list_bwd_sm90a.cu) as a stream of steps
// (list_stream.cuh): owned rows are queries or keys, and what must be known of rows is copied
// beside them, so that computing warps read nothing from global memory.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/device/bands.cuh"
#include "cuda/device/list_bwd_block.cuh"
#include "cuda/device/list_bwd_ranges.cuh"
#include "cuda/device/list_cut.cuh"

namespace coterie::cuda {

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
constexpr int kBackwardGroups = 2;
// Short code: what all warps run in turn is more than the instruction caches hold.
template <ListForm kForm>
constexpr int kCopyUnroll = kForm == ListForm::plain ? 2 : 1;
template <ListForm kForm, bool kKeys>
using BackwardStream =
    StreamShape<kBackwardGroups, 64, 2, kForm == ListForm::plain && !kKeys ? 9 : 8, 4,
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

// Slots of a head of an item.
__device__ __forceinline__ std::int64_t head_slots(const SlotSide& side) {
  const std::int64_t rows = side.spans.rows, lists = side.lists;
  switch (side.layout) {
    case ListLayout::residues:
      return rows;
    case ListLayout::runs:
      return rows * side.per_row;
    case ListLayout::members:
      return lists * side.width;
    default:
      return lists * rows;
  }
}

// Owned keys are counted by those that are there: more change nothing, as they are not stored.
constexpr int kAnyKeys = 0x3fffffff;

// `rows` is 0 where there is no step.
template <class T, bool kKeys>
__device__ void make_step(const ListBackwardArgs<T>& args, const StepPlace& at, StreamStep& step) {
  const ListProblem& problem = args.problem;
  const SlotSide& own_side = kKeys ? problem.k : problem.q;
  const SlotSide& other_side = kKeys ? problem.q : problem.k;
  const int head = at.head;
  const ListTile& tile = at.tile;
  if (tile.first == kNoRank) return;
  const ListPair pair =
      problem.pair<true>(tile.item, kKeys ? head * problem.group : head, tile.list);
  const SlotList& own = kKeys ? pair.k : pair.q;
  const SlotList& other = kKeys ? pair.q : pair.k;
  step.rows = min(own.count - tile.first, kStreamRows);
  if (step.rows <= 0) return;
  RankRange range;
  if constexpr (kKeys)
    range = queries_of<true>(problem, pair, tile.first, tile.first + step.rows);
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
                   step.other_slot + heads_before * head_slots(problem.q), kAnyKeys);
    } else {
      load_keys(to, shape.streamed(slot), step, head, row, step.other_begin);
    }
  }
};

}  // namespace coterie::cuda
