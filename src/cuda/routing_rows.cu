// SPDX-License-Identifier: MIT
// Statistics of rows: y = (x - mean) / sigma, sigma = sqrt(variance + 1e-6); and centred centroids.
#include "cuda/device/await.cuh"
#include "cuda/device/row_fragments.cuh"
#include "cuda/device/row_lanes.cuh"
#include "cuda/launch.h"
#include "cuda/routing.h"
#include "cuda/tuning.h"

namespace coterie::cuda {

namespace {

constexpr int kThreads = 256;
constexpr float kVarianceFloor = 1e-6f;

template <class T>
struct StatisticsSide {
  Tensor4<const T> x;
  SequenceSpans spans;
  int items, heads;
  std::int64_t count;  // of rows, over all heads and batch entries
  RowStatistics* stats;
};

template <class T>
struct StatisticsArgs {
  StatisticsSide<T> sides[2];
};

// Lanes of a row read its parts; several rows of a group are on their way at a time.
template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads) row_statistics_kernel(StatisticsArgs<T> args) {
  await_previous();
  using Lanes = RowLanes<T, kWidth>;
  constexpr int kRows = 4, kGroups = kThreads / Lanes::kLanes;
  const StatisticsSide<T>& side = args.sides[blockIdx.y];
  const std::int64_t first =
      static_cast<std::int64_t>(blockIdx.x) * kGroups * kRows + threadIdx.x / Lanes::kLanes;
  float x[kRows][Lanes::kVector];
  bool there[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const std::int64_t number = first + i * kGroups;
    const int row = static_cast<int>(number % side.spans.rows);
    const auto problem = static_cast<int>(number / side.spans.rows);
    const int batch = problem / side.heads, head = problem % side.heads;
    there[i] = number < side.count && side.spans.item_of(batch, row, side.items) >= 0;
    Lanes::load(side.x.rows(batch, head, 0), row, there[i], x[i]);
  }
  const int width = side.x.width;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    float sum = 0.0f, squares = 0.0f;
#pragma unroll
    for (int j = 0; j < Lanes::kVector; ++j) sum += x[i][j];
    const float mean = Lanes::sum(sum) / static_cast<float>(width);
#pragma unroll
    for (int j = 0; j < Lanes::kVector; ++j) {
      const float difference = Lanes::column() + j < width ? x[i][j] - mean : 0.0f;
      squares = fmaf(difference, difference, squares);
    }
    const float variance = Lanes::sum(squares) / static_cast<float>(width);
    const std::int64_t number = first + i * kGroups;
    if (number < side.count && Lanes::column() == 0)
      side.stats[number] = there[i] ? RowStatistics{mean, 1.0f / sqrtf(variance + kVarianceFloor)}
                                    : RowStatistics{0.0f, 0.0f};
  }
}

template <class T>
StatisticsSide<T> statistics_side(const RoutingSide& side) {
  return {tensor4<const T>(side.rows),
          side.shape.q,
          side.shape.items,
          side.shape.heads,
          side.count(),
          side.stats};
}

// A warp per column of the padded table.
__global__ void __launch_bounds__(kThreads)
    centre_kernel(const float* centroids, int heads, int width, CentredCentroids centred,
                  ZeroedWords zeroed) {
  await_previous();
  zeroed.zero();
  const int clusters = centred.clusters, pitch = centred.pitch, padded = centred.padded;
  const int column =
      static_cast<int>(blockIdx.x) * (kThreads / 32) + static_cast<int>(threadIdx.x) / 32;
  const int head = column / padded, cluster = column % padded;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (head >= heads) return;
  const bool there = cluster < clusters;
  const std::int64_t row = static_cast<std::int64_t>(head) * clusters + cluster;
  const float* from = centroids + row * width;
  float sum = 0.0f, norm = 0.0f;
  for (int d = lane; d < width && there; d += 32) sum += from[d];
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  const float mean = sum / static_cast<float>(width);
  for (int d = lane; d < pitch; d += 32) {
    const float value = there && d < width ? from[d] - mean : 0.0f;
    norm += fabsf(value);
    if (there) {
      centred.rows[row * pitch + d] = value;
      centred.columns[(static_cast<std::int64_t>(head) * pitch + d) * clusters + cluster] = value;
    }
    if (!centred.table) continue;
    __nv_bfloat16 part[2];
    split_factor(value, part);
    auto* table = static_cast<__nv_bfloat16*>(centred.table) +
                  static_cast<std::int64_t>(head) * padded * pitch * 2;
    for (int p = 0; p < 2; ++p) table[table_index(pitch / 32, 2, cluster, d, p)] = part[p];
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) norm += __shfl_xor_sync(~0u, norm, step);
  if (lane == 0 && there && centred.norms) centred.norms[row] = norm;
}

