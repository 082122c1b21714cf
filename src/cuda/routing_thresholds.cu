// SPDX-License-Identifier: MIT
// Thresholds for routing's candidates, from a sample of the rows.
#include "cuda/device/await.cuh"
#include "cuda/device/routing_candidates.cuh"
#include "cuda/tuning.h"

namespace coterie::cuda {

namespace {

// Of the thresholds' blocks: centroids, and parts of the sample.
constexpr int kThreads = 512, kSampleWarps = kThreads / 32;
constexpr int kSampleColumns = 64, kSampleTiles = kSampleColumns / 8;
constexpr int kGroups = 16 * kSampleWarps;
constexpr int kSampled = 32;  // in width / kSampled rows one is in the sample

template <int kChunks>
constexpr int kSampleRows = kSampleWarps * 16 * kCandidateTiles<kChunks>;
constexpr int kMaximaPitch = kGroups + 1;

// Columns [first, first + columns) of a head's centroids to shared memory as RowFragments wants
// them.
template <int kChunks>
__device__ __forceinline__ void stage_centroids(const CentredCentroids& centroids, int head,
                                                int first, int columns, uint4* table) {
  constexpr int kLanes = 4 * kChunks;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  for (int base = 0; base < columns; base += kThreads / kLanes) {
    const int column = base + static_cast<int>(threadIdx.x) / kLanes;
    const uint4 words =
        scaled_centroid<kLanes>(centroids, head, column < columns ? first + column : -1);
    if (column < columns)
      table[(column / 8 * kChunks + lane / 4) * 32 + column % 8 * 4 + lane % 4] = words;
  }
}

// One row of every `step`, at places without a period.
__device__ __forceinline__ int sampled_row(int number, int step) {
  const unsigned mixed = static_cast<unsigned>(number) * 2654435761u >> 16;
  return number * step + static_cast<int>(mixed % static_cast<unsigned>(step));
}

// The largest scores of the sample's parts: maxima[column][part].
template <int kChunks>
__device__ void find_maxima(const CandidateArgs& args, const CandidateBlock& block, int columns,
                            int rows, int step, const uint4* table, float* maxima) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  constexpr int kMTiles = kCandidateTiles<kChunks>;
  float most[kSampleTiles][2][2];  // [tile][side][column]
#pragma unroll
  for (int t = 0; t < kSampleTiles; ++t)
#pragma unroll
    for (int s = 0; s < 2; ++s) most[t][s][0] = most[t][s][1] = -INFINITY;
  const auto load = [&](RowsAhead<kChunks, kMTiles>& ahead, int first) {
    ahead.load(block, [&](int i) { return first + i < rows ? sampled_row(first + i, step) : -1; });
  };
  RowsAhead<kChunks, kMTiles> ahead;
  load(ahead, warp * 16 * kMTiles);
  for (int round = warp * 16 * kMTiles; round < rows; round += kSampleRows<kChunks>) {
    RowFragments<__half, kChunks, 1> left[kMTiles];
    ahead.normalised(
        [&](int m, int s, const RowWords<__half, kChunks>& y) { left[m].set(s, y, args.zero); });
    load(ahead, round + kSampleRows<kChunks>);
#pragma unroll
    for (int t = 0; t < kSampleTiles; ++t) {
      if (8 * t >= columns) break;
      float d[kMTiles][4];
      multiply_rows<1, __half, kChunks, 1, 1>(left, table + t * kChunks * 32 + lane,
                                              make_float4(0.0f, 0.0f, 0.0f, 0.0f), d);
#pragma unroll
      for (int m = 0; m < kMTiles; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) most[t][i / 2][i % 2] = fmaxf(most[t][i / 2][i % 2], d[m][i]);
    }
  }
#pragma unroll
  for (int t = 0; t < kSampleTiles; ++t)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      maxima[(8 * t + lane % 4 * 2 + i % 2) * kMaximaPitch + 16 * warp + i / 2 * 8 + lane / 4] =
          most[t][i / 2][i % 2];
}

// Keys that `rank` of the parts' maxima are not below, to their upper bits, of as many columns as a
// warp has.
template <int kColumns>
__device__ __forceinline__ void rank_keys(const float* maxima, int rank,
                                          std::uint32_t (&found)[kColumns]) {
  constexpr int kEach = kGroups / 32;
  std::uint32_t key[kColumns][kEach];
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    found[c] = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      key[c][i] = ordered(maxima[c * kMaximaPitch + 32 * i + static_cast<int>(threadIdx.x) % 32]);
  }
  for (int bit = 31; bit >= 11; --bit)
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const std::uint32_t probe = found[c] | 1u << bit;
      int count = 0;
#pragma unroll
      for (int i = 0; i < kEach; ++i) count += key[c][i] >= probe;
      if (__reduce_add_sync(~0u, count) >= rank) found[c] = probe;
    }
}

