// SPDX-License-Identifier: MIT
// Statistics of rows, (mean, 1 / sigma), and centred centroids (centred_centroid.cuh).
//
// row_statistics: blocks of 256 threads per 64 to 256 rows, head of either side and batch entry;
// four lanes per row, several rows in flight. centre: a warp per centroid, which also zeroes
// counters. No shared memory. Preconditions: none. The scan and the candidates compute both
// themselves.
#include <algorithm>

#include "cuda/launch/dispatch.h"
#include "cuda/launch/launch.h"
#include "cuda/prim/dependent.cuh"
#include "cuda/routing/centred_centroid.cuh"
#include "cuda/routing/row_statistics.cuh"
#include "cuda/routing/stages.h"

namespace coterie::cuda {

namespace {

constexpr int kThreads = 256;

template <class T>
struct StatisticsSide {
  Tensor4<const T> x;
  SequenceSpans spans;
  int items, heads;
  RowStatistics* stats;
};

template <class T>
struct StatisticsArgs {
  StatisticsSide<T> sides[2];
};

// Four lanes per row, as in the scan (scan_sm90a.cu), several rows in flight. Block (x, y, z) has
// rows of head y, over both sides, of batch entry z.
constexpr int kLanes = 4, kGroups = kThreads / kLanes;
template <class T, int kChunks>
constexpr int kRowsAtOnce = std::max(8 / (kChunks * RowWords<T, kChunks>::kVectors), 1);

template <class T, int kChunks>
__global__ void __launch_bounds__(kThreads) row_statistics_kernel(StatisticsArgs<T> args) {
  await_previous();
  constexpr int kRows = kRowsAtOnce<T, kChunks>;
  const bool keys = static_cast<int>(blockIdx.y) >= args.sides[0].heads;
  const StatisticsSide<T>& side = args.sides[keys];
  const int head = static_cast<int>(blockIdx.y) - (keys ? args.sides[0].heads : 0);
  const int batch = static_cast<int>(blockIdx.z), count = side.spans.rows;
  const int first =
      static_cast<int>(blockIdx.x) * kGroups * kRows + static_cast<int>(threadIdx.x) / kLanes;
  const Rows<const T> rows = side.x.rows(batch, head, 0);
  RowStatistics* stats =
      side.stats + (static_cast<std::int64_t>(batch) * side.heads + head) * count;
  RowWords<T, kChunks> words[kRows];
  bool there[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int row = first + i * kGroups;
    there[i] = row < count && side.spans.item_of(batch, row, side.items) >= 0;
  }
  const auto load = [&](auto aligned) {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
      words[i].template load<decltype(aligned)::value>(rows, first + i * kGroups, there[i]);
  };
  if (rows.aligned)
    load(std::true_type{});
  else
    load(std::false_type{});
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int row = first + i * kGroups;
    float x[8 * kChunks];
    unpack(words[i], x);
    const RowStatistics own = statistics_of<kChunks>(x, rows.width);
    if (row < count && threadIdx.x % kLanes == 0)
      stats[row] = there[i] ? own : RowStatistics{0.0f, 0.0f};
  }
}

template <class T>
StatisticsSide<T> statistics_side(const RoutingSide& side) {
  return {tensor4<const T>(side.rows), side.shape.q, side.shape.items, side.shape.heads,
          side.stats};
}

// A warp per centroid.
__global__ void __launch_bounds__(kThreads)
    centre_kernel(const float* centroids, int heads, int width, CentredCentroids centred,
                  ZeroedWords zeroed) {
  await_previous();
  zeroed.zero();
  const int clusters = centred.clusters, pitch = centred.pitch;
  const int row =
      static_cast<int>(blockIdx.x) * (kThreads / 32) + static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (row >= heads * clusters) return;
  const float* from = centroids + static_cast<std::int64_t>(row) * width;
  float* to = centred.rows + static_cast<std::int64_t>(row) * pitch;
  float* column = centred.columns + static_cast<std::int64_t>(row / clusters) * pitch * clusters +
                  row % clusters;
  float value[kMaxHeadDim / 32];
  load_centroid(from, width, value);
  centre_centroid(width, value);
#pragma unroll
  for (int i = 0; i < kMaxHeadDim / 32; ++i) {
    const int d = lane + 32 * i;
    if (d >= pitch) break;
    to[d] = value[i];
    if (centred.columns) column[static_cast<std::int64_t>(d) * clusters] = value[i];
  }
}

}  // namespace

RoutingSide::RoutingSide(const AttentionCall& call, const TensorView& of,
                         const Sequences& sequences, std::int64_t clusters)
    : rows(of) {
  const SequenceSpans spans = sequence_spans(sequences, of.size(2));
  shape = {static_cast<int>(call.num_items()),
           static_cast<int>(of.size(1)),
           static_cast<int>(of.size(1) / call.value_heads),
           static_cast<int>(of.size(2)),
           static_cast<int>(clusters),
           spans,
           spans,
           0};
}

void row_statistics(const AttentionCall& call, const RoutingSide& queries, const RoutingSide* keys,
                    cudaStream_t stream) {
  const std::int64_t rows = max(call.N, keys ? call.S : 0);
  const std::int64_t heads = call.H + (keys ? call.key_heads : 0);
  if (call.B * rows == 0) return;
  dispatch_element(call.op, call.inputs.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    StatisticsArgs<T> args{};
    args.sides[0] = statistics_side<T>(queries);
    if (keys) args.sides[1] = statistics_side<T>(*keys);
    dispatch_head_dim(call.op, call.Dk, [&](auto width) {
      constexpr int kChunks = decltype(width)::value / 32;
      constexpr int kBlockRows = kGroups * kRowsAtOnce<T, kChunks>;
      const dim3 grid(static_cast<unsigned>((rows + kBlockRows - 1) / kBlockRows),
                      static_cast<unsigned>(heads), static_cast<unsigned>(call.B));
      launch_early("row_statistics", row_statistics_kernel<T, kChunks>, grid, kThreads, 0, stream,
                   args);
    });
  });
}

CentredCentroids::CentredCentroids(Arena& arena, const AttentionCall& call, std::int64_t count,
                                   Membership membership)
    : pitch(call.Dk <= 64 ? 64 : 128), clusters(static_cast<int>(count)) {
  rows = arena.take<float>(call.value_heads * count * pitch);
  if (membership == Membership::balanced)
    columns = arena.take<float>(call.value_heads * count * pitch);
}

void centre_centroids(const AttentionCall& call, const CentredCentroids& centroids,
                      const ZeroedWords& zeroed, cudaStream_t stream) {
  constexpr int kRows = kThreads / 32;
  const auto rows = static_cast<unsigned>(call.value_heads * centroids.clusters);
  launch_early("centre_centroids", centre_kernel, dim3((rows + kRows - 1) / kRows), kThreads, 0,
               stream, static_cast<const float*>(call.inputs.centroids.data),
               static_cast<int>(call.value_heads), static_cast<int>(call.Dk), centroids, zeroed);
}

}  // namespace coterie::cuda
