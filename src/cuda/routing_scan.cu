// SPDX-License-Identifier: MIT
// The nearest cluster of bf16 rows: scores x . (high + low) on tensor cores, high and low two bf16
// parts of the centred centroids, as integer keys (device/nearest.cuh) of which the two largest are
// kept.
//
// With K = 1.5 * 2^k of a row, a key counts units of 2^(k-23), and |x|_inf |m|_1 is below 2^(k-1).
// A score here and the sum of nearest_exact differ by at most 2^-16 (what the parts leave out),
// 2^-16 (sums on tensor cores, Dk <= 128) and 2^-17 (sums in fp32) of that bound: together 160
// units. A label is certain where the two largest keys are farther apart than twice that.
#include "cuda/device/await.cuh"
#include "cuda/device/nearest.cuh"
#include "cuda/device/routing_table.cuh"
#include "cuda/launch.h"
#include "cuda/tuning.h"

namespace coterie::cuda {

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kMTiles = 2, kTileRows = 16 * kMTiles, kBlockRows = kWarps * kTileRows;
constexpr int kParts = kTableParts;
constexpr int kScanTable = 96 * 1024;    // bytes of centroids in shared memory
constexpr std::uint32_t kCertain = 512;  // units between the two largest keys

struct ScanRows {
  Tensor4<const __nv_bfloat16> x;
  SequenceSpans spans;
  int items, heads, group;
  std::int32_t *labels, *open_count, *open;
};

struct ScanArgs {
  ScanRows sides[2];
  CentredCentroids centroids;
  int columns;         // centroids in shared memory at a time
  unsigned key_scale;  // 512, unknown to the compiler so that it stays a multiply-add
  unsigned zero;       // 0, unknown as well: see RowFragments
};

// The two largest keys.
struct TwoKeys {
  std::uint32_t first, second;

  __device__ __forceinline__ void add(std::uint32_t a, std::uint32_t b) {
    const std::uint32_t large = max(a, b), small = min(a, b);
    second = __vimax3_u32(second, min(first, large), small);
    first = max(first, large);
  }
};

__device__ __forceinline__ std::uint32_t score_key(float score, float offset, std::uint32_t scale,
                                                   std::uint32_t low) {
  std::uint32_t word;
  asm("mad.lo.u32 %0, %1, %2, %3;"
      : "=r"(word)
      : "r"(__float_as_uint(score + offset)), "r"(scale), "r"(low));
  return word;
}

// What is known of a row: keys without their column numbers, and the best one's column.
struct RowBest {
  std::uint32_t first = 0, second = 0;
  int label = 0;

