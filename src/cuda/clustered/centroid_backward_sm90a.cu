// SPDX-License-Identifier: MIT
// centroid_backward.cu with warpgroup products, for 16-bit types on Hopper: one kernel, or two
// where it cannot run.
//
// centroid_gradient_sm90a_kernel: dk, dv and dmean, for rows of up to 64 elements and up to 256
// centroids of a key head. Block number = chunk of keys * key heads + key head; a block has a
// multiprocessor to itself and walks its keys, 128 at a time:
//
//   warpgroups 0, 1: 64 keys each     S = K meanᵀ, G = V doutᵀ, then dv += A dout, dk += dS mean
//   warpgroup 2: all centroids        dmean += dSᵀ K, with dS through shared memory
//
// Scores are computed once, and dmean of the chunk stays in registers. Warpgroup 2 also loads keys
// and values, a step ahead. Shared memory, 170 KiB: mean and dout of the centroids (64), two steps
// of keys and values (64), dS in two buffers for each of two warpgroups (32), bits of top keys (8),
// lse and delta. 384
// threads, 168 registers each.
//
// key_gradient_sm90a_kernel: dk, dv. Block number = range of keys * key heads + key head; it has a
// multiprocessor to itself. Two warpgroups take 64 keys in turn and walk the centroids of all query
// heads of their key head; a third one loads keys and values into three buffers. Up to 512
// centroids (rows of 128 elements: 256) stay in shared memory, more are loaded in halves, one
// ahead: 128 KiB, and 48 or 96 KiB of keys and values. setmaxnreg gives the first two warpgroups
// 232 registers.
//
// mean_gradient_sm90a_kernel: dmean. Block number = (chunk of keys * key heads + key head) * tiles
// of 128 centroids + tile. Two warpgroups with a multiprocessor to themselves; each owns 64
// centroids and walks the keys of the chunk. Scores are computed a tile of keys ahead, so that the
// tensor cores have work while a warpgroup computes weights. Shared memory: mean and dout of the
// centroids, and the stages of KeyPipeline.
#include <cstdint>
#include <type_traits>

#include "cuda/clustered/backward.h"
#include "cuda/clustered/means_sm90a.cuh"
#include "cuda/launch/dispatch.h"
#include "cuda/launch/launch.h"
#include "cuda/prim/bands.cuh"
#include "cuda/prim/dependent.cuh"
#include "cuda/prim/load.cuh"
#include "cuda/prim/softmax.cuh"
#include "cuda/prim/store.cuh"
#include "cuda/prim/warp.cuh"

namespace coterie::cuda {
namespace {

// A matrix from a row on, with an address that is known to be uniform.
template <class Matrix>
__device__ __forceinline__ Matrix uniform_rows(const Matrix& matrix, int row) {
  return {__shfl_sync(~0u, matrix.base + row * 128, 0)};
}

// Rows first .. of a range with `count` left, by one warpgroup; unaligned rows are loaded slowly,
// to save registers.
template <class T, int kWidth>
__device__ __forceinline__ void load_rows(const Bands<T, kWidth, 64>& to, const Rows<const T>& rows,
                                          int first, int count) {
  const int r = static_cast<int>(threadIdx.x) % kWarpgroup / 8, chunk = threadIdx.x % 8;
#pragma unroll
  for (int band = 0; band < kWidth / 64; ++band) {
    const Tile<T, 64> tile{to.base + band * to.kBandBytes};
    const int column = 64 * band + 8 * chunk;
    const T* from = rows.row(first + r) + column;
    if (rows.aligned) {
#pragma unroll
      for (int step = 0; step < 64; step += 16) {
        const bool there = column < rows.width && r + step < count;
        cp_async16(tile.chunk(r + step, chunk), there ? from + step * rows.pitch : rows.data,
                   there ? 16 : 0);
      }
      continue;
    }
#pragma unroll 1
    for (int step = 0; step < 64; step += 16)
      store_shared16(tile.chunk(r + step, chunk),
                     r + step < count ? load_chunk(rows.row(first + r + step), column, rows.width)
                                      : make_uint4(0, 0, 0, 0));
  }
}

__device__ __forceinline__ uint2 load_shared8(std::uint32_t from) {
  uint2 words;
  asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];" : "=r"(words.x), "=r"(words.y) : "r"(from));
  return words;
}

// Weights of 64 columns of the lane's upper (side 0) or lower row become 0 where the row has a bit.
__device__ __forceinline__ void hide_top_keys(float (&s)[32], int side, uint2 bits) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const unsigned own = (half == 0 ? bits.x : bits.y) >> (threadIdx.x % 4 * 2);
    if ((own & 0x03030303u) == 0) continue;
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (own >> (i / 2 * 8 + i % 2) & 1) s[16 * half + i / 2 * 4 + 2 * side + i % 2] = 0.0f;
  }
}

