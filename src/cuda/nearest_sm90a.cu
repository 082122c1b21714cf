// SPDX-License-Identifier: MIT
// nearest.cu by warpgroup products, for 16-bit types and as many centroids as shared memory holds.
// A warpgroup takes 64 rows, straight from global memory to registers, and meets 64 centroids at a
// time; the products with the next ones are under way while it looks at these scores.
//
// Rows are read as RowFragments describes: the depths of a product come in another order than in
// memory. The centroids are put into shared memory in the same order.
#include "cuda/device/nearest.cuh"
#include "cuda/device/wgmma.cuh"
#include "cuda/tuning.h"

namespace coterie::cuda {

namespace {

constexpr int kGroups = 3, kThreads = kGroups * kWarpgroup, kWarps = kThreads / 32;
constexpr int kStep = 128;  // the number of centroids in shared memory is a multiple

template <int kChunks>
constexpr int kBands = (kChunks + 1) / 2;  // of 64 depths

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

// The 64 rows of a warpgroup against all centroids.
template <class T, int kChunks>
struct GroupScores {
  RowFragments<T, kChunks, 1> rows;
  std::uint64_t table;  // its descriptor
  const float* bias;    // of this lane's first column
  int columns;          // a multiple of kStep
  unsigned key_scale;
  float offset[2];
  std::uint32_t best[2];

  // Starts the products with 64 centroids from `column` on.
  __device__ __forceinline__ void multiply(float (&d)[32], int column) const {
#pragma unroll
    for (int step = 0; step < 2 * kChunks; ++step) {
      const std::uint64_t b =
          descriptor_behind(table, (column + step / 4 * columns) * 128 + step % 4 * 32);
      if (step == 0)
        wgmma<T, 0, 0>(d, rows.a[0][step], b);
      else
        wgmma<T, 1, 0>(d, rows.a[0][step], b);
    }
    wgmma_commit();
  }
  // Looks at the scores of 64 centroids from `column` on.
  __device__ __forceinline__ void look(const float (&d)[32], int column) {
    std::uint32_t found[2] = {};  // column numbers counted from this one's
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 b = *reinterpret_cast<const float2*>(bias + column + 8 * j);
#pragma unroll
      for (int side = 0; side < 2; ++side)
        found[side] = best_key(found[side], d[4 * j + 2 * side] + b.x,
                               d[4 * j + 2 * side + 1] + b.y, offset[side], key_scale, 511 - 2 * j);
    }
#pragma unroll
    for (int side = 0; side < 2; ++side)
      best[side] = max(best[side], found[side] - static_cast<std::uint32_t>(column) / 4);
  }
  // Looks at some scores while others are computed.
  __device__ __forceinline__ void step(const float (&now)[32], float (&next)[32], int column) {
    wgmma_fence();
    multiply(next, column + 64);
    look(now, column);
    wgmma_wait<0>();
    wgmma_settle(next);
  }
  __device__ __forceinline__ void find() {
    float d[2][32];
    best[0] = best[1] = 0;
    wgmma_fence();
    multiply(d[0], 0);
    wgmma_wait<0>();
    wgmma_settle(d[0]);
    int column = 0;
#pragma unroll 1
    for (; column + kStep < columns; column += kStep) {
      step(d[0], d[1], column);
      step(d[1], d[0], column + 64);
    }
    step(d[0], d[1], column);
    look(d[1], column + 64);
  }
};

// Labels of the block's rows.
template <class T, int kChunks>
__device__ void assign_rows(const NearestArgs<T>& args, int problem, const Rows<const T>& rows,
                            RowRange range, std::int32_t* labels, unsigned char* memory) {
  const int lane = threadIdx.x % 32, clusters = args.shape.clusters;
  const std::uint32_t table = shared_address(memory);
  float* bias = reinterpret_cast<float*>(memory + args.columns * kBands<kChunks> * 128);
  RowTile<T, kChunks, 1> ahead;
  int first = range.begin + static_cast<int>(threadIdx.x) / 32 * 16;
  ahead.load(rows, first, range.end);
  stage_table<T, kChunks>(args, problem, table, bias);
  const float2 bounds = table_bounds<kThreads>(args, problem);  // synchronises the threads
#pragma unroll 1
  for (int round = range.begin; round < range.end; round += kGroups * 64) {
    GroupScores<T, kChunks> scores;
    scores.table = matrix_descriptor(table);
    scores.bias = bias + lane % 4 * 2;
    scores.columns = args.columns;
    scores.key_scale = args.key_scale;
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      scores.rows.set(side, ahead.words[0][side], args.zero);
      scores.offset[side] = row_offset(ahead.words[0][side], bounds);
    }
    ahead.load(rows, first + kGroups * 64, range.end);
    scores.find();
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const Point point = decode_key(scores.best[side]);
      const int row = first + 8 * side + lane / 4;
      const bool finite = __float_as_uint(scores.offset[side]) >> 23 < 255;
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
  const int table = args.columns * (kBands<kChunks> * 128 + 4);
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
