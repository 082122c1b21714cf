// SPDX-License-Identifier: MIT
// key_gradient_kernel of attend_centroid_bwd.cu by warpgroup products, for 16-bit types, where
// attend_centroid_bwd_sm90a.cu does not serve. A block has two warpgroups and a multiprocessor to
// itself; a warpgroup owns 64 keys at a time and walks the centroids of all query heads of its key
// head. Up to 512 (rows of 128 elements: 256) of them stay in shared memory, more are loaded in
// halves, one ahead.
#include "cuda/clustered_bwd.h"
#include "cuda/device/await.cuh"
#include "cuda/device/bands.cuh"
#include "cuda/device/softmax.cuh"
#include "cuda/device/store.cuh"
#include "cuda/launch.h"
#include "cuda/tuning.h"

namespace coterie::cuda {
namespace {

constexpr int kThreads = 2 * kWarpgroup;

template <class T, int kWidth>
struct Shape {
  static constexpr int kRows = 32768 / kWidth;  // centroids in shared memory
  static constexpr int kBuffer = kRows / 2;     // of which are loaded at a time when streamed
  using Centroids = Bands<T, kWidth, kRows>;
  using Keys = Bands<T, kWidth, 64>;
  static constexpr int kKeys = 2 * Centroids::kBytes;
  static constexpr int kStats = kKeys + 2 * 2 * Keys::kBytes;
  static constexpr int kSharedBytes = kStats + 2 * kRows * 4;
};

// Copies four bytes, or zeros.
__device__ __forceinline__ void cp_async4(const float* to, const float* from, bool there) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(there ? 4 : 0)
               : "memory");
}

// What a block works on, and its shared memory.
template <class T, int kWidth>
struct Block {
  using S = Shape<T, kWidth>;
  const BackwardArgs<T>& args;
  KeyChunk keys;
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

  // kLoaded centroids from `from` on, into rows from `row` on. Rows beyond the last get weights
  // exp2(0) = 1, but their mean and dout are zero.
  template <int kLoaded>
  __device__ void load_centroids(int row, int from) const {
    const int pitch = args.shape.pitch, count = total - from;
    const std::int64_t first = first_row + min(from, total);
    mean.template load<kLoaded, kThreads>(
        row, {args.scratch.mean + first * pitch, pitch, pitch, true}, 0, count);
    dout.template load<kLoaded, kThreads>(
        row, {args.scratch.dout + first * pitch, pitch, pitch, true}, 0, count);
    for (int r = threadIdx.x; r < kLoaded; r += kThreads) {
      cp_async4(lse + row + r, args.scratch.row_lse + (r < count ? first + r : 0), r < count);
      cp_async4(delta + row + r, args.scratch.row_delta + (r < count ? first + r : 0), r < count);
    }
  }

  // A place for 64 keys and their values of this warpgroup.
  struct Place {
    typename S::Keys k, v;
  };
  __device__ Place place() const {
    const int number = static_cast<int>(threadIdx.x) / kWarpgroup;
    const std::uint32_t k = mean.base + S::kKeys + 2 * number * S::Keys::kBytes;
    return {{k}, {k + S::Keys::kBytes}};
  }
  __device__ void load_keys(const Place& to, int first) const {
    const ItemSpan& span = keys.keys;
    to.k.template load<64, kWarpgroup>(0, args.k.rows(span.batch, key_head, span.begin), first,
                                       keys.end - first);
    to.v.template load<64, kWarpgroup>(0, args.v.rows(span.batch, key_head, span.begin), first,
                                       keys.end - first);
    cp_async_commit();
  }

  // s becomes the weights of 64 keys for the centroids from `row` on; then ds their derivatives.
  __device__ void weigh(float (&s)[32], int row) const {
    const float scale = args.shape.scale * kLog2E;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float2 l = *reinterpret_cast<const float2*>(lse + row + 8 * n + threadIdx.x % 4 * 2);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        s[4 * n + i] = exp2_approximate(fmaf(s[4 * n + i], scale, -(i % 2 ? l.y : l.x)));
    }
  }
  __device__ void differentiate(float (&ds)[32], const float (&s)[32], int row) const {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float2 e = *reinterpret_cast<const float2*>(delta + row + 8 * n + threadIdx.x % 4 * 2);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        ds[4 * n + i] = s[4 * n + i] * (ds[4 * n + i] - (i % 2 ? e.y : e.x));
    }
  }

  __device__ void store(const Tensor4<T>& tensor, const float (&sum)[kWidth / 64][32], float factor,
                        int first) const {
    if (!tensor.data) return;
    const ItemSpan& span = keys.keys;
    const Rows<T> rows = tensor.rows(span.batch, key_head, span.begin + first);
#pragma unroll
    for (int part = 0; part < kWidth / 32; ++part) {
      Accumulator pair[2];
#pragma unroll
      for (int i = 0; i < 16; ++i)
        pair[i / 8][i / 4 % 2][i % 4] = sum[part / 2][part % 2 * 16 + i] * factor;
#pragma unroll
      for (int side = 0; side < 2; ++side)
        store_columns(rows, group_row(side), group_row(side) < keys.end - first, 32 * part, pair,
                      side);
    }
  }
  __device__ void store(const float (&dk)[kWidth / 64][32], const float (&dv)[kWidth / 64][32],
                        int first) const {
    const float factor = 1.0f / (args.shape.weight_scale * args.shape.gradient_scale);
    store(args.dk, dk, args.shape.scale * factor, first);
    store(args.dv, dv, factor, first);
  }
};

