// SPDX-License-Identifier: MIT
// Forward pass of attention over lists on Hopper: a stream of steps (list_stream.cuh) whose owned
// rows are queries, with outputs in registers.
#include "cuda/device/list_stream_load.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/hopper.h"
#include "cuda/launch.h"

namespace coterie::cuda {
namespace {

constexpr int kTile = kStreamRows, kGroups = kForwardGroups;
template <int kDim>
constexpr int kProducerRegisters = kDim == 64 ? 80 : 56;
template <int kDim>
constexpr int kConsumerRegisters = kDim == 64 ? 144 : 152;

template <class T, int kDim, ListForm kForm>
__device__ void consume(const ListForwardArgs<T>& args, const ForwardShape<kDim, kForm>& shape,
                        const StreamPlan& plan) {
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
    started = false;
    if (first < end) {
      std::uint32_t p[4][4];
      int tile = first, begin = uniform(step.low);
#pragma unroll 1
      for (;;) {
        rows.finish(problem, s, shape.keys(tile % Shape::kRing));
        rows.attend(s, begin, shape.queries(number), p);
        if (++tile == end) break;
        begin += kTile;
        if (tile >= reader.ready) {
          shape.release_below(min(tile - 1, keep), reader);
          await(tile, end);
        }
        const Ring values{keys + kTensor};
        keys += 2 * kTensor;
        if (keys == ring + Shape::kRing * 2 * kTensor) keys = ring;
        // Products begin and end in one step: the assembler does them one by one otherwise.
        wgmma_fence();
        values.add_products(rows.out, p);
        queries.scores(s, Ring{keys});
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_settle(s);
        rows.settle();
      }
      const Ring values{keys + kTensor};
      // The first scores of the next step, where its first tile, and those that are loaded before
      // its queries, come by themselves.
      if (Shape::kSlots > kGroups && after_tiles > 0 &&
          keep + max(after_tiles - after_fresh, 1) <= Shape::reach(reader)) {
        started = true;
        shape.wait_own(after);
        queries.load(shape.own(after, 0), shape.queries(after).facts[0].exponent < 0.0f);
        await(keep, keep + after_tiles);
        wgmma_fence();
        values.add_products(rows.out, p);
        queries.scores(s, Ring{ring + keep % Shape::kRing * (2 * kTensor)});
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_settle(s);
        rows.settle();
      } else {
        wgmma_fence();
        values.add_products(rows.out, p);
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

template <class T, int kDim, ListForm kForm>
__global__ void __launch_bounds__((kGroups + 1) * kWarpgroup, 1)
    list_forward_sm90a_kernel(const __grid_constant__ ListForwardArgs<T> args, int units,
                              bool rounds, bool unequal) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const ForwardShape<kDim, kForm> shape(memory);
  shape.init();
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
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kProducerRegisters<kDim>));
    load_query_steps<T, kDim, kForm>(args, shape, plan, rounds);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kConsumerRegisters<kDim>));
    consume<T, kDim, kForm>(args, shape, plan);
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

template <class T, int kDim, ListForm kForm>
void launch(const ListForwardArgs<T>& args, std::int64_t span, cudaStream_t stream) {
  using Shape = ForwardShape<kDim, kForm>;
  const int total = args.tiles.total * args.problem.q.heads, places = multiprocessors();
  const int waves = (total + places * kStreamPlan - 1) / (places * kStreamPlan);
  const int units = (total + places * waves - 1) / (places * waves);
  const auto kernel = list_forward_sm90a_kernel<T, kDim, kForm>;
  allow_shared_memory(kernel, Shape::kBytes);
  // Three steps at work and one on its way share a ring that holds what they meet.
  const bool rounds = span + 3 > Shape::kRing;
  const int most = min(places * waves, total);
  const bool by_work = cut_by_work(kForm, args.problem, args.problem.q, total, most, rounds);
  const int blocks = by_work ? most : (total + units - 1) / units;
  kernel<<<blocks, Shape::kThreads, Shape::kBytes, stream>>>(args, units, rounds, by_work);
  COTERIE_LAUNCH("list_forward_sm90a");
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
  if (call.Dk <= 64 && plain)
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
