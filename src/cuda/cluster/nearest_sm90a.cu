// SPDX-License-Identifier: MIT
// nearest.cu with warpgroup products, for 16-bit types.
//
// Grid and block: cooperative, one block of three warpgroups a multiprocessor
// (__launch_bounds__(384, 1), 168 registers); a team of blocks takes an item and head. A warpgroup
// takes 64 rows, straight from global memory to registers, and 128 centroids at a time; while it
// evaluates their scores, the others multiply. Shared memory: 160 or 288 bytes a centroid, up to
// 192 KB; the sort uses the same memory. If more centroids than fit, the rows are read again for
// each part of them; until the last, labels and order hold a row's best so far. Preconditions:
// Hopper. Otherwise nearest.cu runs.
//
// Rows are read as RowFragments describes: the depths of a product come in another order than in
// memory. The centroids are put into shared memory in the same order. One more product step adds
// the centroid's bias, as a sum of three bf16 numbers, and the row's K.
#include "cuda/cluster/nearest.cuh"
#include "cuda/launch/dispatch.h"
#include "cuda/prim/wgmma.cuh"

namespace coterie::cuda {

namespace {

constexpr int kGroups = 3, kThreads = kGroups * kWarpgroup, kWarps = kThreads / 32;
constexpr int kStep = 128;  // centroids at a time; their number in shared memory is a multiple

template <int kChunks>
constexpr int kBands = (kChunks + 1) / 2;  // of 64 depths

// Copies args.columns centroids of a problem from `begin` on, the last one of all repeated; a
// thread copies 32 depths of one. Their biases go to `bias`, in the layout of narrow_descriptor.
template <class T, int kChunks>
__device__ void stage_table(const NearestArgs<T>& args, int problem, int begin, std::uint32_t table,
                            std::uint32_t bias) {
  const std::int64_t start = static_cast<std::int64_t>(problem) * args.table.padded;
  const auto* from = static_cast<const uint4*>(args.table.columns) + start * kChunks * 4;
  for (int i = threadIdx.x; i < args.columns * kChunks; i += kThreads) {
    const int column = i / kChunks, chunk = i % kChunks;
    const int source = min(begin + column, args.table.padded - 1);
    const uint4* words = from + (source / 8 * kChunks + chunk) * 32 + source % 8 * 4;
    const uint4 w[4] = {words[0], words[1], words[2], words[3]};
    const Tile<T, 64> band{table + chunk / 2 * args.columns * 128};
    const int first = chunk % 2 * 4;
    store_shared16(band.chunk(column, first), make_uint4(w[0].x, w[1].x, w[2].x, w[3].x));
    store_shared16(band.chunk(column, first + 1), make_uint4(w[0].y, w[1].y, w[2].y, w[3].y));
    store_shared16(band.chunk(column, first + 2), make_uint4(w[0].z, w[1].z, w[2].z, w[3].z));
    store_shared16(band.chunk(column, first + 3), make_uint4(w[0].w, w[1].w, w[2].w, w[3].w));
  }
  for (int i = threadIdx.x; i < args.columns; i += kThreads)
    store_bias(bias + i / 8 * (8 * kBiasBytes) + i % 8 * 16,
               args.table.bias[start + min(begin + i, args.table.padded - 1)]);
  fence_async_proxy();
}

// The 64 rows of a warpgroup against the centroids in shared memory.
template <class T, int kChunks>
struct GroupScores {
  RowFragments<T, kChunks, 1> rows;
  std::uint64_t table, bias;  // descriptors
  int columns;                // a multiple of kStep
  unsigned key_scale;
  std::uint32_t shift[4];  // left factor of the biases and K
  std::uint32_t best[2];

  __device__ __forceinline__ void set_shift(const float (&offset)[2]) {
    const int lane = threadIdx.x % 4;
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      shift[side] = lane == 0   ? pack2<Bf16>(1.0f, 1.0f)
                    : lane == 1 ? pack2<Bf16>(1.0f, offset[side])
                                : 0;
      shift[2 + side] = 0;
    }
  }

  // Scores of kStep centroids from `column` on.
  __device__ __forceinline__ void multiply(float (&d)[kStep / 2], int column) const {
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 2 * kChunks; ++step) {
      const std::uint64_t b =
          descriptor_behind(table, (column + step / 4 * columns) * 128 + step % 4 * 32);
      wgmma_step<T, 0>(step, d, rows.a[0][step], b);
    }
    // Last, so that the bits which adding K rounds off are lost only once.
    wgmma<Bf16, 1, 0>(d, shift, descriptor_behind(bias, column * kBiasBytes));
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_settle(d);
  }
  // The best of these centroids. The warpgroups take turns with the tensor cores.
  __device__ __forceinline__ void find() {
    best[0] = best[1] = 0;
#pragma unroll 1
    for (int column = 0; column < columns; column += kStep) {
      float d[kStep / 2];
      multiply(d, column);
      std::uint32_t found[2] = {};  // column numbers relative to `column`
#pragma unroll
      for (int j = 0; j < kStep / 8; ++j)
#pragma unroll
        for (int side = 0; side < 2; ++side)
          found[side] = best_key(found[side], d[4 * j + 2 * side], d[4 * j + 2 * side + 1],
                                 key_scale, 511 - 2 * j);
#pragma unroll
      for (int side = 0; side < 2; ++side)
        best[side] = max(best[side], found[side] - static_cast<std::uint32_t>(column) / 4);
    }
  }
};

