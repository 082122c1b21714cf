// SPDX-License-Identifier: MIT
// Backward pass of centroid attention over all keys (backward.h), all keys treated alike:
//   A = exp2(scale mean k - lse)   dS = A (dout v - delta)
//   dv_j = sum_c A_cj dout_c   dk_j = scale sum_c dS_cj mean_c   dmean_c = scale sum_j dS_cj k_j
// Two kernels, each with its sums in registers: a block owns keys and walks the centroids of all
// query heads of its key head, or owns centroids and walks a share of the keys. Scores are computed
// twice, and no block waits for another one's dS.
#include <cstdint>

#include "cuda/clustered/backward.h"
#include "cuda/launch/dispatch.h"
#include "cuda/launch/launch.h"
#include "cuda/prim/fragments.cuh"
#include "cuda/prim/load.cuh"
#include "cuda/prim/softmax.cuh"
#include "cuda/prim/store.cuh"

namespace coterie::cuda {
namespace {

// Rows that a warp of centroid_backward.cu owns, keys or centroids, and tiles of the other side.

// A warp owns kBlocks x 16 rows of one side and walks tiles of kStep rows of the other. Operands
// that stay are kept in registers where they fit: two products need 2 x kBlocks x kWidth / 8 each.
template <class T, int kWidth>
struct CentroidShape {
  static constexpr bool kHalf = sizeof(T) == 2;
  static constexpr int kBlocks = kHalf && kWidth <= 64 ? 2 : 1;
  static constexpr int kWarps = kHalf && kWidth > 64 ? 8 : 4;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kOwned = 16 * kBlocks * kWarps;
  static constexpr int kStep = kHalf ? 64 : 32;
  static constexpr int kDepths = kWidth / 16;
  static constexpr int kTileBytes = kStep * kWidth * static_cast<int>(sizeof(T));
  static constexpr int kOwnedBytes = kOwned * kWidth * static_cast<int>(sizeof(T));
  static constexpr int kStats = 2 * kStep * static_cast<int>(sizeof(float));
  // Two owned tiles, two stages of two tiles with two numbers a row.
  static constexpr int kSharedBytes = 2 * kOwnedBytes + 4 * kTileBytes + 2 * kStats;
  static constexpr int kMinBlocks = kWarps == 4 && kHalf ? 2 : 1;
};

template <class T, int kWidth>
using OwnedRows =
    QueryFragments<T, kWidth, CentroidShape<T, kWidth>::kHalf, CentroidShape<T, kWidth>::kBlocks>;

// The stacked centroids of the query heads of one key head.
struct StackedRows {
  std::int64_t first;
  int count;
};

__device__ __forceinline__ StackedRows stacked_rows(const BackwardShape& shape, int item,
                                                    int key_head) {
  const std::int64_t head = static_cast<std::int64_t>(item) * shape.H + key_head * shape.group;
  return {head * shape.clusters, shape.group * shape.clusters};
}

template <class T>
__device__ __forceinline__ Rows<const T> scratch_rows(const T* rows, std::int64_t first,
                                                      int pitch) {
  return {rows + first * pitch, pitch, pitch, true};
}

// Weights and their derivatives of 16 columns (centroids): stats holds lse and delta of the
// columns.
template <class T, int kBlocks>
__device__ __forceinline__ void differentiate_columns(Accumulator (&s)[kBlocks],
                                                      Accumulator (&d)[kBlocks], const float* lse,
                                                      const float* delta, float scale) {
  const int column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float2 l = *reinterpret_cast<const float2*>(lse + 8 * half + column);
    const float2 e = *reinterpret_cast<const float2*>(delta + 8 * half + column);
#pragma unroll
    for (int m = 0; m < kBlocks; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float p = exp2_approximate(fmaf(s[m][half][i], scale, -(i % 2 ? l.y : l.x)));
        s[m][half][i] = p;
        d[m][half][i] = p * (d[m][half][i] - (i % 2 ? e.y : e.x));
      }
  }
}

template <class T, int kWidth>
__global__ void __launch_bounds__(CentroidShape<T, kWidth>::kThreads,
                                  CentroidShape<T, kWidth>::kMinBlocks)
    key_gradient_kernel(const __grid_constant__ BackwardArgs<T> args, ItemChunks tiles) {
  using S = CentroidShape<T, kWidth>;
  extern __shared__ __align__(128) unsigned char memory[];
  const BackwardShape& shape = args.shape;
  const ItemChunk keys = tiles.find(shape.spans.k, blockIdx.x);
  const int key_count = keys.end - keys.begin;
  if (key_count <= 0) return;
  const int key_head = blockIdx.y, warp = threadIdx.x / 32;
  const StackedRows rows = stacked_rows(shape, keys.item, key_head);
  const std::uint32_t base = shared_address(memory);
  const Tile<T, kWidth> sK{base}, sV{base + S::kOwnedBytes};
  const std::uint32_t stages = base + 2 * S::kOwnedBytes;
  float* stats = reinterpret_cast<float*>(memory + 2 * S::kOwnedBytes + 4 * S::kTileBytes);

  const auto fetch = [&](int first) {
    const int stage = first / S::kStep % 2, count = rows.count - first;
    const Tile<T, kWidth> sMean{stages + 2 * stage * S::kTileBytes};
    const Tile<T, kWidth> sDout{stages + (2 * stage + 1) * S::kTileBytes};
    const auto row = rows.first + first;
    load_tile<S::kStep, S::kThreads>(sMean, scratch_rows<T>(args.scratch.mean, row, shape.pitch), 0,
                                     count);
    load_tile<S::kStep, S::kThreads>(sDout, scratch_rows<T>(args.scratch.dout, row, shape.pitch), 0,
                                     count);
    // Rows beyond the last have weights exp2(0) = 1, but their mean and dout are zero.
    const int r = threadIdx.x % S::kStep;
    const float* from = threadIdx.x < S::kStep ? args.scratch.row_lse : args.scratch.row_delta;
    const int to = stage * 2 * S::kStep + static_cast<int>(threadIdx.x);
    if (threadIdx.x < 2 * S::kStep)
      cp_async4(shared_address(stats + to), from + (r < count ? row + r : 0), r < count);
    cp_async_commit();
  };

  load_tile<S::kOwned, S::kThreads>(sK, args.k.rows(keys.span.batch, key_head, keys.span.begin),
                                    keys.begin, key_count);
  load_tile<S::kOwned, S::kThreads>(sV, args.v.rows(keys.span.batch, key_head, keys.span.begin),
                                    keys.begin, key_count);
  cp_async_commit();
  fetch(0);
  cp_async_wait<1>();
  __syncthreads();
  OwnedRows<T, kWidth> rK, rV;
  rK.load(sK, warp * 16 * S::kBlocks);
  rV.load(sV, warp * 16 * S::kBlocks);

  Accumulator dk[S::kBlocks][S::kDepths] = {}, dv[S::kBlocks][S::kDepths] = {};
  const float scale = shape.scale * kLog2e;
#pragma unroll 1
  for (int first = 0; first < rows.count; first += S::kStep) {
    cp_async_wait<0>();
    __syncthreads();
    if (first + S::kStep < rows.count) fetch(first + S::kStep);
    const int stage = first / S::kStep % 2;
    const Tile<T, kWidth> sMean{stages + 2 * stage * S::kTileBytes};
    const Tile<T, kWidth> sDout{stages + (2 * stage + 1) * S::kTileBytes};
    const float* lse = stats + stage * 2 * S::kStep;
#pragma unroll 1
    for (int c = 0; c < S::kStep; c += 16) {
      Accumulator s[S::kBlocks], ds[S::kBlocks];
      rK.scores(s, sMean, c);
      rV.scores(ds, sDout, c);
      differentiate_columns<T>(s, ds, lse + c, lse + S::kStep + c, scale);
      add_values(dv, s, sDout, c);
      add_values(dk, ds, sMean, c);
    }
  }

  const float dv_scale = 1.0f / (shape.weight_scale * shape.gradient_scale);
  const auto store = [&](const Tensor4<T>& tensor, const Accumulator(&acc)[S::kBlocks][S::kDepths],
                         float factor) {
    if (!tensor.data) return;
    const Rows<T> out = tensor.rows(keys.span.batch, key_head, keys.span.begin + keys.begin);
#pragma unroll
    for (int m = 0; m < S::kBlocks; ++m)
#pragma unroll
      for (int d = 0; d < S::kDepths; d += 2) {
        Accumulator pair[2];
#pragma unroll
        for (int i = 0; i < 16; ++i)
          pair[i / 8][i / 4 % 2][i % 4] = acc[m][d + i / 8][i / 4 % 2][i % 4] * factor;
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          const int row = 16 * (S::kBlocks * warp + m) + 8 * side + threadIdx.x % 32 / 4;
          store_columns(out, row, row < key_count, 16 * d, pair, side);
        }
      }
  };
  store(args.dk, dk, shape.scale * dv_scale);
  store(args.dv, dv, dv_scale);
}

