// SPDX-License-Identifier: MIT
// Backward pass of windows along all rows of an item (lists.h): one kernel of five products, where
// attend_list_bwd_sm90a.cu has two of eight. A block walks along many rows. Its four
// warpgroups do everything, each with 64 of the keys that are in sight.
#include "cuda/device/await.cuh"
#include "cuda/device/window_walk_products.cuh"
#include "cuda/list_bwd.h"

namespace coterie::cuda {
namespace {

template <class T>
__global__ void __launch_bounds__(WalkShape::kThreads, 1)
    window_kernel(const __grid_constant__ ListBackwardArgs<T> args, const WalkCut cut) {
  await_previous();
  extern __shared__ __align__(1024) unsigned char memory[];
  const WalkShape shape(memory);
  WalkGroup<T> group(args, shape);
  group.walk(cut);
}

}  // namespace

template <class T>
bool takes_windows(const ListBackwardArgs<T>& args) {
  const ListProblem& problem = args.problem;
  const SlotSide &q = problem.q, &k = problem.k;
  const auto all_rows = [](const SlotSide& side) {
    return side.layout == ListLayout::residues && side.lists == 1;
  };
  const auto near = [](const Tensor4<T>& rows) { return rows.row < 1 << 29; };
  const std::int64_t rows = max(q.spans.rows, k.spans.rows);
  // Of shorter windows the two kernels of attend_list_bwd_sm90a.cu leave out what is not seen.
  return problem.rule == ListRule::sliding && problem.window > kWalkWindow / 2 &&
         problem.window <= kWalkWindow && all_rows(q) && all_rows(k) && problem.group == 1 &&
         problem.value_group == 1 && problem.width <= 64 &&
         q.spans.cu_seqlens == k.spans.cu_seqlens && !args.delta.data && !args.lse.by_slot &&
         args.dq.rows.data && !args.dk.slots && !args.dv.slots && near(args.dq.rows) &&
         near(args.dk.rows) && near(args.dv.rows) &&
         (rows / kStreamRows + 8) * q.items * q.heads < 1 << 30;
}

template <class T>
void launch_windows_sm90a(const ListBackwardArgs<T>& args, cudaStream_t stream) {
  const ListProblem& problem = args.problem;
  const SlotSide &q = problem.q, &k = problem.k;
  const auto tiles = [](int ranks) { return (max(ranks, 0) + kStreamRows - 1) / kStreamRows; };
  const int queries = q.spans.rows, keys = k.spans.rows;
  WalkCut cut{};
  cut.reach = problem.causal ? 0 : (problem.window + 1) / 2 - 1;
  cut.per_item = 1 + tiles(cut.reach);
  if (q.spans.cu_seqlens) {
    cut.per_head = q.items * cut.per_item + queries / kStreamRows;
    cut.total = cut.per_head * q.heads;
  } else {
    const int shift = (problem.offset_rows ? keys - queries : 0) + cut.reach;
    const int lead = tiles(shift) * kStreamRows;
    cut.per_head = q.spans.lengths || k.spans.lengths
                       ? tiles(max(queries, keys)) + cut.per_item
                       : max(tiles(queries + lead), tiles(keys + lead - shift));
    cut.total = cut.per_head * q.items * q.heads;
  }
  if (cut.total == 0) return;
  const auto split = [](int whole, int parts) { return (whole + parts - 1) / parts; };
  cut.per_block = split(cut.total, multiprocessors());
  launch_early("window_kernel", window_kernel<T>,
               dim3(static_cast<unsigned>(split(cut.total, cut.per_block))), WalkShape::kThreads,
               WalkShape::kBytes, stream, args, cut);
}

#define COTERIE_INSTANTIATE(T)                                \
  template bool takes_windows<T>(const ListBackwardArgs<T>&); \
  template void launch_windows_sm90a<T>(const ListBackwardArgs<T>&, cudaStream_t)
COTERIE_INSTANTIATE(Bf16);
COTERIE_INSTANTIATE(F16);
#undef COTERIE_INSTANTIATE

}  // namespace coterie::cuda
