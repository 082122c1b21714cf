// SPDX-License-Identifier: MIT
// The covariance S2 / n - mean mean^T of up to 8 Dk evenly spaced keys of an item and key head, for
// the metric of key_metric.cu.
//
// Grid and block: a block of 256 threads computes 16 rows of the matrix by mma.sync; its eight
// warps take different keys, and their sums are added in order. Shared memory: 64 KB of keys at a
// time, then the warps' sums. Preconditions: Dk <= 128, any
// alignment. The one-kernel k-means (key_kmeans_sm90a.cu) computes its own.
#include "cuda/cluster/stages.h"
#include "cuda/launch/dispatch.h"
#include "cuda/prim/dependent.cuh"
#include "cuda/prim/load.cuh"
#include "cuda/prim/mma.cuh"

namespace coterie::cuda {

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kSlab = 16;  // rows of the covariance that one block computes

struct CovarianceArgs {
  ClusterShape shape;
  float* covariance;
  int width;
  ZeroedWords zeroed;
};

// Keys in shared memory at a time.
template <class T, int kWidth>
constexpr int kBatch = 64 * 1024 / Tile<T, kWidth>::kRowBytes;

// sum += the products of columns slab .. slab+15 with all columns, and the sums of the columns,
// over rows [first, first + kBatch / kWarps) of the tile.
template <class T, int kWidth>
__device__ __forceinline__ void add_products(const Tile<T, kWidth>& tile, int first, int count,
                                             int slab, Accumulator (&sum)[kWidth / 16],
                                             Accumulator (&columns)[kWidth / 16]) {
  FragmentA<T> ones;
  for (std::uint32_t& word : ones.r) {
    if constexpr (sizeof(T) == 2)
      word = pack2<T>(1.0f, 1.0f);
    else
      word = __float_as_uint(1.0f);
  }
  for (int row = first; row < min(first + kBatch<T, kWidth> / kWarps, count); row += 16) {
    FragmentA<T> left;
    load_a_transposed(left, tile, slab, row);
#pragma unroll
    for (int n = 0; n < kWidth / 16; ++n) {
      FragmentB<T> right;
      load_b_transposed(right, tile, 16 * n, row);
      multiply_add(sum[n], left, right);
      multiply_add(columns[n], ones, right);
    }
  }
}

// Subtracts the item's first key from `count` rows of the tile. Only for fp32: 16-bit keys far from
// zero have fewer digits than the sums.
template <int kWidth>
__device__ void subtract_first(const Tile<float, kWidth>& tile, const Rows<const float>& keys,
                               int count) {
  for (int i = threadIdx.x; i < count * keys.width; i += kThreads) {
    const std::uint32_t address = tile.address(i / keys.width, i % keys.width);
    const float value = __uint_as_float(load_shared32(address)) - keys.row(0)[i % keys.width];
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
  }
}

// Rows slab .. slab+15 of the covariance of one item and key head, S2 / n - mean mean^T. The warps
// take different keys and their sums are added in order.
template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    key_covariance_kernel(CovarianceArgs args, Tensor4<const T> k) {
  await_previous();
  extern __shared__ __align__(128) char shared[];
  __shared__ std::int32_t rows[kBatch<T, kWidth>];
  args.zeroed.zero();
  const int slab = blockIdx.x % (kWidth / kSlab) * kSlab, problem = blockIdx.x / (kWidth / kSlab);
  const int key_heads = args.shape.heads / args.shape.group;
  const ItemSpan span = args.shape.k.span(problem / key_heads);
  const Rows<const T> keys = k.rows(span.batch, problem % key_heads, span.begin);
  const int samples = min(span.length, 8 * args.width), warp = threadIdx.x / 32;
  const Tile<T, kWidth> tile{shared_address(shared)};
  Accumulator sum[kWidth / 16] = {}, columns[kWidth / 16] = {};
  for (int first = 0; first < samples; first += kBatch<T, kWidth>) {
    const int count = min(kBatch<T, kWidth>, samples - first);
    __syncthreads();
    for (int t = threadIdx.x; t < count; t += kThreads)
      rows[t] = static_cast<int>(static_cast<std::int64_t>(first + t) * span.length / samples);
    __syncthreads();
    load_tile<kBatch<T, kWidth>, kThreads>(tile, keys, 0, count, rows);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    if constexpr (sizeof(T) == 4) {
      subtract_first(tile, keys, count);
      __syncthreads();
    }
    add_products(tile, warp * (kBatch<T, kWidth> / kWarps), count, slab, sum, columns);
  }
  __syncthreads();
  // Row kSlab of a warp's part contains the sums of the columns.
  auto* parts = reinterpret_cast<float*>(shared);
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < kWidth / 16; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int column = 16 * n + 8 * half + lane % 4 * 2;
      float* part = parts + (warp * (kSlab + 1) + lane / 4) * kWidth + column;
      store2(part, sum[n][half][0], sum[n][half][1]);
      store2(part + 8 * kWidth, sum[n][half][2], sum[n][half][3]);
      if (lane < 4) store2(part + kSlab * kWidth, columns[n][half][0], columns[n][half][1]);
    }
  __syncthreads();
  for (int e = threadIdx.x; e < (kSlab + 1) * kWidth; e += kThreads) {
    float total = 0.0f;
    for (int w = 0; w < kWarps; ++w) total += parts[w * (kSlab + 1) * kWidth + e];
    parts[e] = samples > 0 ? total / static_cast<float>(samples) : 0.0f;
  }
  __syncthreads();
  const float* mean = parts + kSlab * kWidth;
  for (int e = threadIdx.x; e < kSlab * kWidth; e += kThreads)
    args.covariance[(static_cast<std::int64_t>(problem) * kWidth + slab) * kWidth + e] =
        parts[e] - mean[slab + e / kWidth] * mean[e % kWidth];
}

template <class T, int kWidth>
void launch_covariance(const CovarianceArgs& args, const TensorView& k, cudaStream_t stream) {
  const std::size_t tile = sizeof(T) * kBatch<T, kWidth> * kWidth;
  const std::size_t shared = max(tile, sizeof(float) * kWarps * (kSlab + 1) * kWidth);
  const int blocks = args.shape.key_problems() * (kWidth / kSlab);
  launch_early("key_covariance", key_covariance_kernel<T, kWidth>, static_cast<unsigned>(blocks),
               kThreads, shared, stream, args, tensor4<const T>(k));
}

}  // namespace

void key_covariance(const AttentionCall& call, const KeyMetricBuffers& buffers,
                    const ZeroedWords& zeroed, cudaStream_t stream) {
  CovarianceArgs args{};
  args.shape = cluster_shape(call, 0);
  args.covariance = buffers.covariance;
  args.width = static_cast<int>(call.Dk);
  args.zeroed = zeroed;
  dispatch_element(call.op, call.inputs.q.dtype, [&](auto tag) {
    dispatch_head_dim(call.op, call.Dk, [&](auto width) {
      launch_covariance<typename decltype(tag)::type, decltype(width)::value>(args, call.k, stream);
    });
  });
}

}  // namespace coterie::cuda
