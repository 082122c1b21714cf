// SPDX-License-Identifier: MIT
// The nearest clusters of rows: argmax_c x . m_c with m_c the centred centroids, in fp32, summed
// over ascending depths. Several clusters per row are found in successive launches.
//
// Grid: (tiles of 64 rows, heads), 128 threads; a thread handles 4 rows and 8 centroids of a tile
// of 64. Shared memory: a tile of rows and one of centroids, transposed: 34 KB for Dk <= 64, 68 KB
// for 128. Preconditions: none. The scan (scan_sm90a.cu) is used instead where it is supported.
#include "cuda/launch/dispatch.h"
#include "cuda/launch/launch.h"
#include "cuda/prim/dependent.cuh"
#include "cuda/prim/element.cuh"
#include "cuda/prim/splits.cuh"
#include "cuda/routing/stages.h"

namespace coterie::cuda {

namespace {

constexpr int kThreads = 128;
constexpr int kRowTile = 64, kColumnTile = 64;  // a thread has 4 rows and 8 columns
constexpr int kPitch = 64 + 4;                  // of staged tiles: fewer bank conflicts

struct Choice {
  float score;
  int cluster;  // -1: none
};

__device__ __forceinline__ bool before(const Choice& a, const Choice& b) {
  return a.score > b.score || (a.score == b.score && a.cluster < b.cluster);
}

template <class T>
struct NearestRowsArgs {
  ClusterShape shape;
  Tensor4<const T> x;
  ItemChunks tiles;  // of kRowTile rows
  CentredCentroids centroids;
  std::int32_t *labels, *clusters;
  int per_row;
  int choice;     // index of this choice of a row; earlier ones are known
  float* scores;  // (B, heads, rows): of the previous choice, then of this one
};

// Stores element d of row r, given by load(r, d), at shared[d * kPitch + r].
template <int kTile, class Load>
__device__ __forceinline__ void stage_transposed(float* shared, int width, const Load& load) {
  for (int i = threadIdx.x; i < kTile * width; i += kThreads) {
    const int r = i / width, d = i % width;
    shared[d * kPitch + r] = load(r, d);
  }
}

// The clusters of up to kRowTile rows of an item and head. A block per tile.
template <class T>
__global__ void __launch_bounds__(kThreads)
    nearest_rows_kernel(const __grid_constant__ NearestRowsArgs<T> args) {
  await_previous();
  extern __shared__ float4 shared[];
  const ItemChunk tile = args.tiles.find(args.shape.q, blockIdx.x);
  const int head = static_cast<int>(blockIdx.y), count = tile.end - tile.begin;
  if (count <= 0) return;
  auto* rows = reinterpret_cast<float*>(shared);
  const int pitch = args.centroids.pitch, clusters = args.shape.clusters;
  float* columns = rows + pitch * kPitch;  // both (pitch, kPitch)
  const Rows<const T> x = args.x.rows(tile.span.batch, head, tile.span.begin + tile.begin);
  stage_transposed<kRowTile>(rows, pitch, [&](int r, int d) {
    return r < count && d < x.width ? to_float(x.row(r)[d]) : 0.0f;
  });
  const std::int64_t start = args.shape.start(tile.span, head) + tile.begin;
  const int tx = static_cast<int>(threadIdx.x) % 8, ty = static_cast<int>(threadIdx.x) / 8;
  Choice last[4], best[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int r = 4 * ty + i;
    last[i] = {INFINITY, -1};
    best[i] = {-INFINITY, -1};
    if (args.choice > 0 && r < count)
      last[i] = {args.scores[start + r],
                 args.clusters[(start + r) * args.per_row + args.choice - 1]};
  }
  const float* centroids =
      args.centroids.rows + static_cast<std::int64_t>(head / args.shape.group) * clusters * pitch;
  for (int first = 0; first < clusters; first += kColumnTile) {
    __syncthreads();
    stage_transposed<kColumnTile>(columns, pitch, [&](int c, int d) {
      return first + c < clusters ? centroids[static_cast<std::int64_t>(first + c) * pitch + d]
                                  : 0.0f;
    });
    __syncthreads();
    float sum[4][8] = {};
#pragma unroll 4
    for (int d = 0; d < pitch; ++d) {
      const float4 r = *reinterpret_cast<const float4*>(rows + d * kPitch + 4 * ty);
      const float4 low = *reinterpret_cast<const float4*>(columns + d * kPitch + 4 * tx);
      const float4 high = *reinterpret_cast<const float4*>(columns + d * kPitch + 32 + 4 * tx);
      const float left[4] = {r.x, r.y, r.z, r.w};
      const float right[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 8; ++j) sum[i][j] = fmaf(left[i], right[j], sum[i][j]);
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int c = first + (j < 4 ? 4 * tx + j : 32 + 4 * tx + j - 4);
      if (c >= clusters) continue;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const Choice choice{isnan(sum[i][j]) ? -INFINITY : sum[i][j], c};
        if (before(last[i], choice) && (best[i].cluster < 0 || before(choice, best[i])))
          best[i] = choice;
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int step = 1; step < 8; step *= 2) {
      const Choice other{__shfl_xor_sync(~0u, best[i].score, step),
                         __shfl_xor_sync(~0u, best[i].cluster, step)};
      if (other.cluster >= 0 && (best[i].cluster < 0 || before(other, best[i]))) best[i] = other;
    }
    const int r = 4 * ty + i;
    if (tx != 0 || r >= count) continue;
    const std::int64_t row = start + r;
    if (args.choice == 0) args.labels[row] = best[i].cluster;
    if (args.per_row == 1) continue;
    args.clusters[row * args.per_row + args.choice] = best[i].cluster;
    args.scores[row] = best[i].score;
  }
}

}  // namespace

void nearest_exact(const AttentionCall& call, const RoutingSide& side,
                   const CentredCentroids& centroids, int per_row, std::int32_t* clusters,
                   Arena& arena, cudaStream_t stream) {
  float* scores = per_row > 1 ? arena.take<float>(side.count()) : nullptr;
  const ItemChunks tiles = row_tiles(side.shape.q, side.shape.items, kRowTile);
  if (arena.counting() || side.count() == 0) return;
  COTERIE_CUDA(cudaMemsetAsync(
      side.labels, 0xff, static_cast<std::size_t>(side.count()) * sizeof(std::int32_t), stream));
  if (tiles.slots == 0) return;
  const dim3 grid(static_cast<unsigned>(tiles.slots), static_cast<unsigned>(side.shape.heads));
  const std::size_t bytes = sizeof(float) * static_cast<std::size_t>(centroids.pitch) * 2 * kPitch;
  dispatch_element(call.op, side.rows.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    NearestRowsArgs<T> args{side.shape,  tensor4<const T>(side.rows),
                            tiles,       centroids,
                            side.labels, clusters,
                            per_row,     0,
                            scores};
    for (; args.choice < per_row; ++args.choice)
      launch_early("nearest_rows", nearest_rows_kernel<T>, grid, kThreads, bytes, stream, args);
  });
}

}  // namespace coterie::cuda
