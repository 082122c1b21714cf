// SPDX-License-Identifier: MIT
// mean_gradient_kernel of attend_centroid_bwd.cu by warpgroup products, for 16-bit types and rows
// of 64 or 128 elements. A block has two warpgroups and a multiprocessor to itself; a warpgroup
// owns 2 x 64 centroids and walks a share of the keys.
#include "cuda/clustered_bwd.h"
#include "cuda/device/await.cuh"
#include "cuda/device/bands.cuh"
#include "cuda/device/key_pipeline.cuh"
#include "cuda/device/softmax.cuh"
#include "cuda/launch.h"

namespace coterie::cuda {
namespace {

constexpr int kThreads = 2 * kWarpgroup;
constexpr int kTiles = 2, kRows = 2 * 64 * kTiles;  // of a warpgroup; centroids of a block

// What a block works on.
struct Block {
  int slot, key_head, key_heads, first, total;  // first: the block's first centroid of `total`
  std::int64_t first_row;                       // of the stacked centroids
  KeyChunk keys;

  __device__ explicit Block(const BackwardShape& shape) {
    total = shape.group * shape.clusters;
    key_heads = shape.H / shape.group;
    const int tiles = (total + kRows - 1) / kRows, number = static_cast<int>(blockIdx.x);
    slot = number / tiles / key_heads;
    key_head = number / tiles % key_heads;
    first = number % tiles * kRows;
    keys = shape.chunks.find(shape.spans.k, slot);
    first_row =
        (static_cast<std::int64_t>(keys.item) * shape.H + key_head * shape.group) * shape.clusters;
  }
};

// 64 centroids of a warpgroup: tile 2 i + (number of the warpgroup) of the block for tile i of it.
template <class T, int kWidth>
struct MeanTile {
  using Matrix = Bands<T, kWidth, 64>;
  static constexpr int kBytes = 2 * Matrix::kBytes;
  Matrix mean, dout;
  int first, count;  // centroids from `first` on, `count` of which are there
  float lse[2], delta[2];
  float sum[kWidth / 64][32];

