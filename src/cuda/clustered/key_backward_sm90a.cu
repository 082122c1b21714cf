// SPDX-License-Identifier: MIT
// key_gradient_kernel of centroid_backward.cu by warpgroup products, for 16-bit types, where
// centroid_backward_sm90a.cu does not serve. A block has a multiprocessor to itself and walks a
// range of keys. Two warpgroups take 64 keys in turn and walk the centroids of all query heads of
// their key head; a third one loads keys and values into three places. Up to 512 centroids (rows
// of 128 elements: 256) stay in shared memory, more are loaded in halves, one ahead.
#include "cuda/clustered/backward.h"
#include "cuda/clustered/key_tile.cuh"
#include "cuda/launch/dispatch.h"
#include "cuda/launch/launch.h"
#include "cuda/prim/dependent.cuh"
#include "cuda/prim/load.cuh"

namespace coterie::cuda {
namespace {

constexpr int kKeyThreads = 2 * kWarpgroup, kThreads = 3 * kWarpgroup;
constexpr int kPlaces = 3;

template <class T, int kWidth>
struct Shape {
  static constexpr int kRows = 32768 / kWidth;  // centroids in shared memory
  static constexpr int kBuffer = kRows / 2;     // of which are loaded at a time when streamed
  using Centroids = Bands<T, kWidth, kRows>;
  using Keys = Bands<T, kWidth, 64>;
  static constexpr int kKeys = 2 * Centroids::kBytes;
  static constexpr int kStats = kKeys + kPlaces * 2 * Keys::kBytes;
  static constexpr int kBarriers = kStats + 2 * kRows * 4;
  static constexpr int kSharedBytes = kBarriers + (2 * kPlaces + 1) * 8;
};

// What a block works on, and its shared memory. 64 keys have a number; warpgroup g has those with
// number % 2 = g.
template <class T, int kWidth>
struct Block {
  using S = Shape<T, kWidth>;
  const BackwardArgs<T>& args;
  ItemChunk keys;
  int key_head, total;     // centroids
  std::int64_t first_row;  // of the centroids
  typename S::Centroids mean, dout;
  float *lse, *delta;

  __device__ Block(const BackwardArgs<T>& a, unsigned char* memory)
      : args(a),
        mean{shared_address(memory)},
        dout{mean.base + S::Centroids::kBytes},
        lse(reinterpret_cast<float*>(memory + S::kStats)),
        delta(lse + S::kRows) {
    const BackwardShape& shape = args.shape;
    const int key_heads = shape.H / shape.group;
    key_head = static_cast<int>(blockIdx.x) % key_heads;
    keys = shape.key_ranges.find(shape.spans.k, static_cast<int>(blockIdx.x) / key_heads);
    total = shape.group * shape.clusters;
    first_row =
        (static_cast<std::int64_t>(keys.item) * shape.H + key_head * shape.group) * shape.clusters;
  }

  __device__ int numbers() const { return (keys.end - keys.begin + 63) / 64; }
  __device__ int first_key(int number) const { return keys.begin + 64 * number; }
  // Keys (tensor 0) or values.
  __device__ typename S::Keys place(int number, int tensor) const {
    return {mean.base + S::kKeys + (number % kPlaces * 2 + tensor) * S::Keys::kBytes};
  }
  // Barriers of a place: its keys are there, or may be overwritten.
  __device__ std::uint32_t full(int number) const {
    return mean.base + S::kBarriers + number % kPlaces * 8;
  }
  __device__ std::uint32_t free(int number) const { return full(number) + kPlaces * 8; }
  // Where the two computing warpgroups wait for each other.
  __device__ PartBarrier<kKeyThreads> computing() const {
    return {3, mean.base + S::kBarriers + 2 * kPlaces * 8};
  }

  // kLoaded centroids from `from` on, into rows from `row` on, by the computing warpgroups. Rows
  // beyond the last get weights exp2(0) = 1, but their mean and dout are zero.
  template <int kLoaded>
  __device__ void load_centroids(int row, int from) const {
    const int pitch = args.shape.pitch, count = total - from;
    const std::int64_t first = first_row + min(from, total);
    mean.template load<kLoaded, kKeyThreads>(
        row, {args.scratch.mean + first * pitch, pitch, pitch, true}, 0, count);
    dout.template load<kLoaded, kKeyThreads>(
        row, {args.scratch.dout + first * pitch, pitch, pitch, true}, 0, count);
    for (int r = threadIdx.x; r < kLoaded; r += kKeyThreads) {
      const std::int64_t at = r < count ? first + r : 0;
      cp_async4(shared_address(lse + row + r), args.scratch.row_lse + at, r < count);
      cp_async4(shared_address(delta + row + r), args.scratch.row_delta + at, r < count);
    }
    cp_async_commit();
  }
  __device__ void await_centroids() const {
    cp_async_wait<0>();
    fence_async_proxy();
    computing().sync();
  }