// Labels of the block's rows after the centroids from `begin` on; `values`, those of their scores.
template <class T, int kChunks>
__device__ void assign_part(const NearestArgs<T>& args, int problem, int begin,
                            const Rows<const T>& rows, RowRange range, std::int32_t* labels,
                            std::int32_t* values, unsigned char* memory) {
  const int lane = threadIdx.x % 32, clusters = args.shape.clusters;
  const bool last = begin + args.columns >= args.table.padded;
  const std::uint32_t table = shared_address(memory);
  const std::uint32_t bias = table + args.columns * kBands<kChunks> * 128;
  RowTile<T, kChunks, 1> ahead;
  int first = range.begin + static_cast<int>(threadIdx.x) / 32 * 16;
  ahead.load(rows, first, range.end);
  stage_table<T, kChunks>(args, problem, begin, table, bias);
  const float2 bounds = table_bounds<kThreads>(args, problem);  // synchronises the threads
#pragma unroll 1
  for (int round = range.begin; round < range.end; round += kGroups * 64) {
    GroupScores<T, kChunks> scores;
    scores.table = matrix_descriptor(table);
    scores.bias = narrow_descriptor(bias);
    scores.columns = args.columns;
    scores.key_scale = args.key_scale;
    float offset[2];
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      scores.rows.set(side, ahead.words[0][side], args.zero);
      offset[side] = row_offset(ahead.words[0][side], bounds);
    }
    scores.set_shift(offset);
    ahead.load(rows, first + kGroups * 64, range.end);
    scores.find();
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      Point point = decode_key(scores.best[side]);
      const int row = first + 8 * side + lane / 4;
      if (lane % 4 == side && row < range.end) {
        point.label += begin;
        // Both are below 2^23. Ties go to the lower index.
        if (begin > 0 && values[row] >= static_cast<int>(point.value))
          point.label = labels[row];
        else if (!last)
          values[row] = static_cast<int>(point.value);
        const bool finite = __float_as_uint(offset[side]) >> 23 < 255;
        labels[row] = !last || finite ? min(point.label, clusters - 1) : args.lost;
      }
    }
    first += kGroups * 64;
  }
}

// Labels of the block's rows.
template <class T, int kChunks>
__device__ void assign_rows(const NearestArgs<T>& args, int problem, const Rows<const T>& rows,
                            RowRange range, std::int32_t* labels, unsigned char* memory) {
  std::int32_t* order = args.out.order + (labels - args.out.labels);
#pragma unroll 1
  for (int begin = 0; begin < args.table.padded; begin += args.columns) {
    if (begin > 0) __syncthreads();  // all warpgroups are done with the part before
    assign_part<T, kChunks>(args, problem, begin, rows, range, labels, order, memory);
  }
}

template <class T, int kChunks>
__global__ void __launch_bounds__(kThreads, 1) nearest_sm90a_kernel(NearestArgs<T> args) {
  await_previous();
  extern __shared__ __align__(1024) unsigned char memory[];
  label_problems<kThreads>(
      args, reinterpret_cast<std::int32_t*>(memory),
      [&](int problem, const Rows<const T>& rows, RowRange range, std::int32_t* labels) {
        assign_rows<T, kChunks>(args, problem, rows, range, labels, memory);
      });
}

template <class T, int kChunks>
void launch(NearestArgs<T> args, cudaStream_t stream) {
  constexpr int kColumnBytes = kBands<kChunks> * 128 + kBiasBytes;
  constexpr int kFitting = kTableBytes / kColumnBytes / kStep * kStep;
  const int parts = (args.table.padded + kFitting - 1) / kFitting;
  args.columns = (args.table.padded + parts * kStep - 1) / (parts * kStep) * kStep;
  const std::size_t bytes = max(static_cast<std::size_t>(args.columns * kColumnBytes),
                                group_shared_bytes(args.shape.clusters, kWarps));
  args.shared_words = static_cast<int>(bytes / sizeof(std::int32_t));
  launch_cooperative_early(nearest_sm90a_kernel<T, kChunks>, args.teams.blocks(), kThreads, bytes,
                           stream, args);
}

}  // namespace

template <class T>
void nearest_sm90a(const NearestArgs<T>& args, cudaStream_t stream) {
  dispatch_head_dim("keys", args.x.width,
                    [&](auto width) { launch<T, decltype(width)::value / 32>(args, stream); });
}

template void nearest_sm90a(const NearestArgs<Bf16>&, cudaStream_t);
template void nearest_sm90a(const NearestArgs<F16>&, cudaStream_t);

}  // namespace coterie::cuda
