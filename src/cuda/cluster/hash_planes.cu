// SPDX-License-Identifier: MIT
// Planes of hash codes (hash.cu): normal numbers, or sums of key differences with thresholds at the
// mean query.
#include "cuda/cluster/hash.h"
#include "cuda/launch/dispatch.h"
#include "cuda/prim/dependent.cuh"
#include "cuda/prim/normal.cuh"
#include "cuda/prim/row_chunk.cuh"

namespace coterie::cuda {

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kPairsPerPlane = 16;

// Planes rounded to bf16, so that products with 16-bit inputs are exact, and thresholds.
__global__ void __launch_bounds__(kThreads) isotropic_planes_kernel(HashShape args, bool bias) {
  // The next kernel may read its inputs at once: nothing but this one has still to be waited for.
  await_writes();
  release_next();
  args.zeroed.zero();
  const int element = blockIdx.x * kThreads + threadIdx.x, total = args.bits * args.width;
  if (element < total) {
    const double value =
        normal({args.shape.seed, RandomUse::hash_plane, 0}, static_cast<std::uint64_t>(element));
    args.planes[element] = to_float(from_float<Bf16>(static_cast<float>(value)));
  } else if (element < total + args.bits) {
    const auto r = static_cast<std::uint64_t>(element - total);
    args.thresholds[r] =
        bias ? static_cast<float>(normal({args.shape.seed, RandomUse::hash_threshold, 0}, r))
             : 0.0f;
  }
}

// Plane r of an item and key head: the sum of (k_a - k_b) over random pairs of its keys, by a warp.
template <class T>
__device__ void key_plane(const HashShape& args, const Tensor4<const T>& k, int key_problem,
                          int r) {
  const int key_heads = args.shape.heads / args.shape.group, item = key_problem / key_heads;
  const ItemSpan span = args.shape.k.span(item);
  const Rows<const T> keys = k.rows(span.batch, key_problem % key_heads, span.begin);
  const RandomStream pairs{args.shape.seed, RandomUse::key_pair,
                           static_cast<std::uint32_t>(key_problem)};
  // Lane l draws number l of the plane's 2 * kPairsPerPlane = 32.
  const int lane = threadIdx.x % 32;
  const int drawn = span.length == 0
                        ? 0
                        : static_cast<int>(random_below(
                              pairs, static_cast<std::uint64_t>(r * 2 * kPairsPerPlane + lane),
                              static_cast<std::uint32_t>(span.length)));
  float* plane =
      args.planes + (static_cast<std::int64_t>(key_problem) * args.bits + r) * args.width;
  for (int d = lane; d - lane < args.width; d += 32) {
    float sum = 0.0f;
#pragma unroll 4
    for (int m = 0; m < kPairsPerPlane; ++m) {
      const int a = __shfl_sync(0xffffffffu, drawn, 2 * m),
                b = __shfl_sync(0xffffffffu, drawn, 2 * m + 1);
      if (span.length > 0 && d < args.width)
        sum += to_float(keys.row(a)[d]) - to_float(keys.row(b)[d]);
    }
    if (d < args.width) plane[d] = sum;
  }
}

// Sum of rows [begin, end) to `sums`, threads over vectors and groups of rows.
template <class T>
__device__ void sum_queries(const Rows<const T>& rows, RowRange range, float* sums) {
  constexpr int kVector = VectorSum<T>::kVector;
  __shared__ float partial[kThreads * kVector];
  const int vectors = (rows.width + kVector - 1) / kVector, groups = kThreads / vectors;
  const int vector = threadIdx.x % vectors, group = threadIdx.x / vectors;
  VectorSum<T> sum;
  if (group < groups) {
    int row = range.begin + group;
    for (; row + 3 * groups < range.end; row += 4 * groups) {
      uint4 words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = sum.load(rows, row + i * groups, vector * kVector);
#pragma unroll
      for (int i = 0; i < 4; ++i) sum.add(words[i]);
    }
    for (; row < range.end; row += groups) sum.add(sum.load(rows, row, vector * kVector));
#pragma unroll
    for (int i = 0; i < kVector; ++i)
      partial[(group * vectors + vector) * kVector + i] = sum.sum[i];
  }
  __syncthreads();
  for (int d = threadIdx.x; d < rows.width; d += kThreads) {
    float total = 0.0f;
    for (int g = 0; g < groups; ++g) total += partial[g * vectors * kVector + d];
    sums[d] = total;
  }
}

// Blocks below problems x splits add up queries, the others make planes, a warp for each.
template <class T>
__global__ void __launch_bounds__(kThreads)
    key_planes_kernel(HashShape args, Tensor4<const T> q, Tensor4<const T> k) {
  args.zeroed.zero();
  const int sums = args.shape.problems() * args.splits, block = blockIdx.x;
  if (block >= sums) {
    const int plane = (block - sums) * kWarps + threadIdx.x / 32;
    if (plane < args.shape.key_problems() * args.bits)
      key_plane(args, k, plane / args.bits, plane % args.bits);
    return;
  }
  const int problem = block / args.splits, split = block % args.splits;
  const ItemSpan span = args.shape.q.span(problem / args.shape.heads);
  const int begin = min(split * args.split_rows, span.length);
  sum_queries(q.rows(span.batch, problem % args.shape.heads, span.begin),
              RowRange{begin, min(begin + args.split_rows, span.length)},
              args.query_sums + static_cast<std::int64_t>(block) * args.width);
}

}  // namespace

void make_planes(const ClusteringParams& params, const AttentionCall& call, const HashShape& args,
                 cudaStream_t stream) {
  if (params.method == Clustering::hamming) {
    const int elements = args.bits * (args.width + 1);
    launch_early("isotropic_planes", isotropic_planes_kernel,
                 static_cast<unsigned>((elements + kThreads - 1) / kThreads), kThreads, 0, stream,
                 args, params.hash_bias);
    return;
  }
  const int planes = (args.shape.key_problems() * args.bits + kWarps - 1) / kWarps;
  dispatch_element(call.op, call.inputs.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    key_planes_kernel<T><<<args.shape.problems() * args.splits + planes, kThreads, 0, stream>>>(
        args, tensor4<const T>(call.inputs.q), tensor4<const T>(call.k));
  });
  COTERIE_LAUNCH("key_planes");
}

}  // namespace coterie::cuda
