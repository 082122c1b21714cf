// SPDX-License-Identifier: MIT
// centroid_backward.cu in one kernel by warpgroup products, for 16-bit types on Hopper, rows of up
// to 64 elements and up to 256 centroids of a key head; split_backward_sm90a.cu serves the others.
//
// Block number = chunk of keys * key heads + key head; a block has a multiprocessor to itself and
// walks its keys, 128 at a time:
//
//   warpgroups 0, 1: 64 keys each     S = K meanᵀ, G = V doutᵀ, then dv += A dout, dk += dS mean
//   warpgroup 2: all centroids        dmean += dSᵀ K, with dS through shared memory
//
// so that scores are computed once, and dmean of the chunk stays in registers. Warpgroup 2 also
// loads keys and values, a step ahead. Shared memory, 162 KiB: mean and dout of the centroids (64),
// two steps of keys and values (64), dS in two buffers for each of two warpgroups (32), lse and
// delta. 384 threads, 168 registers each.
#include <cstdint>

#include "cuda/clustered/backward.h"
#include "cuda/clustered/key_tile.cuh"
#include "cuda/launch/launch.h"
#include "cuda/prim/dependent.cuh"
#include "cuda/prim/load.cuh"

namespace coterie::cuda {
namespace {

constexpr int kCentroidThreads = 3 * kWarpgroup, kKeyThreads = 2 * kWarpgroup;
constexpr int kTiles = kFusedCentroids / 64;  // of centroids
constexpr int kKeys = 128;                    // of a block at a time

// What a block works on. It stands in shared memory, for want of registers.
template <class T>
struct CentroidTask {
  ItemChunk keys;
  int slot, key_head, total, tiles;  // centroids, and tiles of 64 of them: 2 or 4
  std::int64_t first_row;            // of the centroids
  Rows<const T> k, v;
  Rows<T> dk, dv;  // data is null when absent

  __device__ CentroidTask(const BackwardArgs<T>& args) {
    const BackwardShape& shape = args.shape;
    const int key_heads = shape.H / shape.group;
    key_head = static_cast<int>(blockIdx.x) % key_heads;
    slot = static_cast<int>(blockIdx.x) / key_heads;
    keys = shape.chunks.find(shape.spans.k, slot);
    total = shape.group * shape.clusters;
    tiles = (total + 127) / 128 * 2;
    first_row =
        (static_cast<std::int64_t>(keys.item) * shape.H + key_head * shape.group) * shape.clusters;
    k = args.k.rows(keys.span.batch, key_head, keys.span.begin);
    v = args.v.rows(keys.span.batch, key_head, keys.span.begin);
    dk = args.dk.rows(keys.span.batch, key_head, keys.span.begin);
    dv = args.dv.rows(keys.span.batch, key_head, keys.span.begin);
    if (!args.dk.data) dk.data = nullptr;
    if (!args.dv.data) dv.data = nullptr;
  }
  __device__ int steps() const { return (keys.end - keys.begin + kKeys - 1) / kKeys; }
};

template <class T>
struct CentroidLayout {
  using Centroids = Bands<T, 64, kFusedCentroids>;
  using Keys = Bands<T, 64, 64>;
  static constexpr int kPlaces = 2 * Centroids::kBytes;
  static constexpr int kScores = kPlaces + 8 * Keys::kBytes;
  static constexpr int kStats = kScores + 4 * Keys::kBytes;
  static constexpr int kBarriers = kStats + 2 * kFusedCentroids * 4;
  static constexpr int kTask = kBarriers + 10 * 8;
  static constexpr int kBytes = kTask + static_cast<int>(sizeof(CentroidTask<T>));
};

// A block's shared memory.
template <class T>
struct GradientBlock {
  using L = CentroidLayout<T>;
  const BackwardArgs<T>& args;
  unsigned char* memory;
  typename L::Centroids mean, dout;

  __device__ GradientBlock(const BackwardArgs<T>& a, unsigned char* m)
      : args(a), memory(m), mean{shared_address(m)}, dout{mean.base + L::Centroids::kBytes} {}

