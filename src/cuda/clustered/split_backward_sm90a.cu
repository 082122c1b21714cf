// SPDX-License-Identifier: MIT
// centroid_backward.cu by warpgroup products, for 16-bit types on Hopper, where
// centroid_backward_sm90a.cu does not serve: more than 256 centroids of a key head, or rows of more
// than 64 elements. Two kernels; scores are computed in both.
//
// key_gradient_sm90a_kernel: dk, dv. Block number = range of keys * key heads + key head; it has a
// multiprocessor to itself. Two warpgroups take 64 keys in turn and walk the centroids of all query
// heads of their key head; a third one loads keys and values into three places. Up to 512 centroids
// (rows of 128 elements: 256) stay in shared memory, more are loaded in halves, one ahead: 128 KiB,
// and 48 or 96 KiB of keys and values. setmaxnreg gives the first two warpgroups 232 registers.
//
// mean_gradient_sm90a_kernel: dmean. Block number = (chunk of keys * key heads + key head) * tiles
// of 128 centroids + tile. Two warpgroups with a multiprocessor to themselves; each owns 64
// centroids and walks the keys of the chunk. Scores are computed a tile of keys ahead, so that the
// tensor cores have work while a warpgroup computes weights. Shared memory: mean and dout of the
// centroids, and the stages of KeyPipeline.
#include "cuda/clustered/backward.h"
#include "cuda/clustered/key_pipeline.cuh"
#include "cuda/clustered/key_tile.cuh"
#include "cuda/launch/dispatch.h"
#include "cuda/launch/launch.h"
#include "cuda/prim/bands.cuh"
#include "cuda/prim/dependent.cuh"
#include "cuda/prim/load.cuh"
#include "cuda/prim/softmax.cuh"

namespace coterie::cuda {
namespace {

constexpr int kKeyThreads = 2 * kWarpgroup, kKeyBlockThreads = 3 * kWarpgroup;
constexpr int kPlaces = 3;

template <class T, int kWidth>
struct KeyShape {
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
struct KeyBlock : StackedCentroids {
  using S = KeyShape<T, kWidth>;
  const BackwardArgs<T>& args;
  typename S::Centroids mean, dout;
  float *lse, *delta;

