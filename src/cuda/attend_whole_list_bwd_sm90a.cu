// SPDX-License-Identifier: MIT
// Backward pass of attention of lists that fit a block as a whole (lists.h): one kernel of five
// products, where attend_list_bwd_sm90a.cu has two of eight. A block takes one list after the
// other: one warpgroup loads, two compute, each of which owns half of the keys.
#include "cuda/device/await.cuh"
#include "cuda/device/whole_list_load.cuh"
#include "cuda/device/whole_list_products.cuh"
#include "cuda/list_bwd.h"

namespace coterie::cuda {
namespace {

constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;

template <class T>
__global__ void __launch_bounds__(WholeShape::kThreads, 1)
    whole_list_kernel(const __grid_constant__ ListBackwardArgs<T> args,
                      const __grid_constant__ WholeCleared cleared, const int lists) {
  await_writes();  // first: sums behind this kernel read the slots of tokens early
  release_next();
  extern __shared__ __align__(1024) unsigned char memory[];
  const WholeShape shape(memory);
  shape.init();
  if (threadIdx.x >= 2 * kWarpgroup) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kProducerRegisters));
    load_lists<T>(args, cleared, shape, lists);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kConsumerRegisters));
    compute_lists<T>(args, shape, lists);
  }
}

}  // namespace

template <class T>
bool takes_whole_lists(const ListBackwardArgs<T>& args) {
  const ListProblem& problem = args.problem;
  // One tile alone keeps a block less busy than a stream of them.
  const auto short_lists = [](const SlotSide& side) {
    return side.layout == ListLayout::members && side.width > kStreamRows &&
           side.width <= kWholeRanks;
  };
  const bool from_first = problem.rule == ListRule::all || problem.rule == ListRule::causal ||
                          (problem.rule == ListRule::ends && problem.window >= problem.k.width);
  return problem.width <= 64 && problem.group == 1 && short_lists(problem.q) &&
         short_lists(problem.k) && from_first && !args.delta.data && !args.dq.rows.data &&
         !args.dk.rows.data && !args.dv.rows.data && !args.dq_products;
}

template <class T>
void launch_whole_lists_sm90a(const ListBackwardArgs<T>& args, const TensorView (&cleared)[3],
                              cudaStream_t stream) {
  const SlotSide& queries = args.problem.q;
  const int lists = queries.items * queries.lists * queries.heads;
  if (lists == 0) return;
  WholeCleared spans;
  for (int i = 0; i < 3; ++i) spans.tensor[i] = ClearedSpan(cleared[i], lists);
  launch_early("whole_list_kernel", whole_list_kernel<T>,
               dim3(static_cast<unsigned>(min(lists, multiprocessors()))), WholeShape::kThreads,
               WholeShape::kBytes, stream, args, spans, lists);
}

#define COTERIE_INSTANTIATE(T)                                                                  \
  template bool takes_whole_lists<T>(const ListBackwardArgs<T>&);                               \
  template void launch_whole_lists_sm90a<T>(const ListBackwardArgs<T>&, const TensorView(&)[3], \
                                            cudaStream_t)
COTERIE_INSTANTIATE(Bf16);
COTERIE_INSTANTIATE(F16);
#undef COTERIE_INSTANTIATE

}  // namespace coterie::cuda
