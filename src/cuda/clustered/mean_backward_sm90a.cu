// SPDX-License-Identifier: MIT
// mean_gradient_kernel of centroid_backward.cu by warpgroup products, for 16-bit types, where
// centroid_backward_sm90a.cu does not serve. A block has two warpgroups and a multiprocessor to
// itself; a warpgroup owns 64 centroids and walks a share of the keys. Its scores are computed a
// tile of keys ahead, so that the tensor cores have work while it computes weights.
#include "cuda/clustered/backward.h"
#include "cuda/clustered/key_pipeline.cuh"
#include "cuda/launch/dispatch.h"
#include "cuda/launch/launch.h"
#include "cuda/prim/bands.cuh"
#include "cuda/prim/dependent.cuh"
#include "cuda/prim/softmax.cuh"

namespace coterie::cuda {
namespace {

constexpr int kThreads = 2 * kWarpgroup;
constexpr int kRows = kMeanRows;  // centroids of a block
static_assert(kRows == 2 * 64, "64 for each warpgroup");

// What a block works on.
struct Block {
  int slot, key_head, key_heads, first, total;  // first: the block's first centroid of `total`
  std::int64_t first_row;                       // of the stacked centroids
  ItemChunk keys;

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

// The 64 centroids of a warpgroup.
template <class T, int kWidth>
struct MeanTile {
  using Matrix = Bands<T, kWidth, 64>;
  static constexpr int kBytes = 2 * Matrix::kBytes;
  Matrix mean, dout;
  int first, count;  // centroids from `first` on, `count` of which are there
  float lse[2], delta[2];
  float sum[kWidth / 64][32];

  __device__ void load(const BackwardArgs<T>& args, const Block& block, std::uint32_t base) {
    const int number = static_cast<int>(threadIdx.x) / kWarpgroup;
    const int pitch = args.shape.pitch;
    mean.base = __shfl_sync(~0u, base + number * kBytes, 0);  // for descriptors: uniform
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

template <class T, int kWidth>
using MeanPipeline = KeyPipeline<T, kWidth, 2, kThreads / 32>;

template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads, 1)
    mean_gradient_kernel(const __grid_constant__ BackwardArgs<T> args) {
  await_previous();
  extern __shared__ __align__(1024) unsigned char memory[];
  using Pipeline = MeanPipeline<T, kWidth>;
  using Keys = Bands<T, kWidth, 64>;
  const Block block(args.shape);
  const ItemChunk& keys = block.keys;
  if (keys.begin >= keys.end) return;
  const std::uint32_t base = shared_address(memory);
  MeanTile<T, kWidth> tile;
  tile.load(args, block, base);
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
  pipeline.start(first, keys.end);

  const float scale = args.shape.scale * kLog2e;
  float s[2][32], ds[32];
  std::uint32_t factor[4][4];
  // Keys t, whose scores are there; computes those of the next ones. Only sums are on their way
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
void centroid_mean_gradients_sm90a(const BackwardArgs<T>& args, cudaStream_t stream) {
  const BackwardShape& shape = args.shape;
  const int tiles = (shape.group * shape.clusters + kRows - 1) / kRows;
  const int blocks = shape.chunks.slots * (shape.H / shape.group) * tiles;
  if (blocks == 0) return;
  dispatch_head_dim("clustered", shape.pitch, [&](auto width) {
    constexpr int kWidth = decltype(width)::value;
    launch_early("mean_gradient_sm90a", mean_gradient_kernel<T, kWidth>,
                 static_cast<unsigned>(blocks), kThreads,
                 2 * MeanTile<T, kWidth>::kBytes + MeanPipeline<T, kWidth>::kBytes, stream, args);
  });
}

template void centroid_mean_gradients_sm90a(const BackwardArgs<Bf16>&, cudaStream_t);
template void centroid_mean_gradients_sm90a(const BackwardArgs<F16>&, cudaStream_t);

}  // namespace coterie::cuda
