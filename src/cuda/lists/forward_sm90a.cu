// SPDX-License-Identifier: MIT
// Forward pass of attention over lists on Hopper: a stream of steps (stream.cuh) whose owned
// rows are queries, with outputs in registers.
#include <cstdint>

#include "cuda/launch/device.h"
#include "cuda/launch/launch.h"
#include "cuda/lists/cut.cuh"
#include "cuda/lists/stream_rows.cuh"
#include "cuda/prim/dependent.cuh"
#include "cuda/prim/warp.cuh"

namespace coterie::cuda {
namespace {

// The stream of steps (stream.cuh) of the forward pass, whose owned rows are queries: how it
// is planned and loaded.

// Of the loops that copy rows: the longer code of statistics must fit into the instruction caches.
template <int kDim, ListForm kForm>
constexpr int kLoadUnroll = kDim == 64 && kForm == ListForm::normalised ? 8 : kStreamRows / 4;

template <int kDim, ListForm kForm>
using ForwardStream =
    StreamShape<kForwardGroups, kDim, 1, forward_ring(kDim, kForm), kDim == 64 ? 6 : 3,
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
  make_step<false>(args.problem, at, step);
  // Members of a list end before its last slot: the log-sum-exps of empty slots.
  const SlotSide& side = args.problem.q;
  if (side.layout != ListLayout::members || !args.slot_rows || !args.lse) return;
  const std::int64_t slot =
      ((static_cast<std::int64_t>(at.tile.item) * side.heads + at.head) * side.lists +
       at.tile.list) *
      side.width;
  const int first = at.tile.first, last = min(first + kStreamRows, side.width);
  for (int rank = first + max(step.rows, 0); rank < last; ++rank) args.lse[slot + rank] = -INFINITY;
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
  load_steps(shape, plan, rounds, load_queries, load_keys);
}

constexpr int kTile = kStreamRows, kGroups = kForwardGroups;
template <int kDim, bool kFold>
constexpr int kProducerRegisters = kDim == 64 && !kFold ? 80 : 56;
template <int kDim, bool kFold>
constexpr int kConsumerRegisters = kDim == 64 && !kFold ? 144 : 152;

// The first and the last tile of a step, of which no query sees the same column: they are weighed
// as one. s: scores of the first, and afterwards of the second tile.
template <class T, class Rows>
__device__ void attend_ends(Rows& rows, const StepQueries<T, 64>& queries,
                            const QueryTileFacts& facts, float (&s)[32], int begin, int distance,
                            const RingTile<T, 64>& first, const RingTile<T, 64>& second,
                            const RingTile<T, 64>& last) {
  float far[32];
  wgmma_fence();
  queries.scores(far, last);
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_settle(far);
  rows.fold(s, far, begin, distance, facts);
  std::uint32_t p[4][4], p_far[4][4];
  rows.weigh_first(s, p);
  rows.split(p, p_far, begin, facts);
  wgmma_fence();
  last.values().template add_products<0>(rows.out, p_far);
  first.values().template add_products<1>(rows.out, p);
  queries.scores(s, second);
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_settle(s);
  rows.settle();
}

// With kFold, steps of more than `fold` tiles weigh their first and last tile as one.
template <class T, int kDim, ListForm kForm, bool kFold>
__device__ void consume(const ListForwardArgs<T>& args, const ForwardShape<kDim, kForm>& shape,
                        const StreamPlan& plan, int fold) {
  using Shape = ForwardShape<kDim, kForm>;
  constexpr int kChunk = Shape::kRing / 2;  // tiles that are waited for at a time
  const ListProblem& problem = args.problem;
  StreamReader reader;
  // Tiles from `tile` on of a step that ends before `end`, as far as they come by themselves.
  const auto await = [&](int tile, int end) {
    shape.wait_below(min(min(end, tile + kChunk), Shape::reach(reader)), reader);
    fence_async_proxy();
  };
  using Ring = RingTile<T, kDim>;
  constexpr int kTensor = Shape::kTensorBytes / 16;
  const std::uint32_t ring = uniform(shape.base / 16 | 1 << 16);
  const std::uint32_t wrap = ring + Shape::kRing * 2 * kTensor;
  bool started = false;  // the first scores of a step are there
  StepQueries<T, kDim> queries;
  float s[32];
#pragma unroll 1
  for (int number = uniform(threadIdx.x / kWarpgroup); number < plan.steps; number += kGroups) {
    const StreamStep& step = shape.plan()[number];
    const int first = uniform(step.ring), end = first + uniform(step.tiles);
    const int after = number + kGroups;
    int keep = plan.tiles, after_tiles = 0, after_fresh = 0;  // of the next step
    if (after < plan.steps) {
      keep = uniform(shape.plan()[after].ring);
      after_tiles = uniform(shape.plan()[after].tiles);
      after_fresh = uniform(shape.plan()[after].fresh);
    }
    std::uint32_t keys = ring + first % Shape::kRing * (2 * kTensor);
    if (!started) {
      shape.release_below(first, reader);
      shape.wait_own(number);
      await(first, end);
      if (first < end) {
        queries.load(shape.own(number, 0), shape.queries(number).facts[0].exponent < 0.0f);
        wgmma_fence();
        queries.scores(s, Ring{keys});
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_settle(s);
      }
    }
    GroupRows<T, kDim, kForm> rows;
    rows.start(shape.queries(number));
    if (!kFold || first == end) rows.clear();
    started = false;
    if (first < end) {
      std::uint32_t p[4][4];
      int tile = first, stop = end, begin = uniform(step.low);
      if constexpr (kFold) {
        const QueryTileFacts& facts = shape.queries(number);
        // Later queries have no say in the order in which an earlier one's weights are summed.
        if (end - first > fold && facts.facts[0].range.high <= begin + fold * kTile + 1) {
          shape.release_below(first, reader);
          await(end - kChunk, end);
          const std::uint32_t second = keys + 2 * kTensor == wrap ? ring : keys + 2 * kTensor;
          const std::uint32_t last = uniform(ring + (end - 1) % Shape::kRing * (2 * kTensor));
          attend_ends<T>(rows, queries, facts, s, begin, fold * kTile, Ring{keys}, Ring{second},
                         Ring{last});
          ++tile;
          --stop;
          begin += kTile;
          keys = second;
        } else {
          rows.clear();
        }
      }
#pragma unroll 1
      for (;;) {
        if constexpr (kFold) keys = uniform_trips(keys);
        rows.finish(problem, s, shape.keys(tile % Shape::kRing), shape.queries(number));
        rows.prepare(s, begin, shape.queries(number));
        while (rows.overflows(s, p)) continue;
        if (++tile == stop) break;
        begin += kTile;
        if (tile >= reader.ready) {
          shape.release_below(min(tile - 1, keep), reader);
          await(tile, end);
        }
        const Ring values = Ring{keys}.values();
        keys += 2 * kTensor;
        if (keys == wrap) keys = ring;
        // Products begin and end in one step: the assembler does them one by one otherwise.
        wgmma_fence();
        values.template add_products<1>(rows.out, p);
        queries.scores(s, Ring{keys});
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_settle(s);
        rows.settle();
      }
      if constexpr (kFold) keys = uniform_trips(keys);
      const Ring values = Ring{keys}.values();
      // The first scores of the next step, where its first tile, and those that are loaded before
      // its queries, come by themselves.
      if (Shape::kSlots > kGroups && after_tiles > 0 &&
          keep + max(after_tiles - after_fresh, 1) <= Shape::reach(reader)) {
        started = true;
        shape.wait_own(after);
        queries.load(shape.own(after, 0), shape.queries(after).facts[0].exponent < 0.0f);
        await(keep, keep + after_tiles);
        wgmma_fence();
        values.template add_products<1>(rows.out, p);
        queries.scores(s, Ring{ring + keep % Shape::kRing * (2 * kTensor)});
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_settle(s);
        rows.settle();
      } else {
        wgmma_fence();
        values.template add_products<1>(rows.out, p);
        wgmma_commit();
        wgmma_wait<0>();
        rows.settle();
      }
    }
    shape.release_below(min(end, keep), reader);
    if (!StepQueries<T, kDim>::kHeld) sync_group();  // all have read the queries' place
    rows.write(args, shape.queries(number), shape.own(number, 0));
    shape.release_own(number);
  }
  shape.release_below(plan.tiles, reader);
}

template <class T, int kDim, ListForm kForm, bool kFold>
__global__ void __launch_bounds__((kGroups + 1) * kWarpgroup, 1)
    list_forward_sm90a_kernel(const __grid_constant__ ListForwardArgs<T> args, const StreamRun run,
                              int fold) {
  await_writes();  // first: sums behind this kernel read the slots of tokens early
  release_next();
  extern __shared__ __align__(1024) unsigned char memory[];
  const ForwardShape<kDim, kForm> shape(memory);
  shape.init();
  static_assert(kCutBytes <= ForwardShape<kDim, kForm>::kPlanAt, "room to measure lists");
  const bool by_work = kForm != ListForm::plain && run.by_work;
  WorkCut<false> cut(args.problem, memory);
  const int count = by_work ? cut.take() : run.count;
  const StreamPlan plan = plan_steps(shape, count, run.rounds, 1, [&](int place, StreamStep& step) {
    const StepPlace at =
        by_work ? cut.find(place) : numbered_step(args.problem.q, args.tiles, run.in_order(place));
    make_query_step(args, at, step);
  });
  if (threadIdx.x >= kGroups * kWarpgroup) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kProducerRegisters<kDim, kFold>));
    load_query_steps<T, kDim, kForm>(args, shape, plan, run.rounds);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kConsumerRegisters<kDim, kFold>));
    consume<T, kDim, kForm, kFold>(args, shape, plan, fold);
  }
}

