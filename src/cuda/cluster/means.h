// SPDX-License-Identifier: MIT
// Sums and means of the rows of every cluster, taken in the sorted order: no atomics, and the
// result depends only on the sizes, the order and the rows.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/arena.h"
#include "core/call.h"
#include "cuda/prim/splits.cuh"
#include "cuda/prim/team.cuh"
#include "cuda/prim/zero.cuh"

namespace coterie::cuda {

// sums (items, H, C, D) f32: sum over every cluster of rows of x (B, H, N, D), a tensor with the
// call's query sequences, or their mean; 0 for an empty cluster. Also sets `zeroed` to zero.
// Launches on `stream` and takes scratch memory from `arena`; if it only counts, nothing is
// launched, and views other than those of the call and `x` may be absent.
void cluster_sums(const AttentionCall& call, const TensorView& x, const TensorView& order,
                  const TensorView& offsets, const TensorView& sums, Arena& arena,
                  cudaStream_t stream, bool mean = false, const ZeroedWords& zeroed = {});

// centroids (items, H, C, Dk): the mean query of every cluster.
inline void centroid_means(const AttentionCall& call, const TensorView& order,
                           const TensorView& offsets, const TensorView& centroids, Arena& arena,
                           cudaStream_t stream, const ZeroedWords& zeroed = {}) {
  cluster_sums(call, call.inputs.q, order, offsets, centroids, arena, stream, true, zeroed);
}

// The first step of sums over clusters, for kernels that do the second themselves.
//
// Sums of the rows of every cluster in two steps: warps add up tiles of equal size of the sorted
// order, then clusters that span several tiles collect their parts in tile order.

struct ClusterSums {
  ClusterShape shape;
  const std::int32_t *order, *offsets;
  float* sums;       // (items, H, C, width); written if a cluster lies in one tile
  float* partials;   // (H, tiles, 2, width): first and last cluster of a tile, if cut
  int width;         // elements of a row
  ItemChunks tiles;  // of the query side

  __device__ float* partial(int head, int tile, int which) const {
    return partials + ((static_cast<std::int64_t>(head) * tiles.slots + tile) * 2 + which) * width;
  }
};

// Adds up what the first step wrote for a cluster of a problem in slots [begin, end): this lane's
// columns lane + 32 i. 0 for an empty cluster.
template <int kColumns>
__device__ __forceinline__ void collect_sums(const ClusterSums& args, int problem, int c, int begin,
                                             int end, float (&sum)[kColumns]) {
  const int lane = threadIdx.x % 32, head = problem % args.shape.heads;
#pragma unroll
  for (int i = 0; i < kColumns; ++i) sum[i] = 0.0f;
  if (begin == end) return;
  const int first = begin / args.tiles.chunk, last = (end - 1) / args.tiles.chunk;
  const int number = args.tiles.first_slot(args.shape.q, problem / args.shape.heads) + first;
  const float* from =
      first == last
          ? args.sums + (static_cast<std::int64_t>(problem) * args.shape.clusters + c) * args.width
          : args.partial(head, number, begin % args.tiles.chunk != 0);
#pragma unroll
  for (int i = 0; i < kColumns; ++i)
    if (lane + 32 * i < args.width) sum[i] = from[lane + 32 * i];
  // Several loads are in flight at a time; zeros change nothing.
  constexpr int kAhead = 4;
  from = args.partial(head, number + 1, 0);
  for (int tile = first + 1; tile <= last; tile += kAhead) {
    float part[kAhead][kColumns];
#pragma unroll
    for (int t = 0; t < kAhead; ++t, from += 2 * args.width)
#pragma unroll
      for (int i = 0; i < kColumns; ++i)
        part[t][i] = tile + t <= last && lane + 32 * i < args.width ? from[lane + 32 * i] : 0.0f;
#pragma unroll
    for (int t = 0; t < kAhead; ++t)
#pragma unroll
      for (int i = 0; i < kColumns; ++i) sum[i] += part[t][i];
  }
}

// Takes `partials` from the arena; null when it only counts.
ClusterSums make_cluster_sums(Arena& arena, const ClusterShape& shape, const TensorView& x,
                              const std::int32_t* order, const std::int32_t* offsets, float* sums);

// Writes args.sums and args.partials from the rows of x (B, H, N, width).
void sum_cluster_tiles(const char* op, const ClusterSums& args, const TensorView& x,
                       cudaStream_t stream);

}  // namespace coterie::cuda
