// SPDX-License-Identifier: MIT
// The nearest cluster of bf16 rows, exactly, by warpgroup products, and their statistics: for
// routing_scan_sm90a.cu.
//
// A warpgroup takes 64 rows from global memory to registers and meets kScanStep centroids at a
// time. Both are f16 numbers in the products: a row x, which bf16 elements hardly change, and the
// centred centroids m; each times a power of two. What rounding takes from m is multiplied in e4m3,
// if shared memory holds it, which takes half the time. With m = table + low + rest a score and the
// sum in fp32 that decides differ by at most
//   |x| max (|rest| + kRowLoss |low|)  +  2^-15 |x| max |m|,
// the second part for sums on tensor cores (8 steps of 17 terms at 2^-23 each), in fp32 (128 terms
// at 2^-24) and the smallest elements; half of it for 64 elements. Of the scores of a row the two
// largest are found (ScoreGrid in device/routing_scan.cuh). A label is certain where they are
// farther apart than twice the bound. Other rows are open: the warpgroup keeps them until it has
// 64, multiplies them again, and sums in fp32 for those centroids alone that are near enough to the
// best (device/routing_open.cuh).
#pragma once

#include "cuda/device/centre.cuh"
#include "cuda/device/routing_open.cuh"
#include "cuda/device/routing_scan.cuh"
#include "cuda/device/routing_sort.cuh"
#include "cuda/device/scan_rows.cuh"

namespace coterie::cuda {

struct ScanSideArgs {
  SortProblems sort;
  Tensor4<const ScanElement> x;
  std::int32_t* labels;
  RowStatistics* stats;
};

struct ScanArgs {
  ScanSideArgs sides[2];
  const float* given;          // (heads, C, width): centroids
  CentredCentroids centroids;  // as they come out of it
  Teams teams;
  std::int32_t* numbers;  // of the sort
  std::int32_t* ends;     // not null: teams have the problems of both sides, which are alike
  int shared_words;
  int columns;           // centroids in shared memory, zeros behind the last one
  int halves;            // see ScanTable
  int low_part;          // see ScanTable
  unsigned number_mask;  // ~kNumbers, unknown to the compiler so that it stays in a register
};

struct ScanShared {
  ScanSides sides;
  OpenRows open[kMostScanGroups];
  OpenPairs pairs[kMostScanWarps];
};

// Labels of the block's rows of a problem, of `count` sides, the same range of each.
template <int kChunks>
__device__ void label_rows(const ScanArgs& args, const ScanTable& table, const RowRange& range,
                           int count, ScanShared& shared) {
  constexpr int kRound = kScanGroups<kChunks> * kScanRows;
  const int warp = static_cast<int>(threadIdx.x / 32u);
  const int half = static_cast<int>(threadIdx.x % 2u);  // of the row that this lane answers for
  const ScanSides& sides = shared.sides;
  OpenRows& open = shared.open[group_number()];
  int side = 0, first = range.begin + warp * 16;
  RowsAhead<kChunks> ahead(sides.rows, range.end);
  ahead.load(sides.of(0), first);
  if (threadIdx.x % kWarpgroup == 0) open.count = 0;
  open.meeting().sync();
  const int each = uniform_trips((range.end - range.begin + kRound - 1) / kRound);
  const int rounds = each * uniform_trips(count);
#pragma unroll 1
  for (int round = 0; round < rounds; ++round) {
    float x[2][8 * kChunks];
    unpack(ahead.tile.words[0][0], x[0]);
    unpack(ahead.tile.words[0][1], x[1]);
    const RowFacts<kChunks> own(table, sides.rows.width, x);
    RowProducts<kChunks> products;
    products.set(0, x[0]);
    products.set(1, x[1]);
    const int row = first + 8 * half + static_cast<int>(threadIdx.x % 32u / 4u);
    const bool mine = threadIdx.x % 4u < 2u && row < range.end;
    if (RowStatistics* to = sides.stats[side]; to && mine) to[row] = own.stats;
    std::int32_t* labels = sides.labels[side];
    const int number = row + side * kSecondSide;
    first += kRound;
    if (round + 1 == each) {
      side = 1;
      first = range.begin + warp * 16;
    }
    ahead.load(sides.of(side), first);
    ScoreGrid grid[2];
    if (table.low_part)
      products.template find<2>(table, grid);
    else
      products.template find<1>(table, grid);
    const RowBest best(grid, args.number_mask);
    const float score = best.score();
    const bool certain = score - best.next() > own.bound + 0x1p-16f * score;
    if (mine && certain) {
      *row_address(labels, row, sizeof(std::int32_t)) = best.found() ? best.column : 0;
    } else if (mine) {
      const int place = atomicAdd(&open.count, 1);
      open.row[place] = number;
      open.scale[place] = own.scale;
      open.bound[place] = own.bound;
      open.limit[place] = best.found() ? score - own.bound : -INFINITY;
    }
    const bool last = round + 1 == rounds;
    if (!last && (round + 1) % kOpenRounds != 0) continue;
    open.meeting().sync();
    int total = uniform_trips(open.count);
    open.meeting().sync();
    while (total >= kScanRows || (total > 0 && last)) {
      const int some = min(total, kScanRows);
      resolve_rows<kChunks>(table, sides, open, total, some, shared.pairs[warp]);
      total -= some;
    }
  }
}

// A problem of one side, or the same problem of both: sides first to last.
struct ScanProblem {
  int first, last, number;
};

// Centres the centroids of a head, several at a time, and returns the length of the longest of this
// warp's; NaN is longer. All blocks that need them write the same numbers, each for itself.
template <int kChunks>
__device__ __forceinline__ float centre_head(const ScanArgs& args, int head, int width) {
  constexpr int kWarps = kScanThreads<kChunks> / 32, kBatch = 16 / kChunks;
  const int clusters = args.centroids.clusters, lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t first = static_cast<std::int64_t>(head) * clusters;
  float longest = 0.0f;
#pragma unroll 1
  for (int c = static_cast<int>(threadIdx.x) / 32; c < clusters; c += kWarps * kBatch) {
    float value[kBatch][kChunks];
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
      load_centroid(args.given + (first + min(c + kWarps * i, clusters - 1)) * width, width,
                    value[i]);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (c + kWarps * i >= clusters) break;
      const float norm = centre_centroid(width, value[i]);
      if (!(norm <= longest) && !isnan(longest)) longest = norm;
      float* to = args.centroids.rows + (first + c + kWarps * i) * args.centroids.pitch;
#pragma unroll
      for (int k = 0; k < kChunks; ++k) to[lane + 32 * k] = value[i][k];
    }
  }
  return longest;
}

