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
#include "cuda/device/centre.cuh"
#include "cuda/device/first_meeting.cuh"
#include "cuda/device/routing_open.cuh"
#include "cuda/device/routing_scan.cuh"
#include "cuda/device/routing_twins.cuh"
#include "cuda/device/scan_rows.cuh"
#include "cuda/padding.h"
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

// Centres the centroids of a head, and returns the length of the longest of a thread's; NaN is
// longer. All blocks that need them write the same numbers, each for itself.
template <int kChunks>
__device__ __forceinline__ float centre_head(const ScanArgs& args, int head, int width) {
  const int clusters = args.centroids.clusters, chunk = static_cast<int>(threadIdx.x) % kChunks;
  const std::int64_t first = static_cast<std::int64_t>(head) * clusters;
  float longest = 0.0f;
#pragma unroll 1
  for (int i = 0; i < clusters * kChunks; i += kScanThreads<kChunks>) {
    const int c = (i + static_cast<int>(threadIdx.x)) / kChunks;
    float value[32];
    const float norm = sqrtf(centre_part<kChunks>(
        args.given + (first + min(c, clusters - 1)) * width, width, chunk, value));
    if (c >= clusters) continue;
    store_part(args.centroids.rows + (first + c) * args.centroids.pitch, chunk, value);
    if (!(norm <= longest) && !isnan(longest)) longest = norm;
  }
  return longest;
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
  if (threadIdx.x <
      2) {  // the first side twice where there is one: rows ahead are loaded from there
    const ScanSideArgs& side = args.sides[threadIdx.x ? problem.last : problem.first];
    const std::int64_t start = shape.start(span, head);
    const Rows<const ScanElement> rows = side.x.rows(span.batch, head, span.begin);
    if (threadIdx.x == 0) shared.sides.rows = rows;
    shared.sides.data[threadIdx.x] = rows.data;
    shared.sides.labels[threadIdx.x] = side.labels + start;
    shared.sides.stats[threadIdx.x] = side.stats ? side.stats + start : nullptr;
  }
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
  const float scale = scale_of(norm);
  const float rest = stage_table<kChunks>(columns, scale, memory);
  columns.usable = scale > 0.0f;
  columns.norm = 1.001f * norm * scale;
  columns.slack = columns.usable ? 1.001f * rest + kChunks * 0x1p-16f * columns.norm : INFINITY;
  label_rows<kChunks>(args, columns, range, problem.last - problem.first + 1, shared);
}

// The runs of both sides, and what queries see.
__device__ inline void sort_twins(const ScanArgs& args, int number, int turn, Team& team,
                                  std::int32_t* memory) {
  const ClusterShape& shape = args.sides[0].sort.shape;
  const int clusters = shape.clusters;
  const ItemSpan span = shape.q.span(number / shape.heads);
  const std::int64_t start = shape.start(span, number % shape.heads);
  const std::int64_t lists = static_cast<std::int64_t>(number) * (clusters + 1);
  const auto runs = [&](const RoutingRuns& of) {
    return RoutingRuns{of.order + start, of.offsets + lists};
  };
  const std::int64_t blocks = static_cast<std::int64_t>(args.teams.count) * team.size;
  sort_twin_runs(
      {args.sides[0].labels + start, args.sides[1].labels + start, runs(args.sides[0].sort.runs),
       runs(args.sides[1].sort.runs), args.ends + start, clusters},
      team, team.share(span.length), span.length,
      histograms_of(args.numbers, args.teams, team, turn, 2 * clusters),
      args.numbers + (4 * blocks + 3 * blockIdx.x) * clusters, memory, args.shared_words);
}

// What there is behind the last row of an item, and the runs of one side.
template <int kThreads>
__device__ __forceinline__ void sort_side(const ScanArgs& args, const ScanSideArgs& side,
                                          int number, int turn, Team& team, std::int32_t* memory) {
  const ClusterShape& shape = side.sort.shape;
  const int item = number / shape.heads, clusters = shape.clusters;
  const ItemSpan span = shape.q.span(item);
  const std::int64_t start = shape.start(span, number % shape.heads);
  if (!shape.q.cu_seqlens || item + 1 == shape.items)
    for (int i = span.length + team.rank * kThreads + threadIdx.x; i < shape.rows - span.begin;
         i += team.size * kThreads) {
      side.labels[start + i] = -1;
      if (side.stats) side.stats[start + i] = {0.0f, 0.0f};
    }
  if (side.sort.runs.order)
    sort_problem(side.sort, number, team,
                 histograms_of(args.numbers, args.teams, team, turn, clusters),
                 starts_of(args.numbers, args.teams, clusters), memory, args.shared_words);
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
  FirstMeeting meeting(team);
  const int problems = args.ends ? queries : queries + args.sides[1].sort.shape.problems();
  auto* words = reinterpret_cast<std::int32_t*>(memory);
  int turn = 0;
  for (int all = team.number; all < problems; all += args.teams.count, turn ^= 1) {
    const int side = all >= queries, number = side ? all - queries : all;
    __syncthreads();  // the last problem used the same memory
    label_problem<kChunks>(args, {side, args.ends ? 1 : side, number}, team, shared_address(memory),
                           shared);
    meeting.wait();
    if (args.ends)
      sort_twins(args, number, turn, team, words);
    else
      sort_side<kScanThreads<kChunks>>(args, args.sides[side], number, turn, team, words);
  }
}

}  // namespace

bool scan_fits(const AttentionCall& call, std::int64_t clusters) {
  const std::int64_t columns = (clusters + kScanStep - 1) / kScanStep * kScanStep;
  return columns <= kMostColumns && columns * (call.Dk <= 64 ? 128 : 256) <= kTableBytes;
}

bool scan_finds_ends(const AttentionCall& call) {
  const auto aligned = [](const TensorView& x) { return tensor4<const ScanElement>(x).aligned; };
  return call.inputs.q.stride(2) == call.k.stride(2) && aligned(call.inputs.q) == aligned(call.k) &&
         call.H == call.key_heads && call.N == call.S && !ragged(call.inputs.q_sequences) &&
         !ragged(call.inputs.k_sequences);
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
  args.given = static_cast<const float*>(call.inputs.centroids.data);
  args.centroids = centroids;
  args.number_mask = ~static_cast<unsigned>(kNumbers);
  args.ends = queries.ends;
  if (args.ends) problems /= 2;
  args.teams = make_teams(problems, rows, multiprocessors(), arrivals);
  args.numbers = arena.take<std::int32_t>(
      kTwinNumbers * static_cast<std::int64_t>(multiprocessors()) * centroids.clusters);
  if (!args.numbers || problems == 0) return;
  args.columns = (centroids.clusters + kScanStep - 1) / kScanStep * kScanStep;
  args.halves = 2 * args.columns / kScanStep;
  dispatch_head_dim(call.op, call.Dk, [&](auto width) {
    constexpr int kChunks = decltype(width)::value / 32;
    const int part = args.columns * kScanBands<kChunks> * 128;
    args.low_part = 2 * part <= kTableBytes ? part : 0;
    constexpr int kWarps = kScanThreads<kChunks> / 32;
    const std::size_t bytes = max(static_cast<std::size_t>(part + args.low_part),
                                  args.ends ? twin_shared_bytes(centroids.clusters, kWarps)
                                            : sort_shared_bytes(centroids.clusters, kWarps));
    args.shared_words = static_cast<int>(bytes / sizeof(std::int32_t));
    launch_cooperative_early(routing_scan_kernel<kChunks>, args.teams.blocks(),
                             kScanThreads<kChunks>, bytes, stream, args);
  });
}

}  // namespace coterie::cuda
