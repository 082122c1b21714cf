// SPDX-License-Identifier: MIT
// Sums and means of the rows of every cluster, in two steps (see means.h).
//
// cluster_sums: a warp per tile of 32, 128 or 512 slots of the sorted order and head; lanes share a
//   row, 16 bytes each. Eight warps a block, __launch_bounds__(256, 2), no shared memory.
// finish_sums: a warp per cluster adds up the parts of the tiles that it lies in, in their order.
// Preconditions: order and offsets of the rows; any width up to 128 and alignment.
#include "cuda/cluster/means.h"

#include "cuda/cluster/stages.h"
#include "cuda/launch/dispatch.h"
#include "cuda/prim/dependent.cuh"
#include "cuda/prim/row_chunk.cuh"
#include "cuda/prim/row_fragments.cuh"

namespace coterie::cuda {

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

// The first cluster that ends after `slot`: the warp searches `offsets` (clusters + 1).
__device__ int cluster_at(const std::int32_t* offsets, int clusters, int slot) {
  int first = 0, count = clusters;
  while (count > 1) {
    const int step = (count + 31) / 32, probe = first + (threadIdx.x % 32 + 1) * step;
    const bool before = probe <= first + count && offsets[min(probe, clusters)] <= slot;
    const int passed = __popc(__ballot_sync(0xffffffffu, before)) * step;
    count = min(step, count - passed);
    first += passed;
  }
  return first;
}

// Rows of up to 32 slots in flight: this lane has those of slots l/lanes + i * groups, where
// `lanes` lanes share a row and a warp has `groups` of them.
template <class T, bool kAligned>
struct SlotBatch {
  static constexpr int kLoads = 4;
  uint4 words[kLoads];

  __device__ __forceinline__ void load(const Rows<const T>& rows, int token, int lanes) {
    const int lane = threadIdx.x % 32, groups = 32 / lanes;
    const int column = lane % lanes * VectorSum<T>::kVector;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int row = __shfl_sync(0xffffffffu, token, (i * groups + lane / lanes) % 32);
      const bool there = i * groups < 32 && row >= 0 && column < rows.width;
      const T* from = rows.row(there ? row : 0);
      if constexpr (kAligned)
        words[i] = load_once(from + column, there);
      else
        words[i] = there ? load_chunk(from, column, rows.width) : make_uint4(0, 0, 0, 0);
    }
  }
  // Adds the rows of slots [begin, end) of the batch.
  __device__ __forceinline__ void add(VectorSum<T>& sum, int begin, int end, int lanes) const {
    const int groups = 32 / lanes, group = static_cast<int>(threadIdx.x) % 32 / lanes;
#pragma unroll
    for (int i = 0; i < kLoads; ++i)
      if (i * groups + group >= begin && i * groups + group < end) sum.add(words[i]);
  }
};

// Adds up the row groups of a warp and writes the sum.
template <class T>
__device__ __forceinline__ void write_sum(VectorSum<T>& sum, int lanes, int width, float* to) {
  constexpr int kVector = VectorSum<T>::kVector;
  const int lane = threadIdx.x % 32, column = lane * kVector;
  for (int step = lanes; step < 32; step *= 2)
#pragma unroll
    for (int i = 0; i < kVector; ++i) sum.sum[i] += __shfl_xor_sync(0xffffffffu, sum.sum[i], step);
  if (lane < lanes)
#pragma unroll
    for (int i = 0; i < kVector; ++i)
      if (column + i < width) to[column + i] = sum.sum[i];
  sum = {};
}