template <class T, int kWidth>
__global__ void __launch_bounds__(CentroidShape<T, kWidth>::kThreads,
                                  CentroidShape<T, kWidth>::kMinBlocks)
    mean_gradient_kernel(const __grid_constant__ BackwardArgs<T> args) {
  using S = CentroidShape<T, kWidth>;
  extern __shared__ __align__(128) unsigned char memory[];
  const BackwardShape& shape = args.shape;
  const int total = shape.group * shape.clusters, tiles = (total + S::kOwned - 1) / S::kOwned;
  const int owned = blockIdx.x % tiles * S::kOwned, key_heads = shape.H / shape.group;
  const int slot = blockIdx.x / tiles / key_heads, key_head = blockIdx.x / tiles % key_heads;
  const ItemChunk keys = shape.chunks.find(shape.spans.k, slot);
  const int begin = keys.begin, end = keys.end;
  if (begin >= end) return;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const StackedRows rows = stacked_rows(shape, keys.item, key_head);
  const std::uint32_t base = shared_address(memory);
  const Tile<T, kWidth> sMean{base}, sDout{base + S::kOwnedBytes};
  const std::uint32_t stages = base + 2 * S::kOwnedBytes;
  const Rows<const T> gK = args.k.rows(keys.span.batch, key_head, keys.span.begin);
  const Rows<const T> gV = args.v.rows(keys.span.batch, key_head, keys.span.begin);

  const auto fetch = [&](int first) {
    const int stage = (first - begin) / S::kStep % 2;
    load_tile<S::kStep, S::kThreads>(Tile<T, kWidth>{stages + 2 * stage * S::kTileBytes}, gK, first,
                                     end - first);
    load_tile<S::kStep, S::kThreads>(Tile<T, kWidth>{stages + (2 * stage + 1) * S::kTileBytes}, gV,
                                     first, end - first);
    cp_async_commit();
  };

  load_tile<S::kOwned, S::kThreads>(
      sMean, scratch_rows<T>(args.scratch.mean, rows.first + owned, shape.pitch), 0, total - owned);
  load_tile<S::kOwned, S::kThreads>(
      sDout, scratch_rows<T>(args.scratch.dout, rows.first + owned, shape.pitch), 0, total - owned);
  cp_async_commit();
  fetch(begin);
  cp_async_wait<1>();
  __syncthreads();
  OwnedRows<T, kWidth> rMean, rDout;
  rMean.load(sMean, warp * 16 * S::kBlocks);
  rDout.load(sDout, warp * 16 * S::kBlocks);

  float lse[S::kBlocks][2], delta[S::kBlocks][2];
#pragma unroll
  for (int m = 0; m < S::kBlocks; ++m)
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const int r = owned + 16 * (S::kBlocks * warp + m) + 8 * side + lane / 4;
      lse[m][side] = r < total ? args.scratch.row_lse[rows.first + r] : INFINITY;
      delta[m][side] = r < total ? args.scratch.row_delta[rows.first + r] : 0.0f;
    }
  Accumulator dmean[S::kBlocks][S::kDepths] = {};
  const float scale = shape.scale * kLog2e;
