// SPDX-License-Identifier: MIT
// Candidates for routing's members: rows whose rounded score is not below a threshold of the
// centroid, which about kCandidateAim times as many rows as are wanted pass; routing_choose.cu
// makes the selection exact. The statistics of the rows are found on the way.
//
// A team of blocks takes 256 centroids of a head, which lie in shared memory. A warpgroup takes 64
// rows from global memory to registers, as normalised half-precision numbers, and meets 64
// centroids at a time. First a sample of the rows: of its parts the largest scores are kept, and
// the one of them that leaves about as many rows as wanted becomes the threshold. Then all rows.
#include "cuda/device/await.cuh"
#include "cuda/device/routing_candidate_hits.cuh"
#include "cuda/device/routing_candidate_limits.cuh"
#include "cuda/hopper.h"
#include "cuda/launch.h"
#include "cuda/tuning.h"

namespace coterie::cuda {

namespace {

constexpr int kCandidateRoom = 4;  // for candidates, times the wanted rows
constexpr int kPartRoom = 32;      // more, where blocks share a list
constexpr int kLeastWidth = 32, kMostWidth = 1024;
constexpr int kMostRows = 1 << (32 - CandidateHits::kColumnBits);
constexpr int kMostTeam = 16;

// All rows against the team's centroids.
template <int kChunks>
__device__ __forceinline__ void find_hits(const CandidateArgs& args,
                                          const CandidateProblem& problem, const Team& team,
                                          std::uint64_t table, int steps, CandidateHits hits,
                                          const HitTarget& target) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int place = static_cast<int>(threadIdx.x) % kWarpgroup / 32 * 16;
  const OwnTiles own(team);
  const int tiles = (problem.length + kTokenTile - 1) / kTokenTile;
  TokenRows<kChunks> tokens;
  const auto load = [&](int tile) {
    tokens.load(problem.rows, [&](int i) {
      const int row = tile * kTokenTile + place + i;
      return row < problem.length ? row : -1;
    });
  };
  load(own.group);
#pragma unroll 1
  for (int tile = own.group; tile < tiles; tile += own.groups) {
    const int row = tile * kTokenTile + place;
    tokens.normalise(problem.rows.width, args.zero, [&](int side, const RowStatistics& stats) {
      const int at = row + 8 * side + lane / 4;
      if (lane % 4 == 0 && at < problem.length && problem.column == 0)
        reinterpret_cast<float2*>(problem.stats)[at] = make_float2(stats.mean, stats.inverse);
    });
    load(tile + own.groups);
    if (problem.column == 0)
      args.cleared.clear(problem.number / args.passes * tiles + tile,
                         static_cast<int>(threadIdx.x) % kWarpgroup, kWarpgroup);
#pragma unroll 1
    for (int c = 0; c < steps; ++c) {
      float d[32];
      hits.begin(d, c * kColumnStep);
      tokens.template start<1>(descriptor_behind(table, c * kColumnStep * 128), d);
      while (hits.count >= 32) hits.flush(target);  // while the products are made
      tokens.finish(d);
      hits.push(d, row, c * kColumnStep);
    }
  }
  while (hits.count > 0) hits.flush(target);
}

template <int kChunks>
struct CandidateMemory {
  static constexpr int kHits = kTeamColumns * kChunks * 64;
  static constexpr int kLimits = kHits + kCandidateWarps * CandidateHits::kWarpBytes;
  static constexpr int kCounts = kLimits + kTeamColumns * 8;
  static constexpr int kTarget = kCounts + kTeamColumns * 4;
  static constexpr int kBytes = kTarget + static_cast<int>(sizeof(HitTarget));
};

// Teams work on the problems of both sides.
template <int kChunks>
__global__ void __launch_bounds__(kCandidateThreads, 1)
    candidates_kernel(const __grid_constant__ CandidateArgs args) {
  await_previous();
  using Memory = CandidateMemory<kChunks>;
  extern __shared__ __align__(1024) unsigned char memory[];
  const std::uint32_t base = shared_address(memory);
  auto* limits = reinterpret_cast<float*>(memory + Memory::kLimits);
  auto* counts = reinterpret_cast<int*>(memory + Memory::kCounts);
  auto& target = *reinterpret_cast<HitTarget*>(memory + Memory::kTarget);
  const int thread = static_cast<int>(threadIdx.x);
  const std::uint64_t table = matrix_descriptor(uniform(static_cast<int>(base)));
  Team team(args.teams);
  args.zeroed.zero();
  const int problems = (args.sides[0].problems + args.sides[1].problems) * args.passes;
#pragma unroll 1
  for (int number = team.number; number < problems; number += args.teams.count) {
    const CandidateProblem problem(args, number);
    const Sample sample(problem);
    const CandidateLists& lists = problem.side.lists;
    const int columns = min(kTeamColumns, args.centroids.clusters - problem.column);
    const int steps = (columns + kColumnStep - 1) / kColumnStep;
    stage_centroids<kChunks>(args.centroids, problem.head / problem.side.group, problem.column,
                             base);
    if (thread < kTeamColumns) counts[thread] = 0;
    if (thread == 0)
      target = {lists.entries + (problem.list * lists.parts + team.rank) * lists.capacity,
                lists.parts * lists.capacity, lists.capacity, problem.length};
    __syncthreads();
    find_maxima<kChunks>(args, problem, sample, team, table, steps);
    team.sync();
    find_limits(args, problem, sample.rows, steps * kColumnStep, limits);
    __syncthreads();
    const CandidateHits hits(base + Memory::kHits + thread / 32 * CandidateHits::kWarpBytes,
                             base + Memory::kLimits, base + Memory::kCounts);
    find_hits<kChunks>(args, problem, team, table, steps, hits, target);
    if (problem.column == 0)
      for (int row = problem.length + team.rank * kCandidateThreads + thread;
           row < problem.side.spans.rows; row += team.size * kCandidateThreads)
        problem.stats[row] = {0.0f, 0.0f};
    __syncthreads();
    if (thread < columns)
      lists.count[(problem.list + thread) * lists.parts + team.rank] = counts[thread];
  }
}

// Parts of all lists.
std::int64_t list_count(const CandidateRun& run) {
  return static_cast<std::int64_t>(run.side.shape.problems()) * run.side.shape.clusters *
         run.lists.parts;
}

void take_lists(CandidateRun& run, int parts, Arena& arena) {
  run.lists.parts = parts;
  run.lists.capacity = kCandidateRoom * run.width / parts + (parts > 1 ? kPartRoom : 0);
  run.lists.count = arena.take<std::int32_t>(list_count(run));
  run.lists.entries = arena.take<uint2>(list_count(run) * run.lists.capacity);
}

// Rows at odd addresses have no candidates.
void leave_open(const AttentionCall& call, const CandidateRun& queries, const CandidateRun& keys,
                const ZeroedWords& zeroed, cudaStream_t stream) {
  COTERIE_CUDA(cudaMemsetAsync(zeroed.data, 0, zeroed.count * sizeof(unsigned), stream));
  for (const CandidateRun* run : {&queries, &keys})
    if (run->wanted)
      COTERIE_CUDA(
          cudaMemsetAsync(run->lists.count, 0, list_count(*run) * sizeof(std::int32_t), stream));
  row_statistics(call, queries.side, keys.width > 0 ? &keys.side : nullptr, stream);
}

CandidateSide candidate_side(const CandidateRun& run) {
  return {tensor4<const CandidateElement>(run.side.rows),
          run.side.shape.q,
          run.side.shape.heads,
          run.side.shape.group,
          run.side.shape.problems(),
          run.side.stats,
          run.width,
          run.lists};
}

}  // namespace