// 64 keys of a warpgroup against the centroids: weights, their derivatives and the sums dk and dv,
// 64 centroids at a time.
template <class T, int kWidth>
struct KeyTile {
  static constexpr int kBands = kWidth / 64;
  float dk[kBands][32], dv[kBands][32];
  std::uint32_t ds_factor[4][4];  // dS of the centroids that were added last

  __device__ void clear() {
#pragma unroll
    for (int band = 0; band < kBands; ++band) {
#pragma unroll
      for (int i = 0; i < 32; ++i) dk[band][i] = dv[band][i] = 0.0f;
      wgmma_settle(dk[band]);
      wgmma_settle(dv[band]);
    }
  }

  // Adds 64 centroids, with lse and delta of them. `count` keys exist. top(row): bits of TopKeyBits
  // of these centroids for a key, if kHides. Only sums are in flight when accumulators are read:
  // the assembler does not see that others were waited for.
  template <bool kHides, class Keys, class Centroids, class Top>
  __device__ void add(const Keys& k, const Keys& v, const Centroids& mean, const Centroids& dout,
                      const float* lse, const float* delta, float scale, int count,
                      const Top& top) {
    float s[32], ds[32];
    std::uint32_t p_factor[4][4];
    wgmma_wait<0>();  // for the sums: their factors free registers
    wgmma_fence();
    row_products(s, k, 0, mean, 0);
    wgmma_commit();
    row_products(ds, v, 0, dout, 0);
    wgmma_commit();
    wgmma_wait<1>();
    wgmma_settle(s);
    weigh(s, lse, scale, count);
    if constexpr (kHides) {
#pragma unroll
      for (int side = 0; side < 2; ++side) hide_top_keys(s, side, top(group_row(side)));
    }
    pack_factor<T>(p_factor, s);
    wgmma_fence();
    add_products(dv, p_factor, dout, 0);
    wgmma_commit();
    wgmma_wait<1>();
    wgmma_settle(ds);
    differentiate(ds, s, delta);
    pack_factor<T>(ds_factor, ds);
    wgmma_fence();
    add_products(dk, ds_factor, mean, 0);
    wgmma_commit();
  }
  __device__ void finish() {
    wgmma_wait<0>();
#pragma unroll
    for (int band = 0; band < kBands; ++band) {
      wgmma_settle(dk[band]);
      wgmma_settle(dv[band]);
    }
  }

  // Writes the rows of keys from `first` on, `count` of which exist.
  __device__ void store(const BackwardShape& shape, const Rows<T>& to_dk, const Rows<T>& to_dv,
                        int first, int count) const {
    const float factor = 1.0f / (shape.weight_scale * shape.gradient_scale);
    if (to_dk.data) store(to_dk, dk, shape.scale * factor, first, count);
    if (to_dv.data) store(to_dv, dv, factor, first, count);
  }

 private:
  // Calls body(i, value) for element i of an accumulator and the value of its centroid.
  template <class Body>
  __device__ static void for_centroids(const float* values, const Body& body) {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float2 two = *reinterpret_cast<const float2*>(values + 8 * n + threadIdx.x % 4 * 2);
#pragma unroll
      for (int i = 0; i < 4; ++i) body(4 * n + i, i % 2 ? two.y : two.x);
    }
  }
  // s becomes the weights.
  __device__ static void weigh(float (&s)[32], const float* lse, float scale, int count) {
    for_centroids(lse, [&](int i, float l) { s[i] = exp2_approximate(fmaf(s[i], scale, -l)); });
    if (count >= 64) return;  // exp2 of -lse could overflow, and inf times a zero key is NaN
#pragma unroll
    for (int i = 0; i < 32; ++i)
      if (group_row(i / 2 % 2) >= count) s[i] = 0.0f;
  }
  __device__ static void differentiate(float (&ds)[32], const float (&s)[32], const float* delta) {
    for_centroids(delta, [&](int i, float e) { ds[i] = s[i] * (ds[i] - e); });
  }
  __device__ static void store(const Rows<T>& rows, const float (&sum)[kBands][32], float factor,
                               int first, int count) {
#pragma unroll
    for (int part = 0; part < kWidth / 32; ++part) {
      Accumulator pair[2];
#pragma unroll
      for (int i = 0; i < 16; ++i)
        pair[i / 8][i / 4 % 2][i % 4] = sum[part / 2][part % 2 * 16 + i] * factor;
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const bool there = group_row(side) < count;
        store_columns(rows, first + group_row(side), there, 32 * part, pair, side);
      }
    }
  }
};