#pragma unroll 1
  for (int first = begin; first < end; first += S::kStep) {
    cp_async_wait<0>();
    __syncthreads();
    if (first + S::kStep < end) fetch(first + S::kStep);
    const int stage = (first - begin) / S::kStep % 2;
    const Tile<T, kWidth> sK{stages + 2 * stage * S::kTileBytes};
    const Tile<T, kWidth> sV{stages + (2 * stage + 1) * S::kTileBytes};
#pragma unroll 1
    for (int j = 0; j < S::kStep; j += 16) {
      Accumulator s[S::kBlocks], ds[S::kBlocks];
      rMean.scores(s, sK, j);
      rDout.scores(ds, sV, j);
#pragma unroll
      for (int m = 0; m < S::kBlocks; ++m)
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          // Keys beyond the end: exp2 of -lse could overflow, and inf times a zero key is NaN.
          const int key = first + j + 8 * (i / 4) + lane % 4 * 2 + i % 2, side = i / 2 % 2;
          float& x = ds[m][i / 4][i % 4];
          x = exp2_approximate(fmaf(s[m][i / 4][i % 4], scale, -lse[m][side])) *
              (x - delta[m][side]);
          if (key >= end) x = 0.0f;
        }
      add_values(dmean, ds, sK, j);
    }
  }

  const float factor = shape.scale / (shape.weight_scale * shape.gradient_scale);
  const std::int64_t stack = static_cast<std::int64_t>(slot) * key_heads + key_head;
  float* out = args.scratch.mean_slices + stack * total * shape.pitch;
