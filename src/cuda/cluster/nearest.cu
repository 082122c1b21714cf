// SPDX-License-Identifier: MIT
// Nearest centroid: argmax_c x . m_c + b_c on tensor cores; scores are never stored.
//
// Grid and block: cooperative, one block of 256 threads a multiprocessor; a team of blocks takes an
// item and head. A warp holds 16 to 64 rows in registers and multiplies them by 16 centroids at a
// time from shared memory (mma.sync); nearest.cuh describes how the best one is found; the sort
// runs last. Shared memory: centroids and biases, up to 192 KB or what the device has; more
// centroids are read again in every round. Preconditions: the table of key_metric.cu. On Hopper,
// nearest_sm90a.cu runs instead for 16-bit types; f32 rows are two bf16 parts.
#include "cuda/cluster/stages.h"

#include "cuda/cluster/nearest.cuh"
#include "cuda/launch/device.h"
#include "cuda/launch/dispatch.h"

namespace coterie::cuda {

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

// Tiles of 16 rows of a warp: as many as registers hold.
template <class T, int kChunks>
constexpr int kRowTiles = (kChunks <= 2 ? 4 : 2) / kNearestParts<T>;

// Best keys of the rows over `columns` centroids.
template <class T, int kChunks, int kParts, int kMTiles>
__device__ __forceinline__ void nearest_keys(
    const RowFragments<T, kChunks, kParts> (&rows)[kMTiles], const uint4* table, const float4* bias,
    int columns, unsigned key_scale, const float (&offset)[kMTiles][2],
    std::uint32_t (&best)[kMTiles][2]) {
  constexpr int kTileVectors = kParts * kChunks * 32;
  const int lane = threadIdx.x % 32;
  table += lane;
  bias += lane % 4;
#pragma unroll
  for (int m = 0; m < kMTiles; ++m) best[m][0] = best[m][1] = 0;
#pragma unroll 1
  for (std::uint32_t number = 511; columns > 0; columns -= 16, number -= 4) {
    float d[2][kMTiles][4];
#pragma unroll
    for (int half = 0; half < 2; ++half)
      multiply_rows<kParts, T, kChunks, kParts, kParts>(rows, table + half * kTileVectors,
                                                        bias[4 * half], d[half]);
    table += 2 * kTileVectors;
    bias += 8;
#pragma unroll
    for (int m = 0; m < kMTiles; ++m)
#pragma unroll
      for (int side = 0; side < 2; ++side)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float* score = d[half][m] + 2 * side;
          best[m][side] = best_key(best[m][side], score[0] + offset[m][side],
                                   score[1] + offset[m][side], key_scale, number - 2 * half);
        }
  }
}

// Copies the columns of centroids [first, first + columns) of a problem. Their biases are laid out
// as initial values of a product: those of columns 2i and 2i + 1 for both rows of a lane.
template <class T, int kChunks>
__device__ void stage_table(const NearestArgs<T>& args, int problem, int first, int columns,
                            uint4* table, float4* bias) {
  constexpr int kColumnVectors = kChunks * 4 * kNearestParts<T>;  // 16 bytes each
  const std::int64_t start = static_cast<std::int64_t>(problem) * args.table.padded + first;
  const auto* from = static_cast<const uint4*>(args.table.columns) + start * kColumnVectors;
  const std::uint32_t to = shared_address(table);
  for (int i = threadIdx.x; i < columns * kColumnVectors; i += kThreads)
    cp_async16(to + i * 16, from + i, 16);
  cp_async_commit();
  for (int i = threadIdx.x; i < columns / 2; i += kThreads) {
    const float even = args.table.bias[start + 2 * i], odd = args.table.bias[start + 2 * i + 1];
    bias[i] = make_float4(even, odd, even, odd);
  }
}

__device__ __forceinline__ void finish_stage() {
  cp_async_wait<0>();
  __syncthreads();
}

