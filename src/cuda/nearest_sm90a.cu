// SPDX-License-Identifier: MIT
// nearest.cu by warpgroup products, for 16-bit types and as many centroids as shared memory holds.
// A warpgroup takes 64 rows, straight from global memory to registers, and meets up to 128
// centroids at a time; four warpgroups on a multiprocessor keep the tensor cores busy while others
// look at their scores.
//
// Rows are read as RowFragments describes: the depths of a product come in another order than in
// memory. The centroids are put into shared memory in the same order.
#include "cuda/device/nearest.cuh"
#include "cuda/device/wgmma.cuh"
#include "cuda/tuning.h"

namespace coterie::cuda {

namespace {

constexpr int kGroups = 4, kThreads = kGroups * kWarpgroup, kWarps = kThreads / 32;
constexpr int kStep = 128;  // the number of centroids in shared memory is a multiple

template <int kChunks>
struct Shape {
  static constexpr int kBlocks = kChunks <= 2 ? 2 : 1;  // of 64 centroids at a time
  static constexpr int kBands = (kChunks + 1) / 2;      // of 64 depths
  static constexpr int kColumnBytes = kBands * 128 + 4;
};

// All centroids of a problem, the last one repeated: 32 depths of one by a thread. `bias` follows.
template <class T, int kChunks>
__device__ void stage_table(const NearestArgs<T>& args, int problem, std::uint32_t table,
                            float* bias) {
  const std::int64_t start = static_cast<std::int64_t>(problem) * args.table.padded;
  const auto* from = static_cast<const uint4*>(args.table.columns) + start * kChunks * 4;
  for (int i = threadIdx.x; i < args.columns * kChunks; i += kThreads) {
    const int column = i / kChunks, chunk = i % kChunks;
    const int source = min(column, args.table.padded - 1);
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
    bias[i] = args.table.bias[start + min(i, args.table.padded - 1)];
  fence_async_proxy();
}

// Best keys of this lane's two rows over all centroids.
template <class T, int kChunks>
__device__ __forceinline__ void nearest_keys(const RowFragments<T, kChunks, 1>& rows,
                                             std::uint32_t table, const float* bias, int columns,
                                             unsigned key_scale, const float (&offset)[2],
                                             std::uint32_t (&best)[2]) {
  constexpr int kBlocks = Shape<kChunks>::kBlocks;
  bias += threadIdx.x % 4 * 2;
  best[0] = best[1] = 0;
#pragma unroll 1
  for (int column = 0; column < columns; column += 64 * kBlocks) {
    float d[kBlocks][32];
    wgmma_fence();
#pragma unroll
    for (int block = 0; block < kBlocks; ++block)
#pragma unroll
      for (int step = 0; step < 2 * kChunks; ++step) {
        const std::uint64_t b = matrix_descriptor(
            table + (step / 4 * columns + column + 64 * block) * 128 + step % 4 * 32);
        if (step == 0)
          wgmma<T, 0, 0>(d[block], rows.a[0][step], b);
        else
          wgmma<T, 1, 0>(d[block], rows.a[0][step], b);
      }
    wgmma_commit();
    wgmma_wait<0>();
    const std::uint32_t number = 511 - column / 4;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      wgmma_settle(d[block]);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float2 b = *reinterpret_cast<const float2*>(bias + column + 64 * block + 8 * j);
#pragma unroll
        for (int side = 0; side < 2; ++side)
          best[side] = best_key(best[side], d[block][4 * j + 2 * side] + b.x,
                                d[block][4 * j + 2 * side + 1] + b.y, offset[side], key_scale,
                                number - 16 * block - 2 * j);
      }
    }
  }
}

// Labels of the block's rows.
template <class T, int kChunks>
__device__ void assign_rows(const NearestArgs<T>& args, int problem, const Rows<const T>& rows,
                            RowRange range, std::int32_t* labels, unsigned char* memory) {
  const int lane = threadIdx.x % 32, clusters = args.shape.clusters;
  const std::uint32_t table = shared_address(memory);
  float* bias = reinterpret_cast<float*>(memory + args.columns * Shape<kChunks>::kBands * 128);
  RowTile<T, kChunks, 1> ahead;
  int first = range.begin + static_cast<int>(threadIdx.x) / 32 * 16;
  ahead.load(rows, first, range.end);
  stage_table<T, kChunks>(args, problem, table, bias);
  const float2 bounds = table_bounds<kThreads>(args, problem);  // synchronises the threads
#pragma unroll 1
  for (int round = range.begin; round < range.end; round += kGroups * 64) {
    RowFragments<T, kChunks, 1> left;
    float offset[2];
    std::uint32_t best[2];
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      left.set(side, ahead.words[0][side], args.zero);
      offset[side] = row_offset(ahead.words[0][side], bounds);
    }
    ahead.load(rows, first + kGroups * 64, range.end);
    nearest_keys<T, kChunks>(left, table, bias, args.columns, args.key_scale, offset, best);
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const Point point = decode_key(best[side]);
      const int row = first + 8 * side + lane / 4;
      const bool finite = __float_as_uint(offset[side]) >> 23 < 255;
      if (lane % 4 == side && row < range.end)
        labels[row] = finite ? min(point.label, clusters - 1) : 0;
    }
    first += kGroups * 64;
  }
}

template <class T, int kChunks>
__global__ void __launch_bounds__(kThreads, 1) nearest_sm90a_kernel(NearestArgs<T> args) {
  extern __shared__ __align__(1024) unsigned char memory[];
  label_problems<kThreads>(
      args, reinterpret_cast<std::int32_t*>(memory),
      [&](int problem, const Rows<const T>& rows, RowRange range, std::int32_t* labels) {
        assign_rows<T, kChunks>(args, problem, rows, range, labels, memory);
      });
}

template <class T, int kChunks>
bool launch(NearestArgs<T> args, cudaStream_t stream) {
  args.columns = (args.table.padded + kStep - 1) / kStep * kStep;
  const int table = args.columns * Shape<kChunks>::kColumnBytes;
  if (args.columns > kMostColumns || table > kTableBytes) return false;
  const std::size_t bytes =
      std::max(static_cast<std::size_t>(table), group_shared_bytes(args.shape.clusters, kWarps));
  args.shared_words = static_cast<int>(bytes / sizeof(std::int32_t));
  launch_cooperative(nearest_sm90a_kernel<T, kChunks>, args.teams.blocks(), kThreads, bytes, stream,
                     args);
  return true;
}

}  // namespace

template <class T>
bool nearest_sm90a(const NearestArgs<T>& args, cudaStream_t stream) {
  return dispatch_head_dim("keys", args.x.width, [&](auto width) {
    return launch<T, decltype(width)::value / 32>(args, stream);
  });
}

template bool nearest_sm90a(const NearestArgs<__nv_bfloat16>&, cudaStream_t);
template bool nearest_sm90a(const NearestArgs<__half>&, cudaStream_t);

}  // namespace coterie::cuda
