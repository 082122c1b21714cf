// SPDX-License-Identifier: MIT
// The stream of steps (list_stream.cuh) of the forward pass, whose owned rows are queries: how it
// is planned and loaded.
#pragma once

#include <cstdint>

#include "cuda/device/list_cut.cuh"
#include "cuda/device/list_stream_rows.cuh"

namespace coterie::cuda {

constexpr int kForwardGroups = 3;  // warpgroups that compute

template <int kDim, ListForm kForm>
constexpr int kForwardRing = kDim == 128                ? 5
                             : kForm == ListForm::plain ? 10
                                                        : 9;

// Of the loops that copy rows: the longer code of statistics must fit into the instruction caches.
template <int kDim, ListForm kForm>
constexpr int kLoadUnroll = kDim == 64 && kForm == ListForm::normalised ? 8 : kStreamRows / 4;

template <int kDim, ListForm kForm>
using ForwardStream =
    StreamShape<kForwardGroups, kDim, 1, kForwardRing<kDim, kForm>, kDim == 64 ? 6 : 3,
                (sizeof(QueryTileFacts) + kStreamRows - 1) / kStreamRows,
                kForm == ListForm::plain ? 0 : sizeof(RowStatistics)>;

// Shared memory: beside the tiles stands all that computing warps need to know of rows.
template <int kDim, ListForm kForm>
struct ForwardShape : ForwardStream<kDim, kForm> {
  using ForwardStream<kDim, kForm>::StreamShape;