constexpr int kThreads = 3 * kWarpgroup, kKeyThreads = 2 * kWarpgroup;
constexpr int kTiles = kFusedCentroids / 64;  // of centroids
constexpr int kKeys = 128;                    // of a block at a time

// What a block works on. It is kept in shared memory to save registers.
template <class T>
struct CentroidTask {
  ItemChunk keys;
  int slot, key_head, total, tiles;  // centroids, and tiles of 64 of them: 2 or 4
  std::int64_t first_row;            // of the centroids
  Rows<const T> k, v;
  Rows<T> dk, dv;            // data is null when absent
  const std::uint32_t* top;  // the words of TopKeyBits, or null
  int top_words;             // of a key

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
    top = args.scratch.top_bits.rows(keys.span, key_head);
    top_words = args.scratch.top_bits.count;
  }
  __device__ int steps() const { return (keys.end - keys.begin + kKeys - 1) / kKeys; }
};

template <class T>
struct CentroidLayout {
  using Centroids = Bands<T, 64, kFusedCentroids>;
  using Keys = Bands<T, 64, 64>;
  static constexpr int kPlaces = 2 * Centroids::kBytes;
  static constexpr int kScores = kPlaces + 8 * Keys::kBytes;
  static constexpr int kTop = kScores + 4 * Keys::kBytes;
  static constexpr int kTopPitch = kFusedCentroids / 8;  // bytes of a key
  static constexpr int kStats = kTop + 4 * 64 * kTopPitch;
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
  // dS of a warpgroup has two buffers, so that the first two warpgroups do not wait for each other.
  // Barriers of a buffer: it is full, or may be overwritten.
  __device__ std::uint32_t full(int group, int buffer) const {
    return mean.base + L::kBarriers + 8 * (2 * group + buffer);
  }
  __device__ std::uint32_t free(int group, int buffer) const { return full(group + 2, buffer); }
  // Keys and values of a step have arrived.
  __device__ std::uint32_t loaded(int step) const { return full(4, step % 2); }
  __device__ typename L::Keys scores(int group, int buffer) const {
    return {mean.base + L::kScores + (2 * group + buffer) * L::Keys::kBytes};
  }
  // The buffer of 64 keys (tensor 0) or values of a warpgroup.
  __device__ typename L::Keys place(int group, int number, int tensor) const {
    return {mean.base + L::kPlaces + ((2 * group + number % 2) * 2 + tensor) * L::Keys::kBytes};
  }

  // The bits of TopKeyBits of those keys.
  __device__ std::uint32_t top_bits(int group, int number) const {
    return mean.base + L::kTop + (2 * group + number % 2) * 64 * L::kTopPitch;
  }

  // Called by the first two warpgroups. Rows beyond the last get weights exp2(0) = 1, but their
  // mean and dout are zero.
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
  template <bool kHides>
  __device__ void load_keys(int number) const {
#pragma unroll
    for (int group = 0; group < 2; ++group) {
      const int first = first_key(group, number), count = task().keys.end - first;
      load_rows(place(group, number, 0), task().k, first, count);
      load_rows(place(group, number, 1), task().v, first, count);
      if constexpr (kHides) load_top_bits(group, number, first, count);
    }
    cp_async_commit();
  }
  __device__ void load_top_bits(int group, int number, int first, int count) const {
    const int row = static_cast<int>(threadIdx.x) % kWarpgroup / 2, chunk = threadIdx.x % 2;
    if (row >= count || TopKeyBits::kStep * chunk >= task().top_words) return;
    cp_async16(top_bits(group, number) + row * L::kTopPitch + 16 * chunk,
               task().top + static_cast<std::int64_t>(first + row) * task().top_words +
                   TopKeyBits::kStep * chunk,
               16);
  }
  // After load_keys.
  __device__ void publish_keys(int number) const {
    cp_async_wait<0>();
    fence_async_proxy();
    mbarrier_arrive_warp(loaded(number));
  }