// Thresholds of kSampleColumns centroids: the parts of a sample have a largest score each, and the
// threshold is the one of them that leaves about kCandidateAim * width rows.
template <int kChunks>
__global__ void __launch_bounds__(kThreads)
    thresholds_kernel(const __grid_constant__ CandidateArgs args) {
  await_previous();
  extern __shared__ uint4 table[];
  auto* maxima = reinterpret_cast<float*>(table + kSampleTiles * kChunks * 32);
  const CandidateBlock block(args, static_cast<int>(blockIdx.y) >= args.sides[0].heads);
  const int clusters = args.centroids.clusters,
            first_column = static_cast<int>(blockIdx.x) * kSampleColumns;
  const int columns = min(kSampleColumns, args.centroids.padded - first_column);
  const int width = block.side.width, real = min(columns, clusters - first_column);
  float* thresholds = block.side.lists.thresholds + block.list + first_column;
  if (blockIdx.x + blockIdx.y + blockIdx.z == 0)
    for (std::int64_t i = threadIdx.x; i < args.zeroed.count; i += kThreads)
      args.zeroed.data[i] = 0;
  for (int c = threadIdx.x; c < real; c += kThreads)
    block.side.lists.count[block.list + first_column + c] = 0;
  const int step = width / kSampled,
            rows = block.length / step / kSampleRows<kChunks> * kSampleRows<kChunks>;
  if (block.length < kLeastCandidateRows * width || rows == 0) {  // too few: no candidates
    for (int c = threadIdx.x; c < real; c += kThreads) thresholds[c] = INFINITY;
    return;
  }
  stage_centroids<kChunks>(args.centroids, block.head / block.side.group, first_column, columns,
                           table);
  __syncthreads();
  find_maxima<kChunks>(args, block, columns, rows, step, table, maxima);
  __syncthreads();
  const float hits = kCandidateAim * static_cast<float>(width) * static_cast<float>(rows) /
                     static_cast<float>(block.length);
  const int rank = max(1, static_cast<int>(kGroups * (1.0f - expf(-hits / kGroups))));
  constexpr int kColumns = kSampleColumns / kSampleWarps;
  const int own = static_cast<int>(threadIdx.x) / 32 * kColumns;
  std::uint32_t found[kColumns];
  rank_keys<kColumns>(maxima + own * kMaximaPitch, rank, found);
#pragma unroll
  for (int c = 0; c < kColumns; ++c)
    if (threadIdx.x % 32 == 0 && own + c < real) thresholds[own + c] = from_ordered(found[c]);
}

}  // namespace

void find_thresholds(const AttentionCall& call, const CandidateArgs& args, dim3 grid,
                     cudaStream_t stream) {
  grid.x = static_cast<unsigned>((args.centroids.padded + kSampleColumns - 1) / kSampleColumns);
  dispatch_head_dim(call.op, call.Dk, [&](auto width) {
    constexpr int kChunks = decltype(width)::value / 32;
    launch_early("thresholds", thresholds_kernel<kChunks>, grid, kThreads,
                 static_cast<std::size_t>(kSampleColumns) * (kChunks * 64 + kMaximaPitch * 4),
                 stream, args);
  });
}

}  // namespace coterie::cuda