  __device__ QueryTileFacts& queries(int step) const {
    return *reinterpret_cast<QueryTileFacts*>(this->own_facts(step));
  }
  __device__ RowStatistics* keys(int place) const {
    return reinterpret_cast<RowStatistics*>(this->facts_at(place));
  }
};

template <class T>
__device__ void make_query_step(const ListForwardArgs<T>& args, const StepPlace& at,
                                StreamStep& step) {
  const ListProblem& problem = args.problem;
  const int head = at.head;
  const ListTile& tile = at.tile;
  if (tile.first == kNoRank) return;
  const ListPair pair = problem.pair<true>(tile.item, head, tile.list);
  step.rows = min(pair.q.count - tile.first, kStreamRows);
  // Members of a list end before its last slot: the log-sum-exps of empty slots.
  if (problem.q.layout == ListLayout::members && args.slot_rows && args.lse)
    for (int rank = tile.first + max(step.rows, 0);
         rank < min(tile.first + kStreamRows, problem.q.width); ++rank)
      args.lse[pair.q.slot_of(rank)] = -INFINITY;
  if (step.rows <= 0) return;
  const int low = problem.range(pair, tile.first).low / kStreamRows;
  const int high = problem.range(pair, tile.first + step.rows - 1).high;
  step.first = tile.first;
  step.low = low * kStreamRows;
  step.tiles = (high + kStreamRows - 1) / kStreamRows - low;
  step.count = pair.k.count;
  step.shift = pair.shift;
  step.head = static_cast<std::uint16_t>(head);
  step.batch = static_cast<std::uint16_t>(pair.q_span.batch);
  step.own_begin = pair.q_span.begin;
  step.other_begin = pair.k_span.begin;
  step.own_at = pair.q.index ? static_cast<int>(pair.q.index - problem.q.index) + tile.first
                             : pair.q.row(tile.first);
  step.own_slot = static_cast<int>(pair.q.slot_of(tile.first));
  step.other_at = pair.k.index ? static_cast<int>(pair.k.index - problem.k.index) : pair.k.first;
}

constexpr int kForwardLookers = 4;  // all loading warps

// As load_steps, but all warps wait for every place, so that tiles are fetched in the order of
// their need: where rows lie far apart (strided lists, 128 elements) that takes a tenth less time.
// A wait by parity must not miss a phase. So a warp that has seen a place free arrives at its
// barrier: the next phase ends only when all four have looked, however quickly steps without keys
// are loaded by others and released.
template <class Shape, class Own, class Tile>
__device__ void load_steps_in_order(const Shape& shape, const StreamPlan& plan, bool rounds,
                                    const Own& own, const Tile& tile) {
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

// The loading warps.
template <class T, int kDim, ListForm kForm>
__device__ void load_query_steps(const ListForwardArgs<T>& args,
                                 const ForwardShape<kDim, kForm>& shape, const StreamPlan& plan,
                                 bool rounds) {
  using Shape = ForwardShape<kDim, kForm>;
  const ListProblem& problem = args.problem;
  const int lane = threadIdx.x % 32;
  const auto load_queries = [&](int number, const StreamStep& step, const auto& ready) {
    int row[2];
    list_rows(row, problem.q, step.own_at, step.rows);
    const float scale = problem.score_scale(step.head) * kLog2e;
    const std::int64_t base =
        ListProblem::row_base(problem.q, {step.batch, step.own_begin, 0}, step.head);
    RowStatistics stats[2] = {kNoStatistics, kNoStatistics};
    if (kForm == ListForm::normalised && problem.q_stats) {
      stats[0] = problem.q_stats[base + max(row[0], 0)];
      stats[1] = problem.q_stats[base + max(row[1], 0)];
    }
    ready();
    load_list_rows<kDim, kLoadUnroll<kDim, kForm>>(
        shape.own(number, 0), args.q.rows(step.batch, step.head, step.own_begin), row);
    QueryTileFacts& tile = shape.queries(number);
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      const int own_row = half == 0 ? row[0] : row[1];
      const int place = lane + 32 * half, last = min(place, step.rows - 1);
      QueryFact fact{{0, 0}, scale, 0.0f};
      if (problem.rule == ListRule::ends) {
        const int high = min(problem.ends[step.own_slot + last], step.count);
        fact.range = {max(high - problem.window, 0), max(high, 0)};
      } else {
        fact.range = problem.range_at(step.count, step.first + last + step.shift);
      }
      if constexpr (kForm == ListForm::normalised) {
        const RowStatistics own = half == 0 ? stats[0] : stats[1];
        fact.exponent *= own.inverse;
        fact.mean = own.mean * static_cast<float>(problem.width);
      }
      tile.facts[place] = fact;
      tile.row[place] = own_row < 0 ? -1 : args.slot_rows ? step.own_slot + place : own_row;
    }
    tile.out =
        args.slot_rows ? args.slot_rows : args.out.rows(step.batch, step.head, step.own_begin).data;
    tile.lse = args.lse && !args.slot_rows ? args.lse + base : args.lse;
  };
  int head = -1, key_head = 0, value_head = 0;  // of the tile before: divisions take long
  const auto load_keys = [&](int number, const StreamStep& step, int place, const auto& ready) {
    if (step.head != head) {
      head = step.head;
      key_head = head / problem.group;
      value_head = head / problem.value_group;
    }
    int row[2];
    const int rank = step.low + place * kStreamRows;
    list_rows(row, problem.k, step.other_at + (problem.k.index ? rank : rank * problem.k.lists),
              step.count - rank);
    ready();
    const std::uint32_t tiles[2] = {shape.tile(number, 0), shape.tile(number, 1)};
    const Rows<const T> rows[2] = {args.k.rows(step.batch, key_head, step.other_begin),
                                   args.v.rows(step.batch, value_head, step.other_begin)};
    load_list_rows<kDim, kLoadUnroll<kDim, kForm>>(tiles, rows, row);
    if constexpr (kForm == ListForm::normalised) {
      if (!problem.k_stats) return;
      const RowStatistics* stats =
          problem.k_stats +
          (static_cast<std::int64_t>(step.batch) * problem.k.heads + key_head) *
              problem.k.spans.rows +
          step.other_begin;
#pragma unroll
      for (int half = 0; half < 2; ++half)
        cp_async_value(shape.keys(number % Shape::kRing) + lane + 32 * half,
                       stats + max(row[half], 0), row[half] >= 0);
    }
  };
  load_steps_in_order(shape, plan, rounds, load_queries, load_keys);
}

}  // namespace coterie::cuda