bool candidates_pay(const RoutingSide& side, std::int64_t width) {
  // Memory for the lists must not depend on where rows are: find_candidates looks at that.
  return side.rows.size(3) % 8 == 0 && side.rows.dtype == DType::bf16 && !side.shape.q.cu_seqlens &&
         width >= kLeastWidth && width <= kMostWidth &&
         side.shape.rows >= kLeastCandidateRows * width && side.shape.rows < kMostRows &&
         on_hopper();
}

bool find_candidates(const AttentionCall& call, const CentredCentroids& centroids,
                     CandidateRun& queries, CandidateRun& keys, const ZeroedWords& zeroed,
                     const TensorView& cleared, unsigned* arrivals, Arena& arena,
                     cudaStream_t stream) {
  CandidateArgs args{};
  args.centroids = centroids;
  args.zeroed = zeroed;
  args.passes = (centroids.clusters + kTeamColumns - 1) / kTeamColumns;
  int problems = 0;
  for (const CandidateRun* run : {&queries, &keys})
    if (run->wanted) problems += run->side.shape.problems();
  const auto rows = static_cast<int>(max(call.N, call.S));
  args.teams = make_teams(problems, rows, multiprocessors(), arrivals);
  args.teams.size = min(args.teams.size, kMostTeam);
  args.warp_cells = 8;
  while (args.warp_cells > 1 && args.cells() > kSampleParts) args.warp_cells /= 2;
  for (CandidateRun* run : {&queries, &keys})
    if (run->wanted) take_lists(*run, args.teams.size, arena);
  args.sides[0] = candidate_side(queries.wanted ? queries : keys);
  if (queries.wanted && keys.wanted) args.sides[1] = candidate_side(keys);
  args.maxima = arena.take<std::uint32_t>(static_cast<std::int64_t>(problems) * args.passes *
                                          args.cells() * (kTeamColumns / 2));
  if (arena.counting() || problems == 0) return false;
  if (!args.sides[0].x.aligned || (args.sides[1].problems && !args.sides[1].x.aligned)) {
    leave_open(call, queries, keys, zeroed, stream);
    return false;
  }
  const bool clears = clearable(cleared) && call.N == call.S &&
                      !call.inputs.q_sequences.lengths.present() &&
                      !call.inputs.k_sequences.lengths.present();
  if (clears)
    args.cleared = ClearedSpan(cleared, problems * ((call.N + kTokenTile - 1) / kTokenTile));
  dispatch_head_dim(call.op, call.Dk, [&](auto width) {
    constexpr int kChunks = decltype(width)::value / 32;
    launch_cooperative_early(candidates_kernel<kChunks>, args.teams.blocks(), kCandidateThreads,
                             CandidateMemory<kChunks>::kBytes, stream, args);
  });
  return clears;
}

}  // namespace coterie::cuda