  __device__ CentroidTask<T>& task() const {
    return *reinterpret_cast<CentroidTask<T>*>(memory + L::kTask);
  }
  __device__ float* lse() const { return reinterpret_cast<float*>(memory + L::kStats); }
  __device__ float* delta() const { return lse() + kFusedCentroids; }
  // dS of a warpgroup has two buffers, so that the first two do not wait for each other. Barriers
  // of a buffer: all of it is there, or may be overwritten.
  __device__ std::uint32_t full(int group, int buffer) const {
    return mean.base + L::kBarriers + 8 * (2 * group + buffer);
  }
  __device__ std::uint32_t free(int group, int buffer) const { return full(group + 2, buffer); }
  // Keys and values of a step are there.
  __device__ std::uint32_t loaded(int step) const { return full(4, step % 2); }
  __device__ typename L::Keys scores(int group, int buffer) const {
    return {mean.base + L::kScores + (2 * group + buffer) * L::Keys::kBytes};
  }
  // A place for 64 keys (tensor 0) or values of a warpgroup.
  __device__ typename L::Keys place(int group, int number, int tensor) const {
    return {mean.base + L::kPlaces + ((2 * group + number % 2) * 2 + tensor) * L::Keys::kBytes};
  }

  // By the first two warpgroups. Rows beyond the last get weights exp2(0) = 1, but their mean and
  // dout are zero.
  __device__ void load_centroids() const {
    const int pitch = args.shape.pitch, total = task().total;
    const std::int64_t first = task().first_row;
    const Rows<const T> means{args.scratch.mean + first * pitch, pitch, pitch, true};
    const Rows<const T> douts{args.scratch.dout + first * pitch, pitch, pitch, true};
    for (int row = 0; row < 64 * task().tiles; row += 128) {
      mean.template load<128, kKeyThreads>(row, means, row, total - row);
      dout.template load<128, kKeyThreads>(row, douts, row, total - row);
    }
    const int row = static_cast<int>(threadIdx.x);
    const std::int64_t from = row < total ? first + row : 0;
    cp_async4(shared_address(lse() + row), args.scratch.row_lse + from, row < total);
    cp_async4(shared_address(delta() + row), args.scratch.row_delta + from, row < total);
  }
  // The first key of a warpgroup in step `number`.
  __device__ int first_key(int group, int number) const {
    return task().keys.begin + number * kKeys + 64 * group;
  }
  __device__ void load_keys(int number) const {
#pragma unroll
    for (int group = 0; group < 2; ++group) {
      const int first = first_key(group, number), count = task().keys.end - first;
      load_rows(place(group, number, 0), task().k, first, count);
      load_rows(place(group, number, 1), task().v, first, count);
    }
    cp_async_commit();
  }
  // After load_keys.
  __device__ void publish_keys(int number) const {
    cp_async_wait<0>();
    fence_async_proxy();
    mbarrier_arrive_warp(loaded(number));
  }

  // dS of this warpgroup to a buffer.
  __device__ void store_scores(int group, int buffer, const std::uint32_t (&ds)[4][4]) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int row = static_cast<int>(threadIdx.x) / 32 % 4 * 16 + lane % 16;
    // Chunk 2 k + half of a row; what the tile's permutation does to it is an exclusive or.
    const std::uint32_t first = Tile<T, 64>{scores(group, buffer).base}.chunk(row, lane / 16);
#pragma unroll
    for (int k = 0; k < 4; ++k) stmatrix_x4(first ^ (k << 5), ds[k]);
  }

  // dmean of all centroids: the slice of this range of keys.
  __device__ void store_means(const float (&sum)[kTiles][32]) const {
    const BackwardShape& shape = args.shape;
    const float factor = shape.scale / (shape.weight_scale * shape.gradient_scale);
    const std::int64_t stack =
        static_cast<std::int64_t>(task().slot) * (shape.H / shape.group) + task().key_head;
    const int total = task().total, first = group_row(0);
    float* row = args.scratch.mean_slices + (stack * total + first) * 64 + threadIdx.x % 4 * 2;
#pragma unroll
    for (int r = 0; r < kFusedCentroids; r += r % 64 == 0 ? 8 : 56) {
      if (first + r >= total) break;
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const float* pair = sum[r / 64] + 4 * n + r % 64 / 4;
        store2(row + 64 * r + 8 * n, pair[0] * factor, pair[1] * factor);
      }
    }
  }
};

