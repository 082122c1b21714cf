// SPDX-License-Identifier: MIT
// Backward pass of centroid attention over all keys (backward.h), all keys treated alike unless
// TopKeyBits names pairs to leave out:
//   A = exp2(scale mean k - lse)   dS = A (dout v - delta)
//   dv_j = sum_c A_cj dout_c   dk_j = scale sum_c dS_cj mean_c   dmean_c = scale sum_j dS_cj k_j
// One kernel in two forms, with its sums in registers: a block owns keys and walks the centroids of
// all query heads of its key head, or owns centroids and walks a chunk of the keys. Scores are
// computed twice, and no block waits for another one's dS.
//
// Block number = (slot of keys * key heads + key head) * tiles of owned centroids + tile. 4 or 8
// warps of 16 or 32 owned rows (CentroidShape); the operands of the owned rows stay in registers
// for 16-bit types. Shared memory: the owned rows, two stages of 16 to 64 walked rows and their lse
// and delta; 65 KiB for rows of 64 elements, 97 KiB for rows of 128. For f32, and for all types if
// the device is not a Hopper GPU. On Hopper, 16-bit types without dropout use
// centroid_backward_sm90a.cu. Dropout multiplies dout . v, and A in dv.
#include <cstdint>

#include "cuda/clustered/backward.h"
#include "cuda/launch/dispatch.h"
#include "cuda/launch/launch.h"
#include "cuda/prim/dropout.cuh"
#include "cuda/prim/fragments.cuh"
#include "cuda/prim/load.cuh"
#include "cuda/prim/softmax.cuh"
#include "cuda/prim/store.cuh"

