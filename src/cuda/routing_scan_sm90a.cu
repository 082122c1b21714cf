// SPDX-License-Identifier: MIT
// The nearest cluster of bf16 rows, exactly, by warpgroup products; on the way their statistics,
// and afterwards the sort by cluster.
//
// A warpgroup takes 64 rows from global memory to registers and meets kScanStep centroids at a
// time. Both are f16 numbers in the products: a row x, which bf16 elements hardly change, and the
// centred centroids m; each times a power of two where it must be. What rounding takes from m is
// multiplied as well, if shared memory holds it. With m = table + rest a score and the sum in fp32
// that decides differ by at most
//   |x| max |rest|  +  2^-14 |x| max |m|,
// the second part for sums on tensor cores (16 steps of 17 terms at 2^-23 each), in fp32 (128 terms
// at 2^-24) and the smallest elements; half of it for 64 elements. Of the scores of a row the two
// largest are found (ScoreGrid in device/routing_scan.cuh). A label is certain where they are
// farther apart than twice the bound. Other rows are open: the warpgroup keeps them until it
// has 64, multiplies them again, and sums in fp32 for those centroids alone that are near enough to
// the best (device/routing_open.cuh).
#include "cuda/device/routing_open.cuh"
#include "cuda/device/routing_scan.cuh"
#include "cuda/device/routing_sort.cuh"
#include "cuda/device/scan_rows.cuh"
#include "cuda/tuning.h"

namespace coterie::cuda {

namespace {

struct ScanSideArgs {
  SortProblems sort;
  Tensor4<const ScanElement> x;
  std::int32_t* labels;
  RowStatistics* stats;
};

struct ScanArgs {
  ScanSideArgs sides[2];
  CentredCentroids centroids;
  Teams teams;
  std::int32_t* numbers;  // of the sort
  int shared_words;
  int columns;           // centroids in shared memory, zeros behind the last one
  int low_part;          // see ScanTable
  unsigned number_mask;  // ~kNumbers, unknown to the compiler so that it stays in a register
};

struct ScanShared {
  OpenRows open[kMostScanGroups];
  OpenPairs pairs[kMostScanWarps];
};

// Labels of the block's rows of a problem.
template <int kChunks>
__device__ void label_rows(const ScanArgs& args, const ScanTable& table,
                           const Rows<const ScanElement>& rows, const RowRange& range,
                           std::int32_t* labels, RowStatistics* stats, ScanShared& shared) {
  constexpr int kRound = kScanGroups<kChunks> * kScanRows;
  const int warp = static_cast<int>(threadIdx.x / 32u);
  const int side = static_cast<int>(threadIdx.x % 2u);  // of the row that this lane answers for
  OpenRows& open = shared.open[group_number()];
  int first = range.begin + warp * 16;
  RowsAhead<kChunks> ahead(rows, range.end);
  ahead.load(first);
  if (threadIdx.x % kWarpgroup == 0) open.count = 0;
  open.meeting().sync();
  const int rounds = uniform_trips((range.end - range.begin + kRound - 1) / kRound);
#pragma unroll 1
  for (int round = 0; round < rounds; ++round) {
    float x[2][8 * kChunks];
    unpack(ahead.tile.words[0][0], x[0]);
    unpack(ahead.tile.words[0][1], x[1]);
    const RowFacts<kChunks> own(table, rows.width, x);
    RowProducts<kChunks> products;
    products.set(0, x[0]);
    products.set(1, x[1]);
    const int row = first + 8 * side + static_cast<int>(threadIdx.x % 32u / 4u);
    const bool mine = threadIdx.x % 4u < 2u && row < range.end;
    if (stats && mine) stats[row] = own.stats;
    ahead.load(first + kRound);
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
      open.row[place] = row;
      open.scale[place] = own.scale;
      open.bound[place] = own.bound;
      open.limit[place] = best.found() ? score - own.bound : -INFINITY;
    }
    first += kRound;
    const bool last = round + 1 == rounds;
    if (!last && (round + 1) % kOpenRounds != 0) continue;
    open.meeting().sync();
    int total = uniform_trips(open.count);
    open.meeting().sync();
    while (total >= kScanRows || (total > 0 && last)) {
      const int count = min(total, kScanRows);
      resolve_rows<kChunks>(table, rows, open, total, count, shared.pairs[warp], labels);
      total -= count;
    }
  }
}

template <int kChunks>
__device__ __forceinline__ void scan_problem(const ScanArgs& args, const ScanSideArgs& side,
                                             int number, int turn, Team& team,
                                             unsigned char* memory, ScanShared& shared) {
  constexpr int kThreads = kScanThreads<kChunks>;
  const ClusterShape& shape = side.sort.shape;
  const int item = number / shape.heads, head = number % shape.heads;
  const ItemSpan span = shape.q.span(item);
  const std::int64_t start = shape.start(span, head);
  const RowRange range = team.share(span.length);
  const int own = head / shape.group, clusters = shape.clusters;
  const std::uint32_t memory_at = shared_address(memory);
  __syncthreads();  // the last problem used the same memory
  if (range.begin < range.end) {
    ScanTable columns{
        matrix_descriptor(memory_at),
        args.low_part,
        args.columns,
        clusters,
        args.centroids.pitch,
        args.centroids.rows + static_cast<std::int64_t>(own) * clusters * args.centroids.pitch,
        true,
        0.0f,
        0.0f};
    const float* norms = args.centroids.norms + static_cast<std::int64_t>(own) * clusters;
    float norm = 0.0f;
    for (int c = threadIdx.x; c < clusters; c += kThreads)
      if (!(norms[c] <= norm) && !isnan(norm)) norm = norms[c];
    norm = block_largest(norm);
    const float scale = scale_of(norm);
    const float rest = stage_table<kChunks>(columns, scale, memory_at);
    columns.usable = scale > 0.0f;
    columns.norm = 1.001f * norm * scale;
    columns.slack = columns.usable ? 1.001f * rest + kChunks * 0x1p-16f * columns.norm : INFINITY;
    label_rows<kChunks>(args, columns, side.x.rows(span.batch, head, span.begin), range,
                        side.labels + start, side.stats ? side.stats + start : nullptr, shared);
  }
  if (!shape.q.cu_seqlens || item + 1 == shape.items)
    for (int i = span.length + team.rank * kThreads + threadIdx.x; i < shape.rows - span.begin;
         i += team.size * kThreads) {
      side.labels[start + i] = -1;
      if (side.stats) side.stats[start + i] = {0.0f, 0.0f};
    }
  if (side.sort.runs.order)
    sort_problem(side.sort, number, team,
                 histograms_of(args.numbers, args.teams, team, turn, clusters),
                 starts_of(args.numbers, args.teams, clusters),
                 reinterpret_cast<std::int32_t*>(memory), args.shared_words);
}

// Teams work on the problems of both sides.
template <int kChunks>
__global__ void __launch_bounds__(kScanThreads<kChunks>, 1)
    routing_scan_kernel(const __grid_constant__ ScanArgs args) {
  await_previous();
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ ScanShared shared;
  if (threadIdx.x < kScanGroups<kChunks>) shared.open[threadIdx.x].meeting().init();
  Team team(args.teams);
  const int queries = args.sides[0].sort.shape.problems();
  const int problems = queries + args.sides[1].sort.shape.problems();
  int turn = 0;
  for (int number = team.number; number < problems; number += args.teams.count, turn ^= 1) {
    const bool keys = number >= queries;
    scan_problem<kChunks>(args, args.sides[keys], keys ? number - queries : number, turn, team,
                          memory, shared);
  }
}

}  // namespace