// Labels of the block's rows.
template <class T, int kChunks>
__device__ void assign_rows(const NearestArgs<T>& args, int problem, const Rows<const T>& rows,
                            RowRange range, std::int32_t* labels, uint4* table) {
  constexpr int kMTiles = kRowTiles<T, kChunks>, kParts = kNearestParts<T>;
  using Tile = RowTile<T, kChunks, kMTiles>;
  const int lane = threadIdx.x % 32, clusters = args.shape.clusters;
  auto* bias = reinterpret_cast<float4*>(table + args.columns * kChunks * 4 * kParts);
  Tile ahead;
  const int offset_rows = threadIdx.x / 32 * Tile::kRows;
  ahead.load(rows, range.begin + offset_rows, range.end);
  const bool resident = args.table.padded <= args.columns;
  if (resident) stage_table<T, kChunks>(args, problem, 0, args.table.padded, table, bias);
  const float2 bounds = table_bounds<kThreads>(args, problem);
  if (resident) finish_stage();
  for (int round = range.begin; round < range.end; round += kWarps * Tile::kRows) {
    const int first = round + offset_rows;
    RowFragments<T, kChunks, kParts> left[kMTiles];
    float offset[kMTiles][2];
    Point mine[kMTiles][2];
#pragma unroll
    for (int m = 0; m < kMTiles; ++m)
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        left[m].set(side, ahead.words[m][side], args.zero);
        offset[m][side] = row_offset(ahead.words[m][side], bounds);
        mine[m][side] = {0, 0};
      }
    ahead.load(rows, first + kWarps * Tile::kRows, range.end);
    for (int column = 0; column < args.table.padded; column += args.columns) {
      const int columns = min(args.columns, args.table.padded - column);
      if (!resident) {  // more than fit: every round reads them again
        __syncthreads();
        stage_table<T, kChunks>(args, problem, column, columns, table, bias);
        finish_stage();
      }
      if (first >= range.end) continue;
      std::uint32_t best[kMTiles][2];
      nearest_keys<T, kChunks>(left, table, bias, columns, args.key_scale, offset, best);
#pragma unroll
      for (int m = 0; m < kMTiles; ++m)
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          const Point point = decode_key(best[m][side]);
          if (column == 0 || point.value > mine[m][side].value)
            mine[m][side] = {point.value, column + point.label};
        }
    }
#pragma unroll
    for (int m = 0; m < kMTiles; ++m)
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const int row = first + 16 * m + 8 * side + lane / 4;
        const bool finite = __float_as_uint(offset[m][side]) >> 23 < 255;
        if (lane % 4 == (2 * m + side) % 4 && row < range.end)
          labels[row] = finite ? min(mine[m][side].label, clusters - 1) : args.lost;
      }
  }
}

template <class T, int kChunks>
__global__ void __launch_bounds__(kThreads, 1) nearest_kernel(NearestArgs<T> args) {
  await_previous();
  extern __shared__ uint4 shared[];
  label_problems<kThreads>(
      args, reinterpret_cast<std::int32_t*>(shared),
      [&](int problem, const Rows<const T>& rows, RowRange range, std::int32_t* labels) {
        assign_rows<T, kChunks>(args, problem, rows, range, labels, shared);
      });
}

template <class T, int kChunks>
void launch(NearestArgs<T> args, cudaStream_t stream) {
  constexpr int kColumnBytes = kChunks * 64 * kNearestParts<T> + 8;
  const int fitting = min(kTableBytes, shared_for_tables()) / kColumnBytes / 16 * 16;
  args.columns = min(min(args.table.padded, kMostColumns), fitting);
  const std::size_t bytes = max(static_cast<std::size_t>(args.columns) * kColumnBytes,
                                group_shared_bytes(args.shape.clusters, kWarps));
  args.shared_words = static_cast<int>(bytes / sizeof(std::int32_t));
  launch_cooperative_early(nearest_kernel<T, kChunks>, args.teams.blocks(), kThreads, bytes, stream,
                           args);
}

}  // namespace

NearestPlan::NearestPlan(Arena& arena, const ClusterShape& of, std::int64_t passes)
    : shape(of), teams(make_teams(of.problems(), of.rows, multiprocessors(), nullptr)) {
  histograms =
      arena.take<std::int32_t>(2 * static_cast<std::int64_t>(teams.blocks()) * shape.clusters);
  zeroed.count = passes * teams.count;
  zeroed.data = teams.arrivals = arena.take<unsigned>(zeroed.count);
}

void nearest_clusters(const AttentionCall& call, const NearestPlan& plan,
                      const CentroidTable& table, std::int64_t pass, const ClusterLists& out,
                      cudaStream_t stream) {
  dispatch_element(call.op, call.inputs.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    NearestArgs<T> args{plan, tensor4<const T>(call.inputs.q), table, out, 0, 0, 512, 0};
    args.teams.arrivals += pass * plan.teams.count;
    if constexpr (sizeof(T) == 2)
      if (on_hopper()) return nearest_sm90a(args, stream);
    dispatch_head_dim(call.op, call.Dk,
                      [&](auto width) { launch<T, decltype(width)::value / 32>(args, stream); });
  });
}

}  // namespace coterie::cuda