namespace coterie::cuda {
namespace {

// A warp owns kBlocks x 16 rows of one side and walks tiles of kStep rows of the other. Operands of
// the owned rows stay in registers if they fit: two products need 2 x kBlocks x kWidth / 8 each.
template <class T, int kWidth>
struct CentroidShape {
  static constexpr bool kHalf = sizeof(T) == 2;
  static constexpr int kBlocks = kHalf && kWidth <= 64 ? 2 : 1;
  static constexpr int kWarps = kHalf && kWidth > 64 ? 8 : 4;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kOwned = 16 * kBlocks * kWarps;
  static constexpr int kStep = (kHalf ? 64 : 32) / (kWidth > 64 ? 2 : 1);
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

// kKeys: the block owns the keys of a slot of `chunks`; otherwise a tile of centroids, and walks
// the keys of the slot.
template <class T, int kWidth, bool kKeys>
__global__ void __launch_bounds__(CentroidShape<T, kWidth>::kThreads,
                                  CentroidShape<T, kWidth>::kMinBlocks)
    centroid_gradient_kernel(const __grid_constant__ BackwardArgs<T> args, ItemChunks chunks,
                             int tiles) {
  using S = CentroidShape<T, kWidth>;
  extern __shared__ __align__(128) unsigned char memory[];
  const BackwardShape& shape = args.shape;
  const StackedCentroids stack(shape, chunks, static_cast<int>(blockIdx.x) / tiles);
  const ItemChunk& keys = stack.keys;
  if (keys.begin >= keys.end || args.adds(keys.item, stack.key_head * shape.group)) return;
  const int owned = kKeys ? keys.begin : static_cast<int>(blockIdx.x) % tiles * S::kOwned;
  const int count = (kKeys ? keys.end : stack.total) - owned;  // of owned rows
  const int begin = kKeys ? 0 : keys.begin, end = kKeys ? stack.total : keys.end;
  const int lane = threadIdx.x % 32,
            warp_row = static_cast<int>(threadIdx.x) / 32 * 16 * S::kBlocks;
  const std::uint32_t base = shared_address(memory), stages = base + 2 * S::kOwnedBytes;
  // Dropout: words of the walked centroids of a stage, or of the owned ones.
  __shared__ DropoutRow words[kKeys ? 2 * S::kStep : S::kOwned];
  const bool drops = shape.dropout.on();
  const auto words_of = [&](int centroid) {
    const int head = stack.key_head * shape.group + centroid / shape.clusters;
    return shape.dropout.cluster(static_cast<std::int64_t>(keys.item) * shape.H + head,
                                 centroid % shape.clusters);
  };
  float* stats = reinterpret_cast<float*>(memory + 2 * S::kOwnedBytes + 4 * S::kTileBytes);
  const auto owned_tile = [&](int tensor) {
    return Tile<T, kWidth>{base + tensor * S::kOwnedBytes};
  };
  const auto stage_of = [&](int first) { return (first - begin) / S::kStep % 2; };
  const auto walked_tile = [&](int first, int tensor) {
    return Tile<T, kWidth>{stages + (2 * stage_of(first) + tensor) * S::kTileBytes};
  };
  // Keys and means (tensor 0), or values and dout.
  const auto rows = [&](bool of_keys, int tensor) {
    const Tensor4<const T>& from = tensor == 0 ? args.k : args.v;
    return of_keys ? from.rows(keys.span.batch, stack.key_head, keys.span.begin)
                   : stack.operand(args, tensor);
  };
  const auto fetch = [&](int first) {
#pragma unroll
    for (int tensor = 0; tensor < 2; ++tensor)
      load_tile<S::kStep, S::kThreads>(walked_tile(first, tensor), rows(!kKeys, tensor), first,
                                       end - first);
    // Rows beyond the last have weights exp2(0) = 1, but their mean and dout are zero.
    const int r = first + static_cast<int>(threadIdx.x) % S::kStep;
    const float* from = threadIdx.x < S::kStep ? args.scratch.row_lse : args.scratch.row_delta;
    const int to = stage_of(first) * 2 * S::kStep + static_cast<int>(threadIdx.x);
    if (kKeys && threadIdx.x < 2 * S::kStep)
      cp_async4(shared_address(stats + to), from + (r < end ? stack.first_row + r : 0), r < end);
    if (kKeys && drops && threadIdx.x < S::kStep)
      words[stage_of(first) * S::kStep + threadIdx.x] = words_of(r);
    cp_async_commit();
  };

#pragma unroll
  for (int tensor = 0; tensor < 2; ++tensor)
    load_tile<S::kOwned, S::kThreads>(owned_tile(tensor), rows(kKeys, tensor), owned, count);
  cp_async_commit();
  if (!kKeys && drops)
    for (int r = static_cast<int>(threadIdx.x); r < S::kOwned; r += S::kThreads)
      words[r] = words_of(owned + r);
  fetch(begin);
  cp_async_wait<1>();
  __syncthreads();
  OwnedRows<T, kWidth> own[2];
  own[0].load(owned_tile(0), warp_row);
  own[1].load(owned_tile(1), warp_row);
  float lse[S::kBlocks][2], delta[S::kBlocks][2];  // of owned centroids
#pragma unroll
  for (int i = 0; i < 2 * S::kBlocks; ++i) {
    const int r = warp_row + 8 * i + lane / 4;
    const bool there = !kKeys && r < count;
    lse[i / 2][i % 2] = there ? args.scratch.row_lse[stack.first_row + owned + r] : INFINITY;
    delta[i / 2][i % 2] = there ? args.scratch.row_delta[stack.first_row + owned + r] : 0.0f;
  }

  // The owned row that this lane holds in block m, in the upper or lower half.
  const auto row_of = [&](int m, int side) { return warp_row + 16 * m + 8 * side + lane / 4; };
  const std::uint32_t* bits = args.scratch.top_bits.rows(keys.span, stack.key_head);
  // Whether a walked row and an owned one are a centroid and one of its top keys.
  const auto is_top = [&](int walked, int row) {
    const int key = kKeys ? owned + row : walked, centroid = kKeys ? walked : owned + row;
    if (key >= keys.end || centroid >= stack.total) return false;
    const std::int64_t at = static_cast<std::int64_t>(key) * args.scratch.top_bits.count;
    return (bits[at + centroid / 32] >> centroid % 32 & 1) != 0;
  };

  // dk and dv, or dmean.
  Accumulator sum[kKeys ? 2 : 1][S::kBlocks][S::kDepths] = {};
  const float scale = shape.scale * kLog2e;
#pragma unroll 1
  for (int first = begin; first < end; first += S::kStep) {
    cp_async_wait<0>();
    __syncthreads();
    if (first + S::kStep < end) fetch(first + S::kStep);
    const float* row_stats = stats + stage_of(first) * 2 * S::kStep;
#pragma unroll 1
    for (int c = 0; c < S::kStep; c += 16) {
      Accumulator s[S::kBlocks], ds[S::kBlocks];
      own[0].scores(s, walked_tile(first, 0), c);
      own[1].scores(ds, walked_tile(first, 1), c);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int column = c + 8 * half + lane % 4 * 2;
        float2 l{}, e{};  // of walked centroids
        if (kKeys) l = *reinterpret_cast<const float2*>(row_stats + column);
        if (kKeys) e = *reinterpret_cast<const float2*>(row_stats + S::kStep + column);
#pragma unroll
        for (int i = 0; i < 4 * S::kBlocks; ++i) {
          const int m = i / 4, side = i / 2 % 2;
          const float own_lse = kKeys ? (i % 2 ? l.y : l.x) : lse[m][side];
          const float own_delta = kKeys ? (i % 2 ? e.y : e.x) : delta[m][side];
          float &p = s[m][half][i % 4], &x = ds[m][half][i % 4];
          p = exp2_approximate(fmaf(p, scale, -own_lse));
          float factor = 1.0f;
          if (drops) {
            const int row = row_of(m, side), walked = column + i % 2;
            const int centroid = kKeys ? stage_of(first) * S::kStep + walked : row;
            const int key = kKeys ? owned + row : first + walked;
            factor = kept(shape.dropout, words[centroid], key);
            x *= factor;
          }
          x = p * (x - own_delta);
          if (kKeys && drops) p *= factor;
          // Keys beyond the end: exp2 of -lse could overflow, and inf times a zero key is NaN.
          if (!kKeys && first + column + i % 2 >= end) x = 0.0f;
          if (bits && is_top(first + column + i % 2, row_of(m, side))) p = x = 0.0f;
        }
      }
      if constexpr (kKeys) add_values(sum[1], s, walked_tile(first, 1), c);
      add_values(sum[0], ds, walked_tile(first, 0), c);
    }
  }