bool scan_fits(const AttentionCall& call, std::int64_t clusters) {
  const std::int64_t columns = (clusters + kScanStep - 1) / kScanStep * kScanStep;
  return columns <= kMostColumns && columns * (call.Dk <= 64 ? 128 : 256) <= kTableBytes;
}

void nearest_scan(const AttentionCall& call, const CentredCentroids& centroids,
                  const ScanSide& queries, const ScanSide* keys, unsigned* arrivals, Arena& arena,
                  cudaStream_t stream) {
  ScanArgs args{};
  int rows = 0, problems = 0;
  for (const ScanSide* scan : {&queries, keys}) {
    if (!scan) continue;
    const ClusterShape& shape = scan->side.shape;
    args.sides[scan == keys] = {{shape, scan->labels, 1, scan->runs, scan->copy},
                                tensor4<const ScanElement>(scan->side.rows),
                                scan->labels,
                                scan->side.stats};
    rows = max(rows, shape.rows);
    problems += shape.problems();
  }
  args.centroids = centroids;
  args.number_mask = ~static_cast<unsigned>(kNumbers);
  args.teams = make_teams(problems, rows, multiprocessors(), arrivals);
  args.numbers = arena.take<std::int32_t>(sort_numbers(args.teams, centroids.clusters));
  if (!args.numbers || problems == 0) return;
  args.columns = (centroids.clusters + kScanStep - 1) / kScanStep * kScanStep;
  dispatch_head_dim(call.op, call.Dk, [&](auto width) {
    constexpr int kChunks = decltype(width)::value / 32;
    const int part = args.columns * kScanBands<kChunks> * 128;
    args.low_part = 2 * part <= kTableBytes ? part : 0;
    const std::size_t bytes =
        max(static_cast<std::size_t>(part + args.low_part),
            sort_shared_bytes(centroids.clusters, kScanThreads<kChunks> / 32));
    args.shared_words = static_cast<int>(bytes / sizeof(std::int32_t));
    launch_cooperative_early(routing_scan_kernel<kChunks>, args.teams.blocks(),
                             kScanThreads<kChunks>, bytes, stream, args);
  });
}

}  // namespace coterie::cuda