// Writes down where the rows of the sides are, by two threads. A side alone stands twice: rows
// ahead of the last ones are read there.
__device__ __forceinline__ void meet_sides(const ScanArgs& args, const ScanProblem& problem,
                                           const ItemSpan& span, int head, ScanSides& to) {
  const int i = static_cast<int>(threadIdx.x);
  if (i >= 2) return;
  const ScanSideArgs& side = args.sides[i ? problem.last : problem.first];
  const Rows<const ScanElement> rows = side.x.rows(span.batch, head, span.begin);
  const std::int64_t start = side.sort.shape.start(span, head);
  if (i == 0) to.rows = rows;
  to.data[i] = rows.data;
  to.labels[i] = side.labels + start;
  to.stats[i] = side.stats ? side.stats + start : nullptr;
}

// Labels and statistics of the block's rows of a problem.
template <int kChunks>
__device__ __forceinline__ void label_problem(const ScanArgs& args, const ScanProblem& problem,
                                              const Team& team, std::uint32_t memory,
                                              ScanShared& shared) {
  const ClusterShape& shape = args.sides[problem.first].sort.shape;
  const int item = problem.number / shape.heads, head = problem.number % shape.heads;
  const ItemSpan span = shape.q.span(item);
  const RowRange range = team.share(span.length);
  if (range.begin >= range.end) return;
  meet_sides(args, problem, span, head, shared.sides);
  const int own = head / shape.group, clusters = shape.clusters;
  ScanTable columns{
      matrix_descriptor(memory),
      args.low_part,
      args.columns,
      clusters,
      args.centroids.pitch,
      args.halves,
      args.centroids.rows + static_cast<std::int64_t>(own) * clusters * args.centroids.pitch,
      true,
      0.0f,
      0.0f};
  const float norm =
      block_largest(centre_head<kChunks>(args, own, args.sides[problem.first].x.width));
  const float scale = scale_to(norm, kTableLength);
  const float rest = stage_table<kChunks>(columns, scale, memory);
  columns.usable = scale > 0.0f;
  columns.norm = 1.001f * norm * scale;
  columns.slack = columns.usable ? 1.001f * rest + kChunks * 0x1p-17f * columns.norm : INFINITY;
  label_rows<kChunks>(args, columns, range, problem.last - problem.first + 1, shared);
}

}  // namespace coterie::cuda