  __device__ void add(const RowBest& other) {
    const bool larger = other.first > first || (other.first == first && other.label < label);
    second = max(max(second, other.second), min(first, other.first));
    if (larger) label = other.label;
    first = max(first, other.first);
  }
};

// From this lane's keys of a row to those of its four lanes; columns count from `column`.
__device__ __forceinline__ RowBest decode_keys(const TwoKeys& keys, int column) {
  const int number = 511 - static_cast<int>(keys.first & 511u);
  RowBest best;
  best.first = keys.first >> 9;
  best.second = keys.second >> 9;
  best.label = column + number / 2 * 8 + static_cast<int>(threadIdx.x % 4) * 2 + number % 2;
#pragma unroll
  for (int step = 1; step <= 2; step *= 2) {
    RowBest other;
    other.first = __shfl_xor_sync(~0u, best.first, step);
    other.second = __shfl_xor_sync(~0u, best.second, step);
    other.label = __shfl_xor_sync(~0u, best.label, step);
    best.add(other);
  }
  return best;
}

// Keys of the rows over `columns` centroids, of which `real` are there.
template <int kChunks>
__device__ __forceinline__ void scan_columns(
    const RowFragments<__nv_bfloat16, kChunks, 1> (&rows)[kMTiles], const uint4* table, int columns,
    int real, unsigned key_scale, const float (&offset)[kMTiles][2], TwoKeys (&keys)[kMTiles][2]) {
  constexpr int kTileVectors = kParts * kChunks * 32;
  table += threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < kMTiles; ++m) keys[m][0] = keys[m][1] = {0, 0};
#pragma unroll 1
  for (int first = 0; first < columns; first += 16, table += 2 * kTileVectors) {
    const std::uint32_t number = 511 - first / 4;
    float d[2][kMTiles][4];
#pragma unroll
    for (int half = 0; half < 2; ++half)
      multiply_rows<kParts, __nv_bfloat16, kChunks, 1, kParts>(
          rows, table + half * kTileVectors, make_float4(0.0f, 0.0f, 0.0f, 0.0f), d[half]);
    const int lane_column = first + static_cast<int>(threadIdx.x) % 4 * 2;
    const bool whole = first + 16 <= real;
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int m = 0; m < kMTiles; ++m)
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          const float* score = d[half][m] + 2 * side;
          std::uint32_t even = score_key(score[0], offset[m][side], key_scale, number - 2 * half);
          std::uint32_t odd =
              score_key(score[1], offset[m][side], key_scale, number - 2 * half - 1);
          if (!whole) {
            if (lane_column + 8 * half >= real) even = 0;
            if (lane_column + 8 * half + 1 >= real) odd = 0;
          }
          keys[m][side].add(even, odd);
        }
  }
}

// The largest |m_c|_1 of a head; NaN counts as larger than all.
__device__ float largest_norm(const float* norms, int clusters) {
  __shared__ float warps[kWarps];
  float most = 0.0f;
  for (int c = threadIdx.x; c < clusters; c += kThreads)
    if (!(norms[c] <= most)) most = norms[c];
  for (int step = 16; step > 0; step /= 2) {
    const float other = __shfl_xor_sync(~0u, most, step);
    if (!(other <= most)) most = other;
  }
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = most;
  __syncthreads();
  for (int w = 0; w < kWarps; ++w)
    if (!(warps[w] <= most)) most = warps[w];
  return most;
}

// Writes a row's label, or puts the row on the list of open ones.
__device__ __forceinline__ void write_label(const ScanRows& side, int batch, int head, int row,
                                            const RowBest& best, bool finite) {
  const std::int64_t list = static_cast<std::int64_t>(batch) * side.heads + head;
  const bool valid = side.spans.item_of(batch, row, side.items) >= 0;
  side.labels[list * side.spans.rows + row] = valid ? best.label : -1;
  if (valid && !(finite && best.first - best.second > kCertain))
    side.open[list * side.spans.rows + atomicAdd(side.open_count + list, 1)] = row;
}

