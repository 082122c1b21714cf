// SPDX-License-Identifier: MIT
// Forward pass of attention over lists on Hopper: a stream of steps (list_stream.cuh) whose owned
// rows are queries, with outputs in registers.
#include "cuda/device/await.cuh"
#include "cuda/device/list_stream_load.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/hopper.h"
#include "cuda/launch.h"

namespace coterie::cuda {
namespace {

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
    list_forward_sm90a_kernel(const __grid_constant__ ListForwardArgs<T> args, int units,
                              bool rounds, bool unequal, int fold) {
  await_writes();  // first: sums behind this kernel read the slots of tokens early
  release_next();
  extern __shared__ __align__(1024) unsigned char memory[];
  const ForwardShape<kDim, kForm> shape(memory);
  shape.template init<kForwardLookers>();
  static_assert(kCutBytes <= ForwardShape<kDim, kForm>::kPlanAt, "room to measure lists");
  const bool by_work = kForm != ListForm::plain && unequal;
  WorkCut<false> cut(args.problem, memory);
  const int begin = blockIdx.x * units;
  const int count =
      by_work ? cut.take() : min(units, args.tiles.total * args.problem.q.heads - begin);
  const StreamPlan plan = plan_steps(shape, count, rounds, 1, [&](int place, StreamStep& step) {
    const StepPlace at =
        by_work ? cut.find(place) : numbered_step(args.problem.q, args.tiles, begin + place);
    make_query_step(args, at, step);
  });
  if (threadIdx.x >= kGroups * kWarpgroup) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kProducerRegisters<kDim, kFold>));
    load_query_steps<T, kDim, kForm>(args, shape, plan, rounds);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kConsumerRegisters<kDim, kFold>));
    consume<T, kDim, kForm, kFold>(args, shape, plan, fold);
  }
}

// Tiles of keys that the queries of a tile span, at most; for ends, and lists of unknown lengths,
// what is to be expected.
std::int64_t span_tiles(const AttentionCall& call, const ListPlan& plan) {
  std::int64_t keys = call.S;
  if (plan.keys.layout == ListLayout::residues) keys = (call.S + plan.lists - 1) / plan.lists;
  if (plan.keys.layout == ListLayout::members) keys = plan.keys.width;
  if (plan.ranges.rule == ListRule::sliding || plan.ranges.rule == ListRule::ends)
    keys = min(keys, kTile + plan.ranges.window);
  if (plan.ranges.rule == ListRule::blocked)
    keys = min(keys, kTile + plan.ranges.window * (1 + plan.ranges.before + plan.ranges.after));
  return (keys + kTile - 1) / kTile;
}

// Ranks, places and slots are ints there, and rows are copied 16 bytes at a time.
template <class T>
bool takes(const AttentionCall& call, const ListPlan& plan, const ListForwardArgs<T>& args) {
  constexpr std::int64_t kMost = 1ll << 30;
  const auto near = [](const auto& x) { return x.aligned && x.row < kMost / 2; };
  return on_hopper() && list_form(plan) != ListForm::general && call.Dk <= 128 &&
         call.N * plan.queries.per_row < kMost / 4 && call.S * plan.keys.per_row < kMost / 4 &&
         list_query_slots(call, plan) < kMost && list_key_slots(call, plan) < kMost &&
         call.H <= 0xffff && call.B <= 0xffff && near(args.q) && near(args.k) && near(args.v) &&
         (args.slot_rows || near(args.out));
}

// Tiles of a sliding window, where steps may weigh the tile in which windows begin and the one in
// which they end as one: those of a step stand in the ring together. 0: they may not.
int fold_tiles(const ListRanges& ranges) {
  constexpr int kMost = kForwardRing<64, ListForm::plain> - 4;
  if (ranges.rule != ListRule::sliding || ranges.window <= kTile || ranges.window > kMost * kTile)
    return 0;
  return static_cast<int>((ranges.window + kTile - 1) / kTile);
}

template <class T, int kDim, ListForm kForm, bool kFold = false>
void launch(const ListForwardArgs<T>& args, std::int64_t span, cudaStream_t stream, int fold = 0) {
  using Shape = ForwardShape<kDim, kForm>;
  const int total = args.tiles.total * args.problem.q.heads, places = multiprocessors();
  const int waves = (total + places * kStreamPlan - 1) / (places * kStreamPlan);
  const int units = (total + places * waves - 1) / (places * waves);
  // Three steps at work and one on its way share a ring that holds what they meet.
  const bool rounds = span + 3 > Shape::kRing;
  const int most = min(places * waves, total);
  const bool by_work = cut_by_work(kForm, args.problem, args.problem.q, total, most, rounds);
  const int blocks = by_work ? most : (total + units - 1) / units;
  launch_early("list_forward_sm90a", list_forward_sm90a_kernel<T, kDim, kForm, kFold>,
               dim3(static_cast<unsigned>(blocks)), Shape::kThreads, Shape::kBytes, stream, args,
               units, rounds, by_work, fold);
}

}  // namespace

template <class T>
bool list_forward_sm90a(const AttentionCall& call, const ListPlan& plan,
                        const ListForwardArgs<T>& given, cudaStream_t stream) {
  if (!takes(call, plan, given)) return false;
  ListForwardArgs<T> args = given;
  args.tiles = list_tiles(args.problem.q, kStreamBits);
  if (static_cast<std::int64_t>(args.tiles.total) * args.problem.q.heads >= 1ll << 30) return false;
  const std::int64_t span = span_tiles(call, plan);
  const bool plain = list_form(plan) == ListForm::plain;
  const int fold = fold_tiles(plan.ranges);
  if (call.Dk <= 64 && plain && fold > 0)
    launch<T, 64, ListForm::plain, true>(args, span, stream, fold);
  else if (call.Dk <= 64 && plain)
    launch<T, 64, ListForm::plain>(args, span, stream);
  else if (call.Dk <= 64)
    launch<T, 64, ListForm::normalised>(args, span, stream);
  else if (plain)
    launch<T, 128, ListForm::plain>(args, span, stream);
  else
    launch<T, 128, ListForm::normalised>(args, span, stream);
  return true;
}

template bool list_forward_sm90a(const AttentionCall&, const ListPlan&,
                                 const ListForwardArgs<Bf16>&, cudaStream_t);
template bool list_forward_sm90a(const AttentionCall&, const ListPlan&, const ListForwardArgs<F16>&,
                                 cudaStream_t);

}  // namespace coterie::cuda
