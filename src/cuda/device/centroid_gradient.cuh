// SPDX-License-Identifier: MIT
// A block of attend_centroid_bwd_sm90a.cu: what it works on, its shared memory, and the steps of
// its warpgroups between products.
#pragma once

#include <cstdint>

#include "cuda/clustered_bwd.h"
#include "cuda/device/copy_word.cuh"
#include "cuda/device/key_tile.cuh"

namespace coterie::cuda {

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

}  // namespace coterie::cuda
