// SPDX-License-Identifier: MIT
// Centroids weighted by the keys' covariance S (key_covariance.cu): m_c = S (mu_c - r) and b_c, see
// stages.h.
//
// Blocks of 512 threads share an item and head; a warp takes a cluster. Shared memory: S, 16 or 64
// KB, and 4 or 8 KB of differences. Preconditions: Dk <= 128, any alignment. The one-kernel k-means
// (key_kmeans_sm90a.cu) replaces it where it can run.
#include "cuda/cluster/table.cuh"

#include "coterie/random.h"
#include "cuda/launch/dispatch.h"
#include "cuda/prim/dependent.cuh"
#include "cuda/prim/load.cuh"

namespace coterie::cuda {

namespace {

struct WeighArgs {
  ClusterSums sums;
  bool initial;
  const float* covariance;
  float* centroids;
  CentroidTable table;
};

constexpr int kWeighThreads = 512, kWeighWarps = kWeighThreads / 32;

// A power of two that brings the covariance's mean variance near 1. It changes no label and keeps
// the table in the range of fp16.
__device__ float metric_scale(const float* covariance, int width, int pitch) {
  float trace = 0.0f;
  for (int d = threadIdx.x % 32; d < width; d += 32) trace += covariance[d * pitch + d];
  const std::uint32_t exponent = __float_as_uint(warp_sum(trace) / static_cast<float>(width)) >> 23;
  return exponent > 1 && exponent < 253 ? __uint_as_float((254 - exponent) << 23) : 1.0f;
}

// mu_c: this lane's columns lane + 32 i. An initial centroid is a query.
template <class T, int kChunks>
__device__ __forceinline__ void new_centroid(const WeighArgs& args, const T* query, int problem,
                                             int c, float (&mean)[kChunks]) {
  const ClusterSums& sums = args.sums;
  const int lane = threadIdx.x % 32;
  const std::int64_t row = static_cast<std::int64_t>(problem) * sums.shape.clusters + c;
  int size = 0;
  if (!args.initial) {
    const int begin = sums.offsets[row + problem];
    size = sums.offsets[row + problem + 1] - begin;
    collect_sums(sums, problem, c, begin, begin + size, mean);
  }
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    if (lane + 32 * i >= sums.width) continue;
    float* stored = args.centroids + row * sums.width + lane + 32 * i;
    if (args.initial)
      mean[i] = to_float(query[lane + 32 * i]);
    else
      mean[i] = size > 0 ? mean[i] / static_cast<float>(size) : *stored;
    *stored = mean[i];
  }
}

// A warp per cluster; `blocks` blocks share a problem.
template <class T, int kChunks>
__global__ void __launch_bounds__(kWeighThreads)
    weigh_centroids_kernel(WeighArgs args, Tensor4<const T> q, int blocks) {
  await_previous();
  constexpr int kWidth = 32 * kChunks;
  extern __shared__ __align__(128) char shared[];
  __shared__ float deltas[kWeighWarps][kWidth];
  const auto* covariance = reinterpret_cast<const float*>(shared);
  const ClusterShape& shape = args.sums.shape;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, width = args.sums.width;
  const int problem = blockIdx.x / blocks, c = blockIdx.x % blocks * kWeighWarps + warp;
  const ItemSpan span = shape.q.span(problem / shape.heads);
  if (span.length <= shape.clusters) return;
  const Rows<const T> queries = q.rows(span.batch, problem % shape.heads, span.begin);
  const float* from =
      args.covariance + static_cast<std::int64_t>(shape.key_problem(problem)) * kWidth * kWidth;
  for (int i = 4 * static_cast<int>(threadIdx.x); i < kWidth * kWidth; i += 4 * kWeighThreads)
    cp_async16(shared_address(shared) + 4 * i, from + i, 16);
  cp_async_commit();
  // Lane 0 finds the first row of the cluster, the others that of cluster 0: the reference.
  const RandomStream stream{shape.seed, RandomUse::initial_centroid, shape.stream(problem)};
  const int drawn = lane == 0 ? min(c, shape.clusters - 1) : 0;
  const int row = static_cast<int>(random_permutation(stream, static_cast<std::uint32_t>(drawn),
                                                      static_cast<std::uint32_t>(span.length)));
  const T* origin = queries.row(__shfl_sync(0xffffffffu, row, 1));
  const T* query = queries.row(__shfl_sync(0xffffffffu, row, 0));
  float mean[kChunks] = {}, reference[kChunks], weighed[kChunks] = {};
#pragma unroll
  for (int i = 0; i < kChunks; ++i)
    reference[i] = lane + 32 * i < width ? to_float(origin[lane + 32 * i]) : 0.0f;
  if (c < shape.clusters) new_centroid(args, query, problem, c, mean);
  cp_async_wait<0>();
  __syncthreads();
  if (c >= shape.clusters) return;
  const float scale = metric_scale(covariance, width, kWidth);
#pragma unroll
  for (int i = 0; i < kChunks; ++i) deltas[warp][lane + 32 * i] = (mean[i] - reference[i]) * scale;
  __syncwarp();
#pragma unroll 8
  for (int d = 0; d < width; ++d)
#pragma unroll
    for (int i = 0; i < kChunks; ++i)
      weighed[i] = fmaf(covariance[d * kWidth + lane + 32 * i], deltas[warp][d], weighed[i]);
  // The last cluster also fills the padding.
  const int copies = c == shape.clusters - 1 ? args.table.padded - c : 1;
  write_column<T, kChunks>(args.table, problem, c, copies, mean, reference, weighed);
}

// Width of the rows of the table and of the covariance.
std::int64_t padded_width(std::int64_t width) { return width <= 64 ? 64 : kMaxHeadDim; }

}  // namespace

CentroidTable::CentroidTable(Arena& arena, const AttentionCall& call, std::int64_t clusters)
    : padded(static_cast<int>((clusters + 15) / 16 * 16)) {
  const std::int64_t rows = call.num_items() * call.H * padded, depth = padded_width(call.Dk);
  columns = arena.take<std::uint16_t>(rows * depth * (call.inputs.q.dtype == DType::f32 ? 2 : 1));
  bias = arena.take<float>(rows);
  norms = arena.take<float>(rows);
}

KeyMetricBuffers::KeyMetricBuffers(Arena& arena, const AttentionCall& call, std::int64_t clusters)
    : covariance(arena.take<float>(call.num_items() * call.key_heads * padded_width(call.Dk) *
                                   padded_width(call.Dk))),
      centroids(arena.take<float>(call.num_items() * call.H * clusters * call.Dk)),
      table(arena, call, clusters) {}

void weigh_centroids(const AttentionCall& call, const ClusterSums& sums, bool initial,
                     const KeyMetricBuffers& buffers, cudaStream_t stream) {
  const WeighArgs args{sums, initial, buffers.covariance, buffers.centroids, buffers.table};
  const int blocks = (sums.shape.clusters + kWeighWarps - 1) / kWeighWarps;
  dispatch_element(call.op, call.inputs.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    dispatch_head_dim(call.op, call.Dk, [&](auto width) {
      constexpr int kWidth = decltype(width)::value;
      constexpr std::size_t kBytes = sizeof(float) * kWidth * kWidth;
      launch_early("weigh_centroids", weigh_centroids_kernel<T, kWidth / 32>,
                   static_cast<unsigned>(sums.shape.problems() * blocks), kWeighThreads, kBytes,
                   stream, args, tensor4<const T>(call.inputs.q), blocks);
    });
  });
}

}  // namespace coterie::cuda