template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads, 1)
    key_gradient_kernel(const __grid_constant__ BackwardArgs<T> args) {
  await_previous();
  extern __shared__ __align__(1024) unsigned char memory[];
  using B = Block<T, kWidth>;
  using S = Shape<T, kWidth>;
  const B block(args, memory);
  if (block.keys.begin >= block.keys.end) return;
  const int buffers = (block.total + S::kBuffer - 1) / S::kBuffer;
  const bool resident = buffers <= 2;
  const typename B::Place here = block.place();
  const int offset = static_cast<int>(threadIdx.x) / kWarpgroup * 64;
  for (int buffer = 0; buffer < (resident ? buffers : 1); ++buffer)
    block.template load_centroids<S::kBuffer>(buffer * S::kBuffer, buffer * S::kBuffer);
  block.load_keys(here, block.keys.begin + offset);
  cp_async_wait<0>();
  fence_async_proxy();
  __syncthreads();

  float s[32], ds[32], dk[kWidth / 64][32], dv[kWidth / 64][32];
  std::uint32_t p_factor[4][4], ds_factor[4][4];
  int number = 0;  // of the buffer in use, counted over all of them
#pragma unroll 1
  for (int pair = block.keys.begin; pair < block.keys.end; pair += 128) {
#pragma unroll
    for (int i = 0; i < kWidth / 2; ++i) dk[i / 32][i % 32] = dv[i / 32][i % 32] = 0.0f;
#pragma unroll 1
    for (int buffer = 0; buffer < buffers; ++buffer, ++number) {
      if (!resident) {  // the next one is loaded while this one is used
        cp_async_wait<0>();
        fence_async_proxy();
        __syncthreads();
        block.template load_centroids<S::kBuffer>((number + 1) % 2 * S::kBuffer,
                                                  (buffer + 1) % buffers * S::kBuffer);
        cp_async_commit();
      }
      const int start = (resident ? buffer : number % 2) * S::kBuffer;
      const int count = min(block.total - buffer * S::kBuffer, S::kBuffer);
#pragma unroll 1
      for (int row = start; row < start + count; row += 64) {
        wgmma_fence();
        row_products(s, here.k, 0, block.mean, row);
        wgmma_commit();
        row_products(ds, here.v, 0, block.dout, row);
        wgmma_commit();
        wgmma_wait<1>();
        wgmma_settle(s);
        block.weigh(s, row);
        pack_factor<T>(p_factor, s);
        wgmma_fence();
        add_products(dv, p_factor, block.dout, row);
        wgmma_commit();
        wgmma_wait<1>();
        wgmma_settle(ds);
        block.differentiate(ds, s, row);
        pack_factor<T>(ds_factor, ds);
        wgmma_fence();
        add_products(dk, ds_factor, block.mean, row);
        wgmma_commit();
      }
      wgmma_wait<0>();
    }
#pragma unroll
    for (int band = 0; band < kWidth / 64; ++band) {
      wgmma_settle(dk[band]);
      wgmma_settle(dv[band]);
    }
    sync_group();  // all warps have read the keys
    block.load_keys(here, pair + offset + 128);
    block.store(dk, dv, pair + offset);
    cp_async_wait<0>();
    fence_async_proxy();
    sync_group();
  }
}

}  // namespace

template <class T>
void centroid_key_gradients_sm90a(const BackwardArgs<T>& args, cudaStream_t stream) {
  const int blocks = args.shape.key_ranges.slots * (args.shape.H / args.shape.group);
  if (blocks == 0) return;
  dispatch_wide_dim("clustered", args.shape.pitch, [&](auto width) {
    constexpr int kWidth = decltype(width)::value;
    launch_early("key_gradient_sm90a", key_gradient_kernel<T, kWidth>,
                 static_cast<unsigned>(blocks), kThreads, Shape<T, kWidth>::kSharedBytes, stream,
                 args);
  });
}

template void centroid_key_gradients_sm90a(const BackwardArgs<__nv_bfloat16>&, cudaStream_t);
template void centroid_key_gradients_sm90a(const BackwardArgs<__half>&, cudaStream_t);

}  // namespace coterie::cuda