RoutingSide make_side(const TensorView& rows, const AttentionCall& call, const Sequences& sequences,
                      std::int64_t clusters) {
  RoutingSide side;
  side.rows = rows;
  side.shape.items = static_cast<int>(call.num_items());
  side.shape.heads = static_cast<int>(rows.size(1));
  side.shape.group = static_cast<int>(rows.size(1) / call.value_heads);
  side.shape.rows = static_cast<int>(rows.size(2));
  side.shape.clusters = static_cast<int>(clusters);
  side.shape.q = side.shape.k = sequence_spans(sequences, rows.size(2));
  side.shape.seed = 0;
  return side;
}

}  // namespace

RoutingSide query_side(const AttentionCall& call, std::int64_t clusters) {
  return make_side(call.inputs.q, call, call.inputs.q_sequences, clusters);
}

RoutingSide key_side(const AttentionCall& call, std::int64_t clusters) {
  return make_side(call.k, call, call.inputs.k_sequences, clusters);
}

void row_statistics(const AttentionCall& call, const RoutingSide& queries, const RoutingSide* keys,
                    cudaStream_t stream) {
  const std::int64_t most = std::max(queries.count(), keys ? keys->count() : 0);
  if (most == 0) return;
  dispatch_element(call.op, call.inputs.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    StatisticsArgs<T> args{};
    args.sides[0] = statistics_side<T>(queries);
    if (keys) args.sides[1] = statistics_side<T>(*keys);
    dispatch_wide_dim(call.op, call.Dk, [&](auto width) {
      using Lanes = RowLanes<T, decltype(width)::value>;
      constexpr int kBlockRows = kThreads / Lanes::kLanes * 4;
      const dim3 grid(static_cast<unsigned>((most + kBlockRows - 1) / kBlockRows), keys ? 2 : 1);
      launch_early("row_statistics", row_statistics_kernel<T, decltype(width)::value>, grid,
                   kThreads, 0, stream, args);
    });
  });
}

CentredCentroids::CentredCentroids(Arena& arena, const AttentionCall& call, std::int64_t count)
    : pitch(call.Dk <= 64 ? 64 : 128),
      clusters(static_cast<int>(count)),
      padded(static_cast<int>((count + 15) / 16 * 16)) {
  rows = arena.take<float>(call.value_heads * count * pitch);
  columns = arena.take<float>(call.value_heads * count * pitch);
  if (call.inputs.q.dtype != DType::bf16) return;
  table = arena.take<__nv_bfloat16>(call.value_heads * padded * pitch * 2);
  norms = arena.take<float>(call.value_heads * count);
}

SelectCounters::SelectCounters(Arena& arena, const AttentionCall& call) {
  const std::int64_t queries = call.B * call.H, keys = call.B * call.key_heads;
  const std::int64_t problems = call.num_items() * (call.H + call.key_heads);
  words.count = problems + queries + keys;
  words.data = arena.take<unsigned>(words.count);
  if (!words.data) return;
  arrivals = words.data;
  open_queries = reinterpret_cast<std::int32_t*>(words.data + problems);
  open_keys = open_queries + queries;
}

void centre_centroids(const AttentionCall& call, const CentredCentroids& centroids,
                      const ZeroedWords& zeroed, cudaStream_t stream) {
  constexpr int kColumns = kThreads / 32;
  const auto columns = static_cast<unsigned>(call.value_heads * centroids.padded);
  launch_early("centre_centroids", centre_kernel, dim3((columns + kColumns - 1) / kColumns),
               kThreads, 0, stream, static_cast<const float*>(call.inputs.centroids.data),
               static_cast<int>(call.value_heads), static_cast<int>(call.Dk), centroids, zeroed);
}

}  // namespace coterie::cuda