  // Writes dS of this warpgroup to a buffer.
  __device__ void store_scores(int group, int buffer, const std::uint32_t (&ds)[4][4]) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int row = static_cast<int>(threadIdx.x) / 32 % 4 * 16 + lane % 16;
    // Chunk 2 k + half of a row; the tile's permutation of it is an exclusive or.
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
template <bool kHides, class T>
__device__ __forceinline__ void walk_fused_keys(const GradientBlock<T>& block) {
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
    const std::uint32_t top = block.top_bits(group, step);
    keys.clear();
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile, ++number) {
      const int row = 64 * tile;
      keys.template add<kHides>(
          k, v, uniform_rows(block.mean, row), uniform_rows(block.dout, row), block.lse() + row,
          block.delta() + row, scale, block.task().keys.end - first,
          [&](int r) { return load_shared8(top + r * CentroidLayout<T>::kTopPitch + 8 * tile); });
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
template <bool kHides, class T>
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
  block.template load_keys<kHides>(1);
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
        fence_async_proxy();  // here, where it delays no other warp
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
    sync_group();  // all warps have read the buffer, as have the other warpgroups
    block.template load_keys<kHides>(step + 2);
  }
  cp_async_wait<0>();
  block.store_means(sum);
}

template <class T, bool kHides>
__global__ void __launch_bounds__(kThreads, 1)
    centroid_gradient_sm90a_kernel(const __grid_constant__ BackwardArgs<T> args) {
  release_next();
  extern __shared__ __align__(1024) unsigned char memory[];
  const GradientBlock<T> block(args, memory);
  if (threadIdx.x == 0) block.task() = CentroidTask<T>(args);
  if (threadIdx.x < 10)
    mbarrier_init(block.full(0, static_cast<int>(threadIdx.x)), kWarpgroup / 32 * kWarpArrivals);
  __syncthreads();
  if (block.task().keys.begin >= block.task().keys.end) return await_writes();
  if (args.adds(block.task().keys.item, block.task().key_head * args.shape.group))
    return await_writes();
  const int group = static_cast<int>(threadIdx.x) / kWarpgroup;
  if (group == 2) block.template load_keys<kHides>(0);
  await_writes();
  if (group < 2) {
    block.load_centroids();
    cp_async_commit();
    cp_async_wait<0>();
    fence_async_proxy();
  }
  __syncthreads();
  if (group < 2)
    walk_fused_keys<kHides>(block);
  else
    sum_means<kHides>(block);
}

constexpr int kPlaces = 3;

template <class T, int kWidth>
struct KeyShape {
  static constexpr int kRows = 32768 / kWidth;  // centroids in shared memory
  static constexpr int kBuffer = kRows / 2;     // of these, loaded at a time when streamed
  using Centroids = Bands<T, kWidth, kRows>;
  using Keys = Bands<T, kWidth, 64>;
  static constexpr int kKeys = 2 * Centroids::kBytes;
  static constexpr int kStats = kKeys + kPlaces * 2 * Keys::kBytes;
  static constexpr int kBarriers = kStats + 2 * kRows * 4;
  static constexpr int kSharedBytes = kBarriers + (2 * kPlaces + 1) * 8;
};

// What a block works on, and its shared memory. Tiles of 64 keys are numbered; warpgroup g takes
// those with number % 2 = g.
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
  // Barriers of a place: its keys have arrived, or may be overwritten.
  __device__ std::uint32_t full(int number) const {
    return mean.base + S::kBarriers + number % kPlaces * 8;
  }
  __device__ std::uint32_t free(int number) const { return full(number) + kPlaces * 8; }
  // The barrier of the two computing warpgroups.
  __device__ PartBarrier<kKeyThreads> computing() const {
    return {3, mean.base + S::kBarriers + 2 * kPlaces * 8};
  }

  // Loads kLoaded centroids from `from` on into rows from `row` on, by the computing warpgroups.
  // Rows beyond the last get weights exp2(0) = 1, but their mean and dout are zero.
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

  // Called by the third warpgroup: loads all keys of the block as places become free.
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
template <bool kHides, class T, int kWidth>
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
  const auto* top =
      reinterpret_cast<const uint2*>(args.scratch.top_bits.rows(span, block.key_head));
  const int top_pitch = args.scratch.top_bits.count / 2;
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
      for (int row = start; row < end; row += 64) {
        const int centroid = buffer * S::kBuffer + row - start;
        keys.template add<kHides>(
            k, v, uniform_rows(block.mean, row), uniform_rows(block.dout, row), block.lse + row,
            block.delta + row, scale, count, [&](int r) {
              return top[(static_cast<std::int64_t>(first) + min(r, count - 1)) * top_pitch +
                         centroid / 64];
            });
      }
    }
    keys.finish();
    if (there) mbarrier_arrive_warp(block.free(number));
    if (there) keys.store(args.shape, dk, dv, first, count);
  }
  cp_async_wait<0>();
}

