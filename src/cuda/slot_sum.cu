// SPDX-License-Identifier: MIT
#include "cuda/slot_sum.h"

#include "cuda/device/await.cuh"
#include "cuda/device/token_sums.cuh"
#include "cuda/launch.h"
#include "cuda/tuning.h"

namespace coterie::cuda {
namespace {

constexpr int kBlocks = 4;  // of a multiprocessor

template <class T, int kWidth>
__global__ void __launch_bounds__(kSumThreads, kBlocks)
    sum_kernel(const __grid_constant__ SumSet<T> set) {
  release_next();
  if (!set.beside && !set.listed) await_writes();
  __shared__ typename TokenSums<T, kWidth>::Shared shared;
  int number = 0, head = static_cast<int>(blockIdx.y);
  while (head >= set.sum[number].heads) head -= set.sum[number++].heads;
  const SumArgs<T>& args = set.sum[number];
  if (static_cast<int>(blockIdx.x) < args.tiles.slots) {
    const ItemChunk tile = args.tiles.find(args.tokens.spans, static_cast<int>(blockIdx.x));
    TokenSums<T, kWidth> tokens(args, tile, head, shared);
    if (args.to.aligned && args.to.row < std::int64_t{1} << 30)
      tokens.template add<kSumBatch>(set.listed);
    else
      tokens.template add<1>(set.listed);
  }
  await_writes();  // whoever waits for this kernel waits for the one ahead
}

template <class T>
SumArgs<T> sum_args(const SlotSum& sum, int chunk) {
  return {sum.tokens,
          row_tiles(sum.tokens.spans, sum.tokens.items, chunk),
          static_cast<const T*>(sum.values),
          static_cast<int>(sum.to.size(1)),
          static_cast<int>(sum.value_heads),
          tensor4<T>(sum.to),
          sum.added ? 2 : static_cast<int>(sum.value_heads / sum.to.size(1)),
          sum.added,
          sum.zeroed,
          sum.mean,
          sum.eps,
          sum.weights};
}

}  // namespace

void sum_slots(const AttentionCall& call, const std::vector<SlotSum>& sums, bool beside,
               cudaStream_t stream) {
  dispatch_element(call.op, call.inputs.q.dtype, [&](auto tag) {
    dispatch_head_dim(call.op, call.Dk, [&](auto width) {
      using T = typename decltype(tag)::type;
      constexpr int kWidth = decltype(width)::value;
      SumSet<T> set{};
      std::int64_t rows = 0;
      for (const SlotSum& sum : sums) rows += sum.to.size(0) * sum.to.size(1) * sum.to.size(2);
      int chunk = kSumTokens;  // less, if the GPU were not full some times over
      while (chunk > kSumThreads && rows / chunk < 4ll * kBlocks * multiprocessors()) chunk /= 2;
      set.beside = beside;
      set.listed = !beside;
      unsigned heads = 0, blocks = 0, count = 0;
      for (const SlotSum& sum : sums) {
        if (sum.to.count() == 0) continue;
        SumArgs<T>& args = set.sum[count++];
        set.listed = set.listed && sum.listed;
        args = sum_args<T>(sum, chunk);
        heads += static_cast<unsigned>(args.heads);
        blocks = max(blocks, static_cast<unsigned>(args.tiles.slots));
      }
      if (heads > 0 && blocks > 0)
        launch_early("slot sums", sum_kernel<T, kWidth>, dim3(blocks, heads), kSumThreads, 0,
                     stream, set);
    });
  });
}

}  // namespace coterie::cuda
