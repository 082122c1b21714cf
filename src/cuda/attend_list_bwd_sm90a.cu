// SPDX-License-Identifier: MIT
// Backward pass of attention of lists over lists (attend_list_bwd.cu) by warpgroup products. Rows
// of up to 64 elements are streamed through shared memory by warps of their own
// (device/list_bwd_stream.cuh); wider ones take the kernels of device/list_bwd.cuh.
#include <algorithm>

#include "cuda/device/list_bwd_keys.cuh"
#include "cuda/device/list_bwd_producer.cuh"
#include "cuda/device/list_bwd_queries.cuh"
#include "cuda/device/list_bwd_wgmma.cuh"
#include "cuda/list_bwd.h"

namespace coterie::cuda {
namespace {

constexpr int kProducerRegisters = 88, kConsumerRegisters = 208;

template <class T, ListForm kForm, bool kKeys>
__global__ void __launch_bounds__(kStreamThreads, 1)
    list_stream_kernel(const __grid_constant__ ListBackwardArgs<T> args,
                       const __grid_constant__ ListTiles tiles) {
  await_previous();
  extern __shared__ __align__(1024) unsigned char bytes[];
  auto& memory = *reinterpret_cast<StreamMemory<kForm, kKeys>*>(bytes);
  memory.start();
  const int heads = kKeys ? args.problem.k.heads : args.problem.q.heads;
  const int total = tiles.total * heads, blocks = static_cast<int>(gridDim.x);
  // Blocks take rounds forth and back, and those of the longest ranges first where ranges grow or
  // shrink along a list.
  const auto number_of = [&](int round) {
    const int place = static_cast<int>(blockIdx.x);
    return round * blocks + (round % 2 ? blocks - 1 - place : place);
  };
  if (threadIdx.x >= kStreamGroups * kWarpgroup) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kProducerRegisters));
    ListProducer<T, kForm, kKeys> producer{args, tiles, memory};
    const int team = static_cast<int>(threadIdx.x) % kWarpgroup / (32 * kStreamTeamWarps);
#pragma unroll 1
    for (int round = team; number_of(round) < total; round += kStreamTeams) {
      const int unit = number_of(round) / heads;
      producer.produce(round, number_of(round) % heads, kKeys ? unit : tiles.total - 1 - unit);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kConsumerRegisters));
    int rounds = total / blocks;
    if (number_of(rounds) < total) ++rounds;
    if constexpr (kKeys)
      key_rounds<T, kForm>(args, memory, rounds);
    else
      query_rounds<T, kForm>(args, memory, rounds);
  }
}

template <class T, ListForm kForm, bool kKeys>
void launch_stream(const ListBackwardArgs<T>& args, cudaStream_t stream) {
  const SlotSide& side = kKeys ? args.problem.k : args.problem.q;
  const ListTiles tiles = list_tiles(side, kStreamRoundBits);
  const int blocks = std::min(tiles.total * side.heads, multiprocessors());
  if (blocks > 0)
    launch_early("list_stream_kernel", list_stream_kernel<T, kForm, kKeys>, dim3(blocks),
                 kStreamThreads, sizeof(StreamMemory<kForm, kKeys>), stream, args, tiles);
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
    using P = GroupProducts<T, kWidth>;
    if (form == ListForm::plain)
      launch_lists<P, ListForm::plain>(args, wanted, stream);
    else
      launch_lists<P, ListForm::normalised>(args, wanted, stream);
  }
}

#define COTERIE_INSTANTIATE(T, width)                                              \
  template void launch_lists_sm90a<T, width>(const ListBackwardArgs<T>&, ListForm, \
                                             const ListKernels&, cudaStream_t)
COTERIE_INSTANTIATE(__nv_bfloat16, 64);
COTERIE_INSTANTIATE(__nv_bfloat16, 128);
COTERIE_INSTANTIATE(__half, 64);
COTERIE_INSTANTIATE(__half, 128);
#undef COTERIE_INSTANTIATE

}  // namespace coterie::cuda