template <class T, int kWidth, bool kHides>
__global__ void __launch_bounds__(kThreads, 1)
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
  if (args.adds(block.keys.item, block.key_head * args.shape.group)) return;
  if (threadIdx.x < kKeyThreads) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    walk_keys<kHides>(block);
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
  int first, count;  // centroids from `first` on, `count` of which exist
  float lse[2], delta[2];
  float sum[kWidth / 64][32];
  TopWalk walk;  // of row 16 warp + lane, in the first 16 lanes

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
    const int lane = threadIdx.x % 32,
              r = static_cast<int>(threadIdx.x) % kWarpgroup / 32 * 16 + lane;
    if (args.scratch.top_bits.words && lane < 16 && r < count)
      walk.start(args.lists.top_keys + (row + r) * args.shape.topk, args.shape.topk,
                 block.keys.begin);
  }

  // Weights of the top keys among 64 keys from `begin` on become 0; the keys of calls ascend.
  __device__ void hide(float (&s)[32], int begin) {
    const int lane = threadIdx.x % 32;
    const unsigned long long mask = walk.mask(begin);
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const unsigned long long bits = __shfl_sync(~0u, mask, lane / 4 + 8 * side);
      hide_top_keys(s, side,
                    make_uint2(static_cast<unsigned>(bits), static_cast<unsigned>(bits >> 32)));
    }
  }

  // s becomes the weights of 64 keys, of which `keys` exist; then ds their derivatives.
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
  if (keys.begin >= keys.end || args.adds(keys.item, block.key_head * args.shape.group)) return;
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
  // Processes keys t, whose scores are ready, and computes those of the next keys. Only sums are in
  // flight from one step to the next: the assembler does not see that other accumulators were
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
    if (args.scratch.top_bits.words) tile.hide(now, first(t));
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
void centroid_gradients_sm90a(const BackwardArgs<T>& args, cudaStream_t stream) {
  const BackwardShape& shape = args.shape;
  const int key_heads = shape.H / shape.group;
  const auto chunks = static_cast<unsigned>(shape.chunks.slots * key_heads),
             ranges = static_cast<unsigned>(shape.key_ranges.slots * key_heads);
  if (chunks == 0 || ranges == 0) return;
  const bool hides = shape.top_words > 0;
  if (shape.fused)
    return launch_early(
        "centroid_gradient_sm90a",
        hides ? centroid_gradient_sm90a_kernel<T, true> : centroid_gradient_sm90a_kernel<T, false>,
        chunks, kThreads, CentroidLayout<T>::kBytes, stream, args);
  dispatch_head_dim("clustered", shape.pitch, [&](auto width) {
    constexpr int kWidth = decltype(width)::value;
    if (args.dq.data)
      launch_early("mean_gradient_sm90a", mean_gradient_sm90a_kernel<T, kWidth>,
                   chunks * mean_tiles(shape), kMeanThreads,
                   2 * MeanTile<T, kWidth>::kBytes + MeanPipeline<T, kWidth>::kBytes, stream, args);
    if (args.dk.data || args.dv.data)
      launch_early("key_gradient_sm90a",
                   hides ? key_gradient_sm90a_kernel<T, kWidth, true>
                         : key_gradient_sm90a_kernel<T, kWidth, false>,
                   ranges, kThreads, KeyShape<T, kWidth>::kSharedBytes, stream, args);
  });
}

template void centroid_gradients_sm90a(const BackwardArgs<Bf16>&, cudaStream_t);
template void centroid_gradients_sm90a(const BackwardArgs<F16>&, cudaStream_t);

}  // namespace coterie::cuda