  __device__ KeyBlock(const BackwardArgs<T>& a, unsigned char* memory)
      : StackedCentroids(a.shape, a.shape.key_ranges, static_cast<int>(blockIdx.x)),
        args(a),
        mean{shared_address(memory)},
        dout{mean.base + S::Centroids::kBytes},
        lse(reinterpret_cast<float*>(memory + S::kStats)),
        delta(lse + S::kRows) {}

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
    const int count = total - from;
    const std::int64_t first = first_row + min(from, total);
    mean.template load<kLoaded, kKeyThreads>(row, operand(args, 0), min(from, total), count);
    dout.template load<kLoaded, kKeyThreads>(row, operand(args, 1), min(from, total), count);
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
__device__ __forceinline__ void walk_keys(const KeyBlock<T, kWidth>& block) {
  using S = KeyShape<T, kWidth>;
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
__global__ void __launch_bounds__(kKeyBlockThreads, 1)
    key_gradient_sm90a_kernel(const __grid_constant__ BackwardArgs<T> args) {
  release_next();
  extern __shared__ __align__(1024) unsigned char memory[];
  const KeyBlock<T, kWidth> block(args, memory);
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

constexpr int kMeanThreads = 2 * kWarpgroup;
static_assert(kMeanRows == 2 * 64, "64 for each warpgroup");

__host__ __device__ int mean_tiles(const BackwardShape& shape) {
  return (shape.group * shape.clusters + kMeanRows - 1) / kMeanRows;
}

// The 64 centroids of a warpgroup.
template <class T, int kWidth>
struct MeanTile {
  using Matrix = Bands<T, kWidth, 64>;
  static constexpr int kBytes = 2 * Matrix::kBytes;
  Matrix mean, dout;
  int first, count;  // centroids from `first` on, `count` of which are there
  float lse[2], delta[2];
  float sum[kWidth / 64][32];

  __device__ void load(const BackwardArgs<T>& args, const StackedCentroids& block, int block_first,
                       std::uint32_t base) {
    const int number = static_cast<int>(threadIdx.x) / kWarpgroup;
    mean.base = __shfl_sync(~0u, base + number * kBytes, 0);  // for descriptors: uniform
    dout.base = mean.base + Matrix::kBytes;
    first = min(block_first + 64 * number, block.total);
    count = block.total - first;
    const std::int64_t row = block.first_row + first;
    mean.template load<64, kWarpgroup>(0, block.operand(args, 0), first, count);
    dout.template load<64, kWarpgroup>(0, block.operand(args, 1), first, count);
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const bool there = group_row(side) < count;
      lse[side] = there ? args.scratch.row_lse[row + group_row(side)] : INFINITY;
      delta[side] = there ? args.scratch.row_delta[row + group_row(side)] : 0.0f;
    }
#pragma unroll
    for (int j = 0; j < kWidth / 2; ++j) sum[j / 32][j % 32] = 0.0f;
  }

  // s becomes the weights of 64 keys, of which `keys` are there; then ds their derivatives.
  __device__ void weigh(float (&s)[32], int keys, float scale) const {
#pragma unroll
    for (int i = 0; i < 32; ++i) s[i] = exp2_approximate(fmaf(s[i], scale, -lse[i / 2 % 2]));
    if (keys >= 64) return;  // exp2 of -lse could overflow, and inf times a zero key is NaN
#pragma unroll
    for (int i = 0; i < 32; ++i)
      if (i / 4 * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + i % 2 >= keys) s[i] = 0.0f;
  }
  __device__ void differentiate(float (&ds)[32], const float (&s)[32]) const {
#pragma unroll
    for (int i = 0; i < 32; ++i) ds[i] = s[i] * (ds[i] - delta[i / 2 % 2]);
  }

  // Writes its slice of the stacked centroids.
  __device__ void store(const BackwardArgs<T>& args, const StackedCentroids& block) const {
    const BackwardShape& shape = args.shape;
    const float factor = shape.scale / (shape.weight_scale * shape.gradient_scale);
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      if (group_row(side) >= count) continue;
      float* row = block.mean_slice(args) +
                   static_cast<std::int64_t>(first + group_row(side)) * kWidth +
                   threadIdx.x % 4 * 2;
#pragma unroll
      for (int n = 0; n < kWidth / 8; ++n) {
        const float* pair = sum[n / 8] + n % 8 * 4 + 2 * side;
        store2(row + 8 * n, pair[0] * factor, pair[1] * factor);
      }
    }
  }
};

template <class T, int kWidth>
using MeanPipeline = KeyPipeline<T, kWidth, 2, kMeanThreads / 32>;

template <class T, int kWidth>
__global__ void __launch_bounds__(kMeanThreads, 1)
    mean_gradient_sm90a_kernel(const __grid_constant__ BackwardArgs<T> args) {
  await_previous();
  extern __shared__ __align__(1024) unsigned char memory[];
  using Pipeline = MeanPipeline<T, kWidth>;
  using Keys = Bands<T, kWidth, 64>;
  const int tiles = mean_tiles(args.shape), number = static_cast<int>(blockIdx.x);
  const StackedCentroids block(args.shape, args.shape.chunks, number / tiles);
  const ItemChunk& keys = block.keys;
  if (keys.begin >= keys.end) return;
  const std::uint32_t base = shared_address(memory);
  MeanTile<T, kWidth> tile;
  tile.load(args, block, number % tiles * kMeanRows, base);
  cp_async_commit();
  const Pipeline pipeline{base + 2 * tile.kBytes,
                          {args.k.rows(keys.span.batch, block.key_head, keys.span.begin),
                           args.v.rows(keys.span.batch, block.key_head, keys.span.begin)},
                          (keys.end - keys.begin + 63) / 64};
  pipeline.init();
  cp_async_wait<0>();
  fence_async_proxy();
  __syncthreads();
  const auto first = [&](int t) { return keys.begin + t * 64; };
  pipeline.begin(first, keys.end);
  pipeline.publish_first();

  const float scale = args.shape.scale * kLog2e;
  float s[2][32], ds[32];
  std::uint32_t factor[4][4];
  // Keys t, whose scores are there; computes those of the next ones. Only sums are in flight
  // from one step to the next: of other accumulators the assembler does not see that they were
  // waited for.
  const auto step = [&](float(&now)[32], float(&next)[32], int t) {
    const int after = min(t + 1, pipeline.total - 1);
    pipeline.advance(t, first, keys.end);
    pipeline.wait(after);
    wgmma_fence();
    row_products(ds, tile.dout, 0, Keys{pipeline.tile(t, 1)}, 0);
    wgmma_commit();
    row_products(next, tile.mean, 0, Keys{pipeline.tile(after, 0)}, 0);
    wgmma_commit();
    tile.weigh(now, keys.end - first(t), scale);
    wgmma_wait<1>();
    wgmma_settle(ds);
    if (t > 0) pipeline.release(t - 1);
    tile.differentiate(ds, now);
    pack_factor<T>(factor, ds);
    wgmma_fence();
    add_products(tile.sum, factor, Keys{pipeline.tile(t, 0)}, 0);
    wgmma_commit();
    wgmma_wait<1>();
    wgmma_settle(next);
  };
#pragma unroll
  for (int band = 0; band < kWidth / 64; ++band) wgmma_settle(tile.sum[band]);
  pipeline.wait(0);
  wgmma_fence();
  row_products(s[0], tile.mean, 0, Keys{pipeline.tile(0, 0)}, 0);
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_settle(s[0]);
#pragma unroll 1
  for (int t = 0; t < pipeline.total; t += 2) {
    step(s[0], s[1], t);
    if (t + 1 < pipeline.total) step(s[1], s[0], t + 1);
  }
  cp_async_wait<0>();
  wgmma_wait<0>();
#pragma unroll
  for (int band = 0; band < kWidth / 64; ++band) wgmma_settle(tile.sum[band]);
  tile.store(args, block);
}

}  // namespace

template <class T>
void centroid_gradients_split_sm90a(const BackwardArgs<T>& args, cudaStream_t stream) {
  const BackwardShape& shape = args.shape;
  const int key_heads = shape.H / shape.group;
  const auto means = static_cast<unsigned>(shape.chunks.slots * key_heads * mean_tiles(shape));
  const auto keys = static_cast<unsigned>(shape.key_ranges.slots * key_heads);
  dispatch_head_dim("clustered", shape.pitch, [&](auto width) {
    constexpr int kWidth = decltype(width)::value;
    if (args.dq.data && means > 0)
      launch_early("mean_gradient_sm90a", mean_gradient_sm90a_kernel<T, kWidth>, means,
                   kMeanThreads, 2 * MeanTile<T, kWidth>::kBytes + MeanPipeline<T, kWidth>::kBytes,
                   stream, args);
    if ((args.dk.data || args.dv.data) && keys > 0)
      launch_early("key_gradient_sm90a", key_gradient_sm90a_kernel<T, kWidth>, keys,
                   kKeyBlockThreads, KeyShape<T, kWidth>::kSharedBytes, stream, args);
  });
}

template void centroid_gradients_split_sm90a(const BackwardArgs<Bf16>&, cudaStream_t);
template void centroid_gradients_split_sm90a(const BackwardArgs<F16>&, cudaStream_t);

}  // namespace coterie::cuda