  const auto store_keys = [&](const Tensor4<T>& tensor, int number, float times) {
    if (!tensor.data) return;
    const Rows<T> out = tensor.rows(keys.span.batch, stack.key_head, keys.span.begin + owned);
#pragma unroll
    for (int i = 0; i < S::kBlocks * S::kDepths; i += 2) {
      const int m = i / S::kDepths, d = i % S::kDepths;
      Accumulator pair[2];
#pragma unroll
      for (int j = 0; j < 16; ++j)
        pair[j / 8][j / 4 % 2][j % 4] = sum[number][m][d + j / 8][j / 4 % 2][j % 4] * times;
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const bool there = row_of(m, side) < count;
        store_columns(out, row_of(m, side), there, 16 * d, pair, side);
      }
    }
  };
  const float unscale = 1.0f / (shape.weight_scale * shape.gradient_scale);
  const float factor = shape.scale * unscale;
  if constexpr (kKeys) {
    store_keys(args.dk, 0, factor);
    store_keys(args.dv, 1, unscale);
    return;
  }
  float* out = stack.mean_slice(args) + static_cast<std::int64_t>(owned) * shape.pitch;
#pragma unroll
  for (int i = 0; i < 2 * S::kBlocks; ++i) {
    if (row_of(i / 2, i % 2) >= count) continue;
    float* to = out + static_cast<std::int64_t>(row_of(i / 2, i % 2)) * shape.pitch + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < 2 * S::kDepths; ++n) {
      const float* pair = sum[0][i / 2][n / 2][n % 2] + i % 2 * 2;
      store2(to + 8 * n, pair[0] * factor, pair[1] * factor);
    }
  }
}

template <class T, int kWidth, bool kKeys>
void launch(const BackwardArgs<T>& args, const ItemChunks& chunks, int tiles, cudaStream_t stream) {
  using S = CentroidShape<T, kWidth>;
  const auto kernel = &centroid_gradient_kernel<T, kWidth, kKeys>;
  allow_shared_memory(kernel, S::kSharedBytes);
  const int blocks = chunks.slots * (args.shape.H / args.shape.group) * tiles;
  if (blocks == 0) return;
  kernel<<<static_cast<unsigned>(blocks), S::kThreads, S::kSharedBytes, stream>>>(args, chunks,
                                                                                  tiles);
  COTERIE_LAUNCH("centroid_gradient_kernel");
}

}  // namespace

template <class T>
void centroid_gradients(const BackwardArgs<T>& args, cudaStream_t stream) {
  const BackwardShape& shape = args.shape;
  dispatch_head_dim("clustered", shape.pitch, [&](auto width) {
    constexpr int kWidth = decltype(width)::value, kOwned = CentroidShape<T, kWidth>::kOwned;
    const int tiles = (shape.group * shape.clusters + kOwned - 1) / kOwned;
    if (args.dq.data) launch<T, kWidth, false>(args, shape.chunks, tiles, stream);
    if (args.dk.data || args.dv.data)
      launch<T, kWidth, true>(args, shape.key_tiles(kOwned), 1, stream);
  });
}

template void centroid_gradients(const BackwardArgs<float>&, cudaStream_t);
template void centroid_gradients(const BackwardArgs<Bf16>&, cudaStream_t);
template void centroid_gradients(const BackwardArgs<F16>&, cudaStream_t);

}  // namespace coterie::cuda