// Warpgroups 0 and 1.
template <class T>
__device__ __forceinline__ void walk_keys(const GradientBlock<T>& block) {
  const int group = uniform(static_cast<int>(threadIdx.x) / kWarpgroup);
  const int steps = uniform(block.task().steps()), tiles = uniform(block.task().tiles);
  const float scale = block.args.shape.scale * kLog2e;
  KeyTile<T, 64> keys;
  int number = 0;  // of the buffer of dS, counted over all of them
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    mbarrier_wait(block.loaded(step), step / 2 & 1);
    const auto k = uniform_rows(block.place(group, step, 0), 0);
    const auto v = uniform_rows(block.place(group, step, 1), 0);
    const int first = block.first_key(group, step);
    keys.clear();
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile, ++number) {
      const int row = 64 * tile;
      keys.add(k, v, uniform_rows(block.mean, row), uniform_rows(block.dout, row),
               block.lse() + row, block.delta() + row, scale, block.task().keys.end - first);
      if (number >= 2) mbarrier_wait(block.free(group, number % 2), (number / 2 - 1) & 1);
      block.store_scores(group, number % 2, keys.ds_factor);
      mbarrier_arrive_warp(block.full(group, number % 2));
    }
    keys.finish();
    keys.store(block.args.shape, block.task().dk, block.task().dv, first,
               block.task().keys.end - first);
  }
}

// Warpgroup 2.
template <class T>
__device__ __forceinline__ void sum_means(const GradientBlock<T>& block) {
  float sum[kTiles][32];
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < 32; ++i) sum[tile][i] = 0.0f;
    wgmma_settle(sum[tile]);
  }
  const int steps = uniform(block.task().steps()), tiles = uniform(block.task().tiles);
  int number = 0;
  block.publish_keys(0);
  block.load_keys(1);
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      if (tile >= tiles) continue;
#pragma unroll
      for (int group = 0; group < 2; ++group) {
        typename CentroidLayout<T>::Keys scores = block.scores(group, tile % 2);
        typename CentroidLayout<T>::Keys keys = block.place(group, step, 0);
        mbarrier_wait(block.full(group, tile % 2), number / 2 & 1);
        fence_async_proxy();  // here, where it delays nobody
        wgmma_fence();
#pragma unroll
        for (int depth = 0; depth < 64; depth += 16)
          wgmma<T, 1, 1, 1>(sum[tile], scores.by_rows(depth, 0), keys.by_rows(depth, 0));
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_settle(sum[tile]);
        mbarrier_arrive_warp(block.free(group, tile % 2));
      }
      ++number;
      if (tile == 0) block.publish_keys(step + 1);
    }
    sync_group();  // all warps have read what lies there, as have the other warpgroups
    block.load_keys(step + 2);
  }
  cp_async_wait<0>();
  block.store_means(sum);
}

template <class T>
__global__ void __launch_bounds__(kCentroidThreads, 1)
    centroid_gradient_kernel(const __grid_constant__ BackwardArgs<T> args) {
  release_next();
  extern __shared__ __align__(1024) unsigned char memory[];
  const GradientBlock<T> block(args, memory);
  if (threadIdx.x == 0) block.task() = CentroidTask<T>(args);
  if (threadIdx.x < 10)
    mbarrier_init(block.full(0, static_cast<int>(threadIdx.x)), kWarpgroup / 32 * kWarpArrivals);
  __syncthreads();
  if (block.task().keys.begin >= block.task().keys.end) return await_writes();
  const int group = static_cast<int>(threadIdx.x) / kWarpgroup;
  if (group == 2) block.load_keys(0);
  await_writes();
  if (group < 2) {
    block.load_centroids();
    cp_async_commit();
    cp_async_wait<0>();
    fence_async_proxy();
  }
  __syncthreads();
  if (group < 2)
    walk_keys(block);
  else
    sum_means(block);
}

}  // namespace

template <class T>
void centroid_gradients_sm90a(const BackwardArgs<T>& args, cudaStream_t stream) {
  const int blocks = args.shape.chunks.slots * (args.shape.H / args.shape.group);
  if (blocks == 0) return;
  launch_early("centroid_gradient_sm90a", centroid_gradient_kernel<T>,
               static_cast<unsigned>(blocks), kCentroidThreads, CentroidLayout<T>::kBytes, stream,
               args);
}

template void centroid_gradients_sm90a(const BackwardArgs<Bf16>&, cudaStream_t);
template void centroid_gradients_sm90a(const BackwardArgs<F16>&, cudaStream_t);

}  // namespace coterie::cuda
