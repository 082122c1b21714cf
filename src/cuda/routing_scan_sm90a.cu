// SPDX-License-Identifier: MIT
// The nearest cluster of bf16 rows and their statistics (device/scan_labels.cuh), and afterwards
// the sort by cluster; where queries and keys are alike, of both at once, with what queries see.
#include "cuda/device/first_meeting.cuh"
#include "cuda/device/routing_twins.cuh"
#include "cuda/device/scan_labels.cuh"
#include "cuda/padding.h"
#include "cuda/tuning.h"

namespace coterie::cuda {

namespace {

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
  if (arena.counting() || problems == 0) return;
  args.columns = (centroids.clusters + kScanStep - 1) / kScanStep * kScanStep;
  args.halves = 2 * args.columns / kScanStep;
  dispatch_head_dim(call.op, call.Dk, [&](auto width) {
    constexpr int kChunks = decltype(width)::value / 32;
    const int part = args.columns * kScanBands<kChunks> * 128;
    const int low = low_bytes<kChunks>(args.columns);
    args.low_part = part + low <= kTableBytes ? part : 0;
    constexpr int kWarps = kScanThreads<kChunks> / 32;
    const std::size_t bytes = max(static_cast<std::size_t>(args.low_part ? part + low : part),
                                  args.ends ? twin_shared_bytes(centroids.clusters, kWarps)
                                            : sort_shared_bytes(centroids.clusters, kWarps));
    args.shared_words = static_cast<int>(bytes / sizeof(std::int32_t));
    launch_cooperative_early(routing_scan_kernel<kChunks>, args.teams.blocks(),
                             kScanThreads<kChunks>, bytes, stream, args);
  });
}

}  // namespace coterie::cuda
