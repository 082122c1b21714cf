// SPDX-License-Identifier: MIT
// CAST's mix on Hopper's warpgroup products. A block keeps the surrogates and summaries of an
// (item, head) in shared memory. Its warpgroups take tiles of 64 tokens in turn, which they load
// themselves (device/cast_gather.cuh). The weights of a token's own clusters are taken out of the
// softmax's before these are multiplied with the summaries, and multiply the inner outputs.
#include "cuda/cast_mix.h"

#include "cuda/device/await.cuh"
#include "cuda/device/cast_tokens.cuh"
#include "cuda/launch.h"
#include "cuda/tuning.h"

namespace coterie::cuda {
namespace {

// Surrogates and summaries of a run, by all threads.
template <class T, int kDim>
__device__ void load_clusters(const MixArgs<T>& args, const MixMemory<T, kDim>& memory,
                              const MixRun& run) {
  using Memory = MixMemory<T, kDim>;
  const CastShape& shape = args.shape;
  const T* tables[2] = {
      args.surrogates + static_cast<std::int64_t>(run.head) * shape.clusters * shape.D,
      args.summaries + shape.cluster(run.item, run.head, 0) * shape.D};
  for (int i = 0; i < 2 * memory.tiles; ++i)
#pragma unroll
    for (int band = 0; band < kDim / 64; ++band) {
      const Tile<T, 64> to{memory.clusters(i / 2, i % 2) + band * Memory::kBand};
      const int chunk = static_cast<int>(threadIdx.x) % 8, column = band * 64 + chunk * 8;
      for (int r = static_cast<int>(threadIdx.x) / 8; r < kMixRows; r += blockDim.x / 8) {
        const int row = i / 2 * kMixRows + r;
        const bool there = row < shape.clusters && column < shape.D;
        cp_async16(to.chunk(r, chunk),
                   tables[i % 2] + (there ? static_cast<std::int64_t>(row) * shape.D + column : 0),
                   there ? 16 : 0);
      }
    }
  cp_async_commit();
  for (int tile = static_cast<int>(threadIdx.x) / 32; tile < memory.tiles;
       tile += static_cast<int>(blockDim.x) / 32) {
    const ClusterBits there(
        args.summary_lse ? args.summary_lse + shape.cluster(run.item, run.head, 0) : nullptr,
        tile * kMixRows, shape.clusters);
    if (threadIdx.x % 32 == 0)
      asm volatile("st.shared.b64 [%0], %1;" ::"r"(memory.bits(tile)), "l"(there.bits) : "memory");
  }
  cp_async_wait<0>();
  fence_async_proxy();
  __syncthreads();
}

// Calls body(run) for the runs of this block.
template <class T, class Body>
__device__ __forceinline__ void for_runs(const MixArgs<T>& args, const Body& body) {
  const ItemChunks& tiles = args.tiles;
  const std::int64_t units = static_cast<std::int64_t>(tiles.slots) * args.shape.H;
  int unit = static_cast<int>(units * blockIdx.x / gridDim.x);
  const int last = static_cast<int>(units * (blockIdx.x + 1) / gridDim.x);
  while (unit < last) {
    const int slot = unit % tiles.slots;
    const ItemChunk tile = tiles.find(args.shape.tokens, slot);
    MixRun run{tile.item, unit / tiles.slots, tile.split, 0, tile.span};
    // The slots of an item, of which the last may be unused.
    const int next = tile.item + 1 < tiles.items
                         ? tiles.first_slot(args.shape.tokens, tile.item + 1)
                         : tiles.slots;
    const int here = min(last - unit, next - slot);
    unit += here;
    run.end = min(run.first + here, tiles.count(run.span.length));
    if (run.first >= run.end) continue;
    body(run);
  }
}

template <class T, int kDim>
__global__ void __launch_bounds__(MixMemory<T, kDim>::kMost* kWarpgroup, 1)
    mix_sm90a_kernel(const __grid_constant__ MixArgs<T> args) {
  await_previous();
  extern __shared__ __align__(1024) unsigned char shared[];
  const MixMemory<T, kDim> memory(shared_address(shared),
                                  (args.shape.clusters + kMixRows - 1) / kMixRows);
  for_runs(args, [&](const MixRun& run) {
    __syncthreads();  // what was there before is done with
    if (threadIdx.x == 0) MixPointers{memory.pointers()}.set_all(args, run);
    __syncthreads();
    MixTokens<T, kDim>(args, memory, run)
        .work(run.first + static_cast<int>(threadIdx.x) / kWarpgroup,
              [&] { load_clusters(args, memory, run); });
  });
}

template <class T, int kDim>
void launch(const MixArgs<T>& args, cudaStream_t stream) {
  using Memory = MixMemory<T, kDim>;
  const int tiles = (args.shape.clusters + kMixRows - 1) / kMixRows;
  const int groups = Memory::groups(tiles);
  const std::int64_t units = static_cast<std::int64_t>(args.tiles.slots) * args.shape.H;
  const std::int64_t most = (units + groups - 1) / groups;
  launch_early("cast mix", mix_sm90a_kernel<T, kDim>,
               static_cast<unsigned>(min(std::int64_t{multiprocessors()}, most)),
               groups * kWarpgroup, Memory::bytes(tiles, groups), stream, args);
}

}  // namespace

template <class T>
bool mix_suits_sm90a(const MixArgs<T>& args) {
  const int tiles = (args.shape.clusters + kMixRows - 1) / kMixRows;
  const int groups =
      args.shape.D > 64 ? MixMemory<T, 128>::groups(tiles) : MixMemory<T, 64>::groups(tiles);
  // Bytes between rows are counted in 32 bits.
  const auto close = [](std::int64_t pitch) { return pitch >= 0 && pitch < 1ll << 30; };
  return !args.shape.laplace && args.q.aligned && args.out.aligned && close(args.q.row) &&
         close(args.out.row) && groups > 0;
}

template <class T>
void mix_sm90a(MixArgs<T> args, cudaStream_t stream) {
  args.tiles = token_tiles(args.shape, kMixRows);
  if (args.tiles.slots == 0) return;
  dispatch_head_dim("cast", args.shape.D,
                    [&](auto width) { launch<T, decltype(width)::value>(args, stream); });
}

template bool mix_suits_sm90a(const MixArgs<Bf16>&);
template bool mix_suits_sm90a(const MixArgs<F16>&);
template void mix_sm90a(MixArgs<Bf16>, cudaStream_t);
template void mix_sm90a(MixArgs<F16>, cudaStream_t);

}  // namespace coterie::cuda
