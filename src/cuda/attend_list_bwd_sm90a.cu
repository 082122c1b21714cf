// SPDX-License-Identifier: MIT
// Backward pass of attention of lists over lists (attend_list_bwd.cu) by warpgroup products. Rows
// of up to 64 elements are streamed through shared memory by warps of their own
// (device/list_bwd_stream.cuh); wider ones take the kernels of device/list_bwd.cuh.
#include "cuda/device/list_bwd_keys.cuh"
#include "cuda/device/list_bwd_queries.cuh"
#include "cuda/device/list_bwd_wgmma.cuh"
#include "cuda/list_bwd.h"

namespace coterie::cuda {
namespace {

constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;

// The steps of a block.
struct StepRun {
  int heads, of_head;  // all steps, and those of a head
  int count;           // of a block, at most
  bool rounds;         // three steps walk over their tiles together
  bool by_work;        // WorkCut says which

  // Number `place` of a block's, -1 if there is none. In rounds blocks take three at a time, forth
  // and back, those of the longest ranges first where ranges grow or shrink along a list.
  __device__ int number(int place, bool keys) const {
    const int block = static_cast<int>(blockIdx.x), blocks = static_cast<int>(gridDim.x);
    if (!rounds) {
      const int number = block * count + place;
      return number < heads * of_head ? number : -1;
    }
    const int turn = place / kBackwardGroups,
              threes = (of_head + kBackwardGroups - 1) / kBackwardGroups;
    const int three = turn * blocks + (turn % 2 ? blocks - 1 - block : block);
    const int unit = keys ? three / heads : threes - 1 - three / heads;
    const int step = unit * kBackwardGroups + place % kBackwardGroups;
    return three < threes * heads && step < of_head ? three % heads * of_head + step : -1;
  }
};

template <class T, ListForm kForm, bool kKeys>
__global__ void __launch_bounds__(StreamBackwardShape<kForm, kKeys>::kThreads, 1)
    list_stream_kernel(const __grid_constant__ ListBackwardArgs<T> args,
                       const __grid_constant__ ListTiles tiles, const StepRun run) {
  await_previous();
  extern __shared__ __align__(1024) unsigned char memory[];
  const StreamBackwardShape<kForm, kKeys> shape(memory);
  shape.template init<0>();
  static_assert(kCutBytes <= StreamBackwardShape<kForm, kKeys>::kPlanAt, "room to measure lists");
  const ListProblem& problem = args.problem;
  const bool by_work = kForm != ListForm::plain && run.by_work;
  WorkCut<kKeys> cut(problem, memory);
  const int count = by_work ? cut.take() : run.count;
  const auto make = [&](int place, StreamStep& step) {
    const StepPlace at =
        by_work ? cut.find(place)
                : numbered_step(kKeys ? problem.k : problem.q, tiles, run.number(place, kKeys));
    make_step<T, kKeys>(args, at, step);
  };
  const StreamPlan plan = plan_steps(shape, count, run.rounds, kKeys ? problem.group : 1, make);
  if (threadIdx.x >= shape.kGroups * kWarpgroup) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kProducerRegisters));
    const ListLoader<T, kForm, kKeys> loader{args, shape};
    load_steps(
        shape, plan, run.rounds,
        [&](int number, const StreamStep& step, const auto& ready) {
          loader.own(number, step, ready);
        },
        [&](int number, const StreamStep& step, int place, const auto& ready) {
          loader.tile(number, step, place, ready);
        });
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kConsumerRegisters));
    if constexpr (kKeys)
      key_steps<T, kForm>(args, shape, plan);
    else
      query_steps<T, kForm>(args, shape, plan);
  }
}

// Tiles of the other side that 64 rows meet, at most; for ends, and lists of unknown lengths, what
// is to be expected.
std::int64_t span_tiles(const ListProblem& problem, const SlotSide& other) {
  std::int64_t ranks = other.spans.rows;
  if (other.layout == ListLayout::residues) ranks = (ranks + other.lists - 1) / other.lists;
  if (other.layout == ListLayout::members) ranks = other.width;
  const std::int64_t window = problem.window;
  if (problem.rule == ListRule::sliding || problem.rule == ListRule::ends)
    ranks = min(ranks, kStreamRows + window);
  if (problem.rule == ListRule::blocked)
    ranks = min(ranks, kStreamRows + window * (1 + problem.before + problem.after));
  return (ranks + kStreamRows - 1) / kStreamRows;
}

template <class T, ListForm kForm, bool kKeys>
void launch_stream(const ListBackwardArgs<T>& args, cudaStream_t stream) {
  using Shape = StreamBackwardShape<kForm, kKeys>;
  const ListProblem& problem = args.problem;
  const SlotSide& side = kKeys ? problem.k : problem.q;
  const ListTiles tiles = list_tiles(side, kStreamBits);
  if (tiles.total == 0) return;
  StepRun run{side.heads, tiles.total, 0, false, false};
  // Steps at work share a ring that holds what they meet, and some tiles on their way.
  run.rounds = span_tiles(problem, kKeys ? problem.q : problem.k) + 2 > Shape::kRing ||
               (kKeys && problem.group > 1);
  const auto split = [](int whole, int parts) { return (whole + parts - 1) / parts; };
  const int unit = run.rounds ? kBackwardGroups : 1;
  const int units = run.rounds ? split(tiles.total, unit) * side.heads : tiles.total * side.heads;
  const int waves = split(units, multiprocessors() * (kStreamPlan / unit));
  const int of_block = split(units, multiprocessors() * waves);
  run.count = of_block * unit;
  const int most = min(multiprocessors() * waves, units);
  run.by_work = cut_by_work(kForm, problem, side, units, most, run.rounds);
  const int blocks = run.by_work ? most : split(units, of_block);
  launch_early("list_stream_kernel", list_stream_kernel<T, kForm, kKeys>,
               dim3(static_cast<unsigned>(blocks)), Shape::kThreads, Shape::kBytes, stream, args,
               tiles, run);
}

template <class T, ListForm kForm>
void launch_form(const ListBackwardArgs<T>& args, const ListKernels& wanted, cudaStream_t stream) {
  if (wanted.queries) launch_stream<T, kForm, false>(args, stream);
  if (wanted.keys) launch_stream<T, kForm, true>(args, stream);
}

}  // namespace

template <class T, int kWidth>
void launch_lists_sm90a(const ListBackwardArgs<T>& args, ListForm form, const ListKernels& wanted,
                        cudaStream_t stream) {
  if constexpr (kWidth == 64) {
    if (form == ListForm::plain)
      launch_form<T, ListForm::plain>(args, wanted, stream);
    else
      launch_form<T, ListForm::normalised>(args, wanted, stream);
  } else {
    // Of wide rows one form serves both, for the sake of the time to compile.
    launch_lists<GroupProducts<T, kWidth>, ListForm::normalised>(args, wanted, stream);
  }
}

#define COTERIE_INSTANTIATE(T, width)                                              \
  template void launch_lists_sm90a<T, width>(const ListBackwardArgs<T>&, ListForm, \
                                             const ListKernels&, cudaStream_t)
COTERIE_INSTANTIATE(Bf16, 64);
COTERIE_INSTANTIATE(Bf16, 128);
COTERIE_INSTANTIATE(F16, 64);
COTERIE_INSTANTIATE(F16, 128);
#undef COTERIE_INSTANTIATE

}  // namespace coterie::cuda