// Blocks (x, y, z) share the rows of head y, of both sides in turn, of batch entry z.
template <int kChunks>
__global__ void __launch_bounds__(kThreads, 2)
    nearest_scan_kernel(const __grid_constant__ ScanArgs args) {
  await_previous();
  extern __shared__ uint4 table[];
  const bool keys = static_cast<int>(blockIdx.y) >= args.sides[0].heads;
  const ScanRows& side = args.sides[keys];
  const int head = static_cast<int>(blockIdx.y) - (keys ? args.sides[0].heads : 0);
  const int batch = static_cast<int>(blockIdx.z), lane = static_cast<int>(threadIdx.x) % 32;
  const int clusters = args.centroids.clusters, padded = args.centroids.padded;
  const int count = side.spans.rows;
  const int each = (count + static_cast<int>(gridDim.x) * kBlockRows - 1) /
                   (static_cast<int>(gridDim.x) * kBlockRows) * kBlockRows;
  const int begin = min(static_cast<int>(blockIdx.x) * each, count), end = min(begin + each, count);
  if (begin >= end) return;
  const Rows<const __nv_bfloat16> rows = side.x.rows(batch, head, 0);
  const int own = static_cast<int>(threadIdx.x) / 32 * kTileRows;
  RowTile<__nv_bfloat16, kChunks, kMTiles> ahead;
  ahead.load(rows, begin + own, end);
  const bool resident = padded <= args.columns;
  const int own_table = head / side.group;
  if (resident)
    stage_columns<kThreads, kChunks, kParts>(args.centroids, own_table, 0, padded, table);
  const float2 bounds = make_float2(
      largest_norm(args.centroids.norms + static_cast<std::int64_t>(own_table) * clusters,
                   clusters),
      0.0f);
  if (resident) finish_stage();
  for (int round = begin; round < end; round += kBlockRows) {
    const int first = round + own;
    RowFragments<__nv_bfloat16, kChunks, 1> left[kMTiles];
    float offset[kMTiles][2];
    RowBest best[kMTiles][2];
#pragma unroll
    for (int m = 0; m < kMTiles; ++m)
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        left[m].set(s, ahead.words[m][s], args.zero);
        offset[m][s] = row_offset(ahead.words[m][s], bounds);
      }
    ahead.load(rows, first + kBlockRows, end);
    for (int column = 0; column < padded; column += args.columns) {
      const int columns = min(args.columns, padded - column);
      if (!resident) {  // more than fit: every round reads them again
        __syncthreads();
        stage_columns<kThreads, kChunks, kParts>(args.centroids, own_table, column, columns, table);
        finish_stage();
      }
      if (first >= end) continue;
      TwoKeys found[kMTiles][2];
      scan_columns<kChunks>(left, table, columns, clusters - column, args.key_scale, offset, found);
#pragma unroll
      for (int m = 0; m < kMTiles; ++m)
#pragma unroll
        for (int s = 0; s < 2; ++s) best[m][s].add(decode_keys(found[m][s], column));
    }
#pragma unroll
    for (int m = 0; m < kMTiles; ++m)
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        const int row = first + 16 * m + 8 * s + lane / 4;
        const bool finite = __float_as_uint(offset[m][s]) >> 23 < 255;
        if (lane % 4 == (2 * m + s) % 4 && row < end)
          write_label(side, batch, head, row, best[m][s], finite);
      }
  }
}

ScanRows scan_rows(const ScanSide& scan) {
  const RoutingSide& side = scan.side;
  return {tensor4<const __nv_bfloat16>(side.rows),
          side.shape.q,
          side.shape.items,
          side.shape.heads,
          side.shape.group,
          scan.labels,
          scan.open_count,
          scan.open};
}

}  // namespace

void nearest_scan(const AttentionCall& call, const CentredCentroids& centroids,
                  const ScanSide& queries, const ScanSide* keys, cudaStream_t stream) {
  const std::int64_t rows = std::max(call.N, keys ? call.S : 0);
  if (call.B * rows == 0) return;
  ScanArgs args{};
  args.sides[0] = scan_rows(queries);
  if (keys) args.sides[1] = scan_rows(*keys);
  args.centroids = centroids;
  args.key_scale = 512;
  const std::int64_t heads = call.H + (keys ? call.key_heads : 0);
  // Two blocks on a multiprocessor, and no more than there are tiles.
  const std::int64_t parts =
      std::clamp<std::int64_t>(2 * multiprocessors() / std::max<std::int64_t>(1, heads * call.B), 1,
                               (rows + kBlockRows - 1) / kBlockRows);
  const dim3 grid(static_cast<unsigned>(parts), static_cast<unsigned>(heads),
                  static_cast<unsigned>(call.B));
  dispatch_wide_dim(call.op, call.Dk, [&](auto width) {
    constexpr int kChunks = decltype(width)::value / 32, kColumnBytes = kChunks * 64 * kParts;
    args.columns = std::min({centroids.padded, kMostColumns, kScanTable / kColumnBytes / 16 * 16});
    launch_early("nearest_scan", nearest_scan_kernel<kChunks>, grid, kThreads,
                 static_cast<std::size_t>(args.columns) * kColumnBytes, stream, args);
  });
}

}  // namespace coterie::cuda