  // By the third warpgroup: all keys of the block, as places become free.
  __device__ void stream_keys() const {
    const ItemSpan& span = keys.span;
    const Rows<const T> k = args.k.rows(span.batch, key_head, span.begin);
    const Rows<const T> v = args.v.rows(span.batch, key_head, span.begin);
#pragma unroll 1
    for (int number = 0; number < numbers(); ++number) {
      if (number >= kPlaces) mbarrier_wait(free(number), (number / kPlaces - 1) & 1);
      const int first = first_key(number), count = keys.end - first;
      load_rows(place(number, 0), k, first, count);
      load_rows(place(number, 1), v, first, count);
      cp_async_commit();
      cp_async_wait<0>();
      fence_async_proxy();
      mbarrier_arrive_warp(full(number));
    }
  }
};

// A computing warpgroup.
template <class T, int kWidth>
__device__ __forceinline__ void walk_keys(const Block<T, kWidth>& block) {
  using S = Shape<T, kWidth>;
  const BackwardArgs<T>& args = block.args;
  const ItemSpan& span = block.keys.span;
  const int buffers = (block.total + S::kBuffer - 1) / S::kBuffer;
  const bool resident = buffers <= 2;
  for (int buffer = 0; buffer < (resident ? buffers : 1); ++buffer)
    block.template load_centroids<S::kBuffer>(buffer * S::kBuffer, buffer * S::kBuffer);
  block.await_centroids();
  Rows<T> dk = args.dk.rows(span.batch, block.key_head, span.begin);
  Rows<T> dv = args.dv.rows(span.batch, block.key_head, span.begin);
  if (!args.dk.data) dk.data = nullptr;
  if (!args.dv.data) dv.data = nullptr;
  const float scale = args.shape.scale * kLog2e;
  const int group = uniform(static_cast<int>(threadIdx.x) / kWarpgroup);
  const int steps = (block.numbers() + 1) / 2;  // of both warpgroups: they load centroids together
  KeyTile<T, kWidth> keys;
  int loaded = 0;  // number of the buffer in use, counted over all of them
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    const int number = uniform(2 * step + group);
    const bool there = number < block.numbers();
    const int first = block.first_key(number), count = block.keys.end - first;
    if (there) mbarrier_wait(block.full(number), number / kPlaces & 1);
    const auto k = uniform_rows(block.place(number, 0), 0);
    const auto v = uniform_rows(block.place(number, 1), 0);
    keys.clear();
#pragma unroll 1
    for (int buffer = 0; buffer < buffers; ++buffer, ++loaded) {
      if (!resident) {  // the next one is loaded while this one is used
        keys.finish();
        block.await_centroids();
        block.template load_centroids<S::kBuffer>((loaded + 1) % 2 * S::kBuffer,
                                                  (buffer + 1) % buffers * S::kBuffer);
      }
      if (!there) continue;
      const int start = (resident ? buffer : loaded % 2) * S::kBuffer;
      const int end = start + min(block.total - buffer * S::kBuffer, S::kBuffer);
#pragma unroll 1
      for (int row = start; row < end; row += 64)
        keys.add(k, v, uniform_rows(block.mean, row), uniform_rows(block.dout, row),
                 block.lse + row, block.delta + row, scale, count);
    }
    keys.finish();
    if (there) mbarrier_arrive_warp(block.free(number));
    if (there) keys.store(args.shape, dk, dv, first, count);
  }
  cp_async_wait<0>();
}

template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads, 1)
    key_gradient_kernel(const __grid_constant__ BackwardArgs<T> args) {
  release_next();
  extern __shared__ __align__(1024) unsigned char memory[];
  const Block<T, kWidth> block(args, memory);
  if (threadIdx.x < kPlaces) {
    mbarrier_init(block.full(static_cast<int>(threadIdx.x)), kWarpgroup / 32 * kWarpArrivals);
    mbarrier_init(block.free(static_cast<int>(threadIdx.x)), kWarpgroup / 32 * kWarpArrivals);
  }
  if (threadIdx.x == 0) block.computing().init();
  __syncthreads();
  await_writes();
  if (block.keys.begin >= block.keys.end) return;
  if (threadIdx.x < kKeyThreads) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    walk_keys(block);
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    block.stream_keys();
  }
}

}  // namespace

template <class T>
void centroid_key_gradients_sm90a(const BackwardArgs<T>& args, cudaStream_t stream) {
  const int blocks = args.shape.key_ranges.slots * (args.shape.H / args.shape.group);
  if (blocks == 0) return;
  dispatch_head_dim("clustered", args.shape.pitch, [&](auto width) {
    constexpr int kWidth = decltype(width)::value;
    launch_early("key_gradient_sm90a", key_gradient_kernel<T, kWidth>,
                 static_cast<unsigned>(blocks), kThreads, Shape<T, kWidth>::kSharedBytes, stream,
                 args);
  });
}

template void centroid_key_gradients_sm90a(const BackwardArgs<Bf16>&, cudaStream_t);
template void centroid_key_gradients_sm90a(const BackwardArgs<F16>&, cudaStream_t);

}  // namespace coterie::cuda