  __device__ void load(const BackwardArgs<T>& args, const Block& block, std::uint32_t base, int i) {
    const int number = 2 * i + static_cast<int>(threadIdx.x) / kWarpgroup;
    const int pitch = args.shape.pitch;
    mean.base = base + number * kBytes;
    dout.base = mean.base + Matrix::kBytes;
    first = min(block.first + 64 * number, block.total);
    count = block.total - first;
    const std::int64_t row = block.first_row + first;
    mean.template load<64, kWarpgroup>(0, {args.scratch.mean + row * pitch, pitch, pitch, true}, 0,
                                       count);
    dout.template load<64, kWarpgroup>(0, {args.scratch.dout + row * pitch, pitch, pitch, true}, 0,
                                       count);
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
  __device__ void store(const BackwardArgs<T>& args, const Block& block) const {
    const BackwardShape& shape = args.shape;
    const float factor = shape.scale / (shape.weight_scale * shape.gradient_scale);
    const std::int64_t stack =
        static_cast<std::int64_t>(block.slot) * block.key_heads + block.key_head;
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      if (group_row(side) >= count) continue;
      float* row = args.scratch.mean_slices +
                   (stack * block.total + first + group_row(side)) * kWidth + threadIdx.x % 4 * 2;
#pragma unroll
      for (int n = 0; n < kWidth / 8; ++n) {
        const float* pair = sum[n / 8] + n % 8 * 4 + 2 * side;
        store2(row + 8 * n, pair[0] * factor, pair[1] * factor);
      }
    }
  }
};

// Rows of 64 elements, more than 128 centroids: the scores of one tile are computed while the
// weights of the other are.
template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    mean_gradient_pair_kernel(const __grid_constant__ BackwardArgs<T> args) {
  await_previous();
  extern __shared__ __align__(1024) unsigned char memory[];
  using Tile64 = MeanTile<T, 64>;
  using Pipeline = KeyPipeline<T, 64, 2, kThreads / 32>;
  using Keys = Bands<T, 64, 64>;
  const Block block(args.shape);
  const KeyChunk& keys = block.keys;
  if (keys.begin >= keys.end) return;
  const std::uint32_t base = shared_address(memory);
  Tile64 tile[2];
  tile[0].load(args, block, base, 0);
  tile[1].load(args, block, base, 1);
  cp_async_commit();
  const Pipeline pipeline{base + 4 * Tile64::kBytes,
                          {args.k.rows(keys.keys.batch, block.key_head, keys.keys.begin),
                           args.v.rows(keys.keys.batch, block.key_head, keys.keys.begin)},
                          (keys.end - keys.begin + 63) / 64};
  pipeline.init();
  cp_async_wait<0>();
  fence_async_proxy();
  __syncthreads();
  const auto first = [&](int t) { return keys.begin + t * 64; };
  pipeline.start(first, keys.end);

  const float scale = args.shape.scale * kLog2E;
  float s[2][32], ds[32];
  std::uint32_t factor[4][4];
  // Tile i at keys t, whose scores are there; computes those of the other tile at keys `next`. Only
  // sums are on their way from one step to the next: of other accumulators the assembler does not
  // see that they were waited for.
  const auto step = [&](auto i, int t, int next) {
    constexpr int kNow = decltype(i)::value, kOther = 1 - kNow;
    const Keys k{pipeline.tile(t, 0)}, v{pipeline.tile(t, 1)};
    wgmma_fence();
    row_products(ds, tile[kNow].dout, 0, v, 0);
    wgmma_commit();
    row_products(s[kOther], tile[kOther].mean, 0, Keys{pipeline.tile(next, 0)}, 0);
    wgmma_commit();
    tile[kNow].weigh(s[kNow], keys.end - first(t), scale);
    wgmma_wait<1>();
    wgmma_settle(ds);
    if (kNow == 0 && t > 0) pipeline.release(t - 1);
    tile[kNow].differentiate(ds, s[kNow]);
    pack_factor<T>(factor, ds);
    wgmma_fence();
    add_products(tile[kNow].sum, factor, k, 0);
    wgmma_commit();
    wgmma_wait<1>();
    wgmma_settle(s[kOther]);
  };
  wgmma_settle(tile[0].sum[0]);
  wgmma_settle(tile[1].sum[0]);
  pipeline.wait(0);
  wgmma_fence();
  row_products(s[0], tile[0].mean, 0, Keys{pipeline.tile(0, 0)}, 0);
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_settle(s[0]);
#pragma unroll 1
  for (int t = 0; t < pipeline.total; ++t) {
    pipeline.advance(t, first, keys.end);
    step(std::integral_constant<int, 0>{}, t, t);
    const int next = min(t + 1, pipeline.total - 1);
    pipeline.wait(next);
    step(std::integral_constant<int, 1>{}, t, next);
  }
  cp_async_wait<0>();
  wgmma_wait<0>();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    wgmma_settle(tile[i].sum[0]);
    tile[i].store(args, block);
  }
}

// The general form.
template <class T, int kWidth>
struct SimpleShape {
  static constexpr int kKeys = 64, kStages = 3;
  using Keys = Bands<T, kWidth, kKeys>;
  static constexpr int kRing = 2 * kTiles * MeanTile<T, kWidth>::kBytes;
  static constexpr int kSharedBytes = kRing + kStages * 2 * Keys::kBytes;
};

template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads, 1)
    mean_gradient_simple_kernel(const __grid_constant__ BackwardArgs<T> args) {
  await_previous();
  extern __shared__ __align__(1024) unsigned char memory[];
  using S = SimpleShape<T, kWidth>;
  const Block block(args.shape);
  const KeyChunk& keys = block.keys;
  if (keys.begin >= keys.end) return;
  const std::uint32_t base = shared_address(memory);
  MeanTile<T, kWidth> tile[kTiles];
#pragma unroll
  for (int i = 0; i < kTiles; ++i) tile[i].load(args, block, base, i);
  const Rows<const T> gK = args.k.rows(keys.keys.batch, block.key_head, keys.keys.begin);
  const Rows<const T> gV = args.v.rows(keys.keys.batch, block.key_head, keys.keys.begin);
  const auto stage = [&](int number, int tensor) {
    return
        typename S::Keys{base + S::kRing + (2 * (number % S::kStages) + tensor) * S::Keys::kBytes};
  };
  const auto load_stage = [&](int number) {
    const int first = keys.begin + number * S::kKeys;
    if (first < keys.end) {
      stage(number, 0).template load<S::kKeys, kThreads>(0, gK, first, keys.end - first);
      stage(number, 1).template load<S::kKeys, kThreads>(0, gV, first, keys.end - first);
    }
    cp_async_commit();
  };
  load_stage(0);
  load_stage(1);
  const float scale = args.shape.scale * kLog2E;
  float s[32], ds[32];
  std::uint32_t factor[4][4];
#pragma unroll 1
  for (int number = 0; keys.begin + number * S::kKeys < keys.end; ++number) {
    cp_async_wait<1>();
    fence_async_proxy();
    wgmma_wait<0>();
    __syncthreads();
    load_stage(number + 2);
    const typename S::Keys k = stage(number, 0), v = stage(number, 1);
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      if (tile[i].count <= 0) continue;
      wgmma_fence();
      row_products(s, tile[i].mean, 0, k, 0);
      wgmma_commit();
      row_products(ds, tile[i].dout, 0, v, 0);
      wgmma_commit();
      wgmma_wait<1>();
      wgmma_settle(s);
      tile[i].weigh(s, keys.end - keys.begin - number * S::kKeys, scale);
      wgmma_wait<0>();
      wgmma_settle(ds);
      tile[i].differentiate(ds, s);
      pack_factor<T>(factor, ds);
      wgmma_fence();
      add_products(tile[i].sum, factor, k, 0);
      wgmma_commit();
    }
  }
  cp_async_wait<0>();
  wgmma_wait<0>();
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int band = 0; band < kWidth / 64; ++band) wgmma_settle(tile[i].sum[band]);
    tile[i].store(args, block);
  }
}

