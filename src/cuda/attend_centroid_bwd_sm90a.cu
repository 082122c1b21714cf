// SPDX-License-Identifier: MIT
// Both kernels of attend_centroid_bwd.cu in one, by warpgroup products, for 16-bit types, rows of
// 64 elements and up to 256 centroids of a key head, which stay in shared memory. A block has a
// multiprocessor to itself and walks a range of keys, 128 at a time:
//
//   warpgroups 0, 1: 64 keys each     S = K meanᵀ, G = V doutᵀ, then dv += A dout, dk += dS mean
//   warpgroup 2: all centroids        dmean += dSᵀ K, with dS through shared memory
//
// so that scores are computed once, and dmean of the range stays in registers. The third one also
// loads keys and values, a step ahead.
#include "cuda/clustered_bwd.h"
#include "cuda/device/await.cuh"
#include "cuda/device/centroid_gradient.cuh"
#include "cuda/launch.h"

namespace coterie::cuda {
namespace {

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