#pragma unroll
  for (int m = 0; m < S::kBlocks; ++m)
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const int r = owned + 16 * (S::kBlocks * warp + m) + 8 * side + lane / 4;
      if (r >= total) continue;
#pragma unroll
      for (int d = 0; d < S::kDepths; ++d)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          store2(
              out + static_cast<std::int64_t>(r) * shape.pitch + 16 * d + 8 * half + lane % 4 * 2,
              dmean[m][d][half][2 * side] * factor, dmean[m][d][half][2 * side + 1] * factor);
    }
}

}  // namespace

template <class T>
void centroid_key_gradients(const BackwardArgs<T>& args, cudaStream_t stream) {
  dispatch_head_dim("clustered", args.shape.pitch, [&](auto width) {
    using S = CentroidShape<T, decltype(width)::value>;
    const auto kernel = &key_gradient_kernel<T, decltype(width)::value>;
    allow_shared_memory(kernel, S::kSharedBytes);
    const ItemChunks tiles = args.shape.key_tiles(S::kOwned);
    if (tiles.slots == 0) return;
    const dim3 grid(static_cast<unsigned>(tiles.slots),
                    static_cast<unsigned>(args.shape.H / args.shape.group));
    kernel<<<grid, S::kThreads, S::kSharedBytes, stream>>>(args, tiles);
    COTERIE_LAUNCH("key_gradient_kernel");
  });
}

template <class T>
void centroid_mean_gradients(const BackwardArgs<T>& args, cudaStream_t stream) {
  dispatch_head_dim("clustered", args.shape.pitch, [&](auto width) {
    using S = CentroidShape<T, decltype(width)::value>;
    const auto kernel = &mean_gradient_kernel<T, decltype(width)::value>;
    allow_shared_memory(kernel, S::kSharedBytes);
    const BackwardShape& shape = args.shape;
    const int tiles = (shape.group * shape.clusters + S::kOwned - 1) / S::kOwned;
    const int blocks = shape.chunks.slots * (shape.H / shape.group) * tiles;
    if (blocks == 0) return;
    kernel<<<static_cast<unsigned>(blocks), S::kThreads, S::kSharedBytes, stream>>>(args);
    COTERIE_LAUNCH("mean_gradient_kernel");
  });
}

#define COTERIE_INSTANTIATE(T)                                                \
  template void centroid_key_gradients(const BackwardArgs<T>&, cudaStream_t); \
  template void centroid_mean_gradients(const BackwardArgs<T>&, cudaStream_t);
COTERIE_INSTANTIATE(float)
COTERIE_INSTANTIATE(Bf16)
COTERIE_INSTANTIATE(F16)
#undef COTERIE_INSTANTIATE

}  // namespace coterie::cuda