template <class T, class Kernel>
void launch(const BackwardArgs<T>& args, Kernel* kernel, int bytes, cudaStream_t stream) {
  const BackwardShape& shape = args.shape;
  const int tiles = (shape.group * shape.clusters + kRows - 1) / kRows;
  const int blocks = shape.chunks.slots * (shape.H / shape.group) * tiles;
  if (blocks == 0) return;
  launch_early("mean_gradient_sm90a", kernel, static_cast<unsigned>(blocks), kThreads,
               static_cast<std::size_t>(bytes), stream, args);
}

}  // namespace

template <class T>
void centroid_mean_gradients_sm90a(const BackwardArgs<T>& args, cudaStream_t stream) {
  const BackwardShape& shape = args.shape;
  if (shape.pitch == 128)
    launch(args, &mean_gradient_simple_kernel<T, 128>, SimpleShape<T, 128>::kSharedBytes, stream);
  else if (shape.group * shape.clusters <= 128)
    launch(args, &mean_gradient_simple_kernel<T, 64>, SimpleShape<T, 64>::kSharedBytes, stream);
  else
    launch(args, &mean_gradient_pair_kernel<T>,
           4 * MeanTile<T, 64>::kBytes + KeyPipeline<T, 64, 2, kThreads / 32>::kBytes, stream);
}

template void centroid_mean_gradients_sm90a(const BackwardArgs<__nv_bfloat16>&, cudaStream_t);
template void centroid_mean_gradients_sm90a(const BackwardArgs<__half>&, cudaStream_t);

}  // namespace coterie::cuda