template <class T, int kDim, ListForm kForm, bool kFold = false>
void launch(const ListForwardArgs<T>& args, const ListForwardPlan& plan, cudaStream_t stream) {
  using Shape = ForwardShape<kDim, kForm>;
  launch_early("list_forward_sm90a", list_forward_sm90a_kernel<T, kDim, kForm, kFold>,
               dim3(static_cast<unsigned>(plan.run.blocks)), Shape::kThreads, Shape::kBytes, stream,
               args, plan.run, plan.fold);
}

}  // namespace

template <class T>
void launch_list_forward_sm90a(const ListForwardArgs<T>& args, const ListForwardPlan& plan,
                               cudaStream_t stream) {
  const bool plain = plan.form == ListForm::plain, narrow = plan.problem.width <= 64;
  if (plan.fold > 0)
    launch<T, 64, ListForm::plain, true>(args, plan, stream);
  else if (narrow && plain)
    launch<T, 64, ListForm::plain>(args, plan, stream);
  else if (narrow)
    launch<T, 64, ListForm::normalised>(args, plan, stream);
  else if (plain)
    launch<T, 128, ListForm::plain>(args, plan, stream);
  else
    launch<T, 128, ListForm::normalised>(args, plan, stream);
}

template void launch_list_forward_sm90a(const ListForwardArgs<Bf16>&, const ListForwardPlan&,
                                        cudaStream_t);
template void launch_list_forward_sm90a(const ListForwardArgs<F16>&, const ListForwardPlan&,
                                        cudaStream_t);

}  // namespace coterie::cuda