// One warp adds up one tile of the sorted order, cluster by cluster. `lanes` share a row.
template <class T, bool kAligned>
__global__ void __launch_bounds__(kThreads, 2)
    cluster_sums_kernel(ClusterSums args, Tensor4<const T> x, int lanes) {
  await_previous();
  const std::int64_t work = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (work >= static_cast<std::int64_t>(args.tiles.slots) * args.shape.heads) return;
  const int head = static_cast<int>(work / args.tiles.slots);
  const int number = static_cast<int>(work % args.tiles.slots);
  const ItemChunk tile = args.tiles.find(args.shape.q, number);
  if (tile.begin >= tile.end) return;
  const int clusters = args.shape.clusters, problem = tile.item * args.shape.heads + head;
  const int lane = threadIdx.x % 32,
            batch_rows = min(32, SlotBatch<T, kAligned>::kLoads * (32 / lanes));
  const Rows<const T> rows = x.rows(tile.span.batch, head, tile.span.begin);
  const std::int32_t* order = args.order + args.shape.start(tile.span, head);
  const std::int32_t* offsets = args.offsets + static_cast<std::int64_t>(problem) * (clusters + 1);
  const auto token = [&](int first) {
    return lane < batch_rows && first + lane < tile.end ? order[first + lane] : -1;
  };
  // A batch of rows and the next one's numbers are in flight during the search.
  SlotBatch<T, kAligned> batch, ahead;
  ahead.load(rows, token(tile.begin), lanes);
  int next = token(tile.begin + batch_rows);
  int c = cluster_at(offsets, clusters, tile.begin);
  int start = offsets[c], end = offsets[c + 1];
  VectorSum<T> sum;
#pragma unroll 1
  for (int first = tile.begin; first < tile.end; first += batch_rows) {
    batch = ahead;
    ahead.load(rows, next, lanes);
    next = token(first + 2 * batch_rows);
    const int last = min(first + batch_rows, tile.end);
#pragma unroll 1
    for (int slot = first; slot < last;) {
      const int stop = min(end, last);
      batch.add(sum, slot - first, stop - first, lanes);
      slot = stop;
      if (end > last) break;  // continues in the next batch, or after the tile
      const bool whole = start >= tile.begin;
      write_sum(sum, lanes, args.width,
                whole ? args.sums + (static_cast<std::int64_t>(problem) * clusters + c) * args.width
                      : args.partial(head, number, 0));
#pragma unroll 1
      do {  // to the next cluster that has rows
        start = end;
        if (++c >= clusters) break;
        end = offsets[c + 1];
      } while (end == start);
    }
  }
  // A cluster that continues after the tile.
  if (c < clusters && start < tile.end)
    write_sum(sum, lanes, args.width, args.partial(head, number, start > tile.begin));
}

// Completes the sums, or turns them into means; a warp per cluster.
__global__ void __launch_bounds__(kThreads)
    finish_sums_kernel(ClusterSums args, bool mean, ZeroedWords zeroed) {
  await_previous();
  zeroed.zero();
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int clusters = args.shape.clusters, lane = threadIdx.x % 32;
  if (row >= static_cast<std::int64_t>(args.shape.problems()) * clusters) return;
  const int problem = static_cast<int>(row / clusters);
  const int begin = args.offsets[row + problem], size = args.offsets[row + problem + 1] - begin;
  float sum[4];
  collect_sums(args, problem, static_cast<int>(row % clusters), begin, begin + size, sum);
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (lane + 32 * i < args.width)
      args.sums[row * args.width + lane + 32 * i] =
          mean && size > 0 ? sum[i] / static_cast<float>(size) : sum[i];
}

}  // namespace

ClusterSums make_cluster_sums(Arena& arena, const ClusterShape& shape, const TensorView& x,
                              const std::int32_t* order, const std::int32_t* offsets, float* sums) {
  ClusterSums args{};
  args.shape = shape;
  args.order = order;
  args.offsets = offsets;
  args.sums = sums;
  args.width = static_cast<int>(x.size(3));
  const int chunk = shape.rows <= 8192 ? 32 : shape.rows <= 131072 ? 128 : 512;
  args.tiles = row_tiles(shape.q, shape.items, chunk);
  args.partials =
      arena.take<float>(static_cast<std::int64_t>(shape.heads) * args.tiles.slots * 2 * args.width);
  return args;
}

void sum_cluster_tiles(const char* op, const ClusterSums& args, const TensorView& x,
                       cudaStream_t stream) {
  const std::int64_t work = static_cast<std::int64_t>(args.tiles.slots) * args.shape.heads;
  if (work == 0) return;
  dispatch_element(op, x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    int lanes = 1;
    while (lanes * VectorSum<T>::kVector < args.width) lanes *= 2;
    const Tensor4<const T> tensor = tensor4<const T>(x);
    auto* kernel = tensor.aligned ? cluster_sums_kernel<T, true> : cluster_sums_kernel<T, false>;
    launch_early("cluster_sums", kernel, static_cast<unsigned>((work + kWarps - 1) / kWarps),
                 kThreads, 0, stream, args, tensor, lanes);
  });
}

void cluster_sums(const AttentionCall& call, const TensorView& x, const TensorView& order,
                  const TensorView& offsets, const TensorView& sums, Arena& arena,
                  cudaStream_t stream, bool mean, const ZeroedWords& zeroed) {
  const std::int64_t clusters = offsets.present() ? offsets.size(2) - 1 : 0;
  const ClusterSums args = make_cluster_sums(
      arena, cluster_shape(call, clusters), x, static_cast<const std::int32_t*>(order.data),
      static_cast<const std::int32_t*>(offsets.data), static_cast<float*>(sums.data));
  const std::int64_t rows = args.shape.problems() * clusters;
  if (arena.counting() || rows == 0) return;
  sum_cluster_tiles(call.op, args, x, stream);
  launch_early("finish_sums", finish_sums_kernel,
               static_cast<unsigned>((rows + kWarps - 1) / kWarps), kThreads, 0, stream, args, mean,
               zeroed);
}

}  // namespace coterie::cuda
