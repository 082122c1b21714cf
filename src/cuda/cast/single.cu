// SPDX-License-Identifier: MIT
// Every token of CAST joins one cluster: pairs (token, cluster) are visited by descending score,
// ties by lower token, then lower cluster; a pair is accepted if its token and a place are free.
//
// Computed in rounds. Each token joins the best cluster whose bar it passes; a cluster with too
// many raises its bar to the key of the last token that fits and rejects the others. Both sides
// rank pairs by one order, so the outcome is unique and equals the result above.
//
// Grid: resident blocks of 512 threads (cooperative launch) in teams, one per list of members at a
// time. A warp finds a token's cluster, a block a cluster's bar. Shared memory: counters of the
// sort by cluster (cluster/group.cuh) and of digits, up to 104 KiB. No preconditions.
#include "cuda/cast/select.h"
#include "cuda/cluster/group.cuh"
#include "cuda/launch/launch.h"

namespace coterie::cuda {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;

struct SingleArgs {
  CastScores scores;
  SingleBuffers buffers;
  Teams teams;
  int first_head, heads;  // list heads whose scores are stored
  std::int64_t size;
  std::int32_t* members;
  int shared_words;
};

// One list of members and its part of the buffers.
struct SingleProblem {
  const SingleArgs& args;
  int item, list_head, number;
  ItemSpan span;
  int capacity;
  std::int32_t *labels, *order, *offsets;
  CandidateKey* bars;
  std::int32_t* turned;

  __device__ SingleProblem(const SingleArgs& all, int problem)
      : args(all),
        item(problem / all.heads),
        list_head(all.first_head + problem % all.heads),
        number(item * all.scores.shape.list_heads + list_head),
        span(all.scores.shape.tokens.span(item)) {
    const CastShape& shape = args.scores.shape;
    const std::int64_t start =
        (static_cast<std::int64_t>(list_head) * shape.B + span.batch) * shape.N + span.begin;
    const int fair = (span.length + shape.clusters - 1) / shape.clusters;
    capacity = static_cast<int>(min(max(args.size, static_cast<std::int64_t>(fair)),
                                    static_cast<std::int64_t>(span.length)));
    labels = args.buffers.labels + start;
    order = args.buffers.order + start;
    offsets = args.buffers.offsets + static_cast<std::int64_t>(number) * (shape.clusters + 1);
    bars = args.buffers.bars + static_cast<std::int64_t>(number) * shape.clusters;
    turned = args.buffers.turned + 2 * number;
  }

  // The best cluster whose bar a token passes. Called by a warp.
  __device__ int best_cluster(int token) const {
    const CastShape& shape = args.scores.shape;
    CandidateKey best = 0;  // by score, then lower cluster
    for (int c = threadIdx.x % 32; c < shape.clusters; c += 32) {
      const float score = ScoreRow(args.scores, span, list_head, c).scores[token];
      if (candidate_key(score, token) >= __ldcg(bars + c))
        best = max(best, candidate_key(score, c));
    }
    return index_of(warp_max(best));
  }

  // Tokens without a cluster choose one.
  __device__ void choose(const RowRange& share) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int first = share.begin + 32 * warp; first < share.end; first += 32 * kWarps) {
      const bool mine = first + lane < share.end;
      int label = mine ? __ldcg(labels + first + lane) : 0;
      std::uint32_t waiting = __ballot_sync(~0u, label < 0);
      if (waiting == 0) continue;
      while (waiting) {
        const int other = __ffs(static_cast<int>(waiting)) - 1;
        waiting &= waiting - 1;
        const int found = best_cluster(first + other);
        if (lane == other) label = found;
      }
      if (mine) labels[first + lane] = label;
    }
  }

  // Clusters reject the tokens that do not fit; `count` is increased by their number.
  __device__ void turn_away(const Team& team, DigitMemory& memory, std::int32_t* count) const {
    for (int c = team.rank; c < args.scores.shape.clusters; c += team.size) {
      const int begin = __ldcg(offsets + c), members = __ldcg(offsets + c + 1) - begin;
      if (members <= capacity) continue;
      const ScoreRow row(args.scores, span, list_head, c);
      const std::int32_t* tokens = order + begin;
      const CandidateKey bar = find_last<kThreads>(
          [&](int i) { return row.key(__ldcg(tokens + i)); }, members, capacity, memory);
      if (threadIdx.x == 0) {
        bars[c] = bar;
        atomicAdd(count, members - capacity);
      }
      for (int i = threadIdx.x; i < members; i += kThreads) {
        const int token = __ldcg(tokens + i);
        if (row.key(token) < bar) labels[token] = -1;
      }
    }
  }

  __device__ void write_members(const Team& team) const {
    const CastShape& shape = args.scores.shape;
    std::int32_t* lists =
        args.members + static_cast<std::int64_t>(number) * shape.clusters * shape.width;
    for (int c = team.rank; c < shape.clusters; c += team.size) {
      const int begin = __ldcg(offsets + c), count = __ldcg(offsets + c + 1) - begin;
      for (int i = threadIdx.x; i < shape.width; i += kThreads)
        lists[static_cast<std::int64_t>(c) * shape.width + i] =
            i < count ? __ldcg(order + begin + i) : -1;
    }
  }
};

__global__ void __launch_bounds__(kThreads, 1)
    single_kernel(const __grid_constant__ SingleArgs args) {
  extern __shared__ std::int32_t shared[];
  __shared__ DigitMemory memory;
  const CastShape& shape = args.scores.shape;
  Team team(args.teams);
  int turn = 0;
  for (int problem = team.number; problem < shape.items * args.heads; problem += args.teams.count) {
    const SingleProblem own(args, problem);
    const RowRange share = team.share(own.span.length);
    for (int c = team.rank * kThreads + threadIdx.x; c < shape.clusters; c += team.size * kThreads)
      own.bars[c] = 0;
    for (int i = share.begin + threadIdx.x; i < share.end; i += kThreads) own.labels[i] = -1;
    if (team.rank == 0 && threadIdx.x < 2) own.turned[threadIdx.x] = 0;
    team.sync();
    for (int round = 0;; ++round, turn ^= 1) {
      own.choose(share);
      group_rows(team, share,
                 {own.labels, own.order, own.offsets,
                  histograms_of(args.buffers.histograms, args.teams, team, turn, shape.clusters),
                  shape.clusters},
                 shared, args.shared_words);
      // The blocks have synchronised since they read the last round's count.
      if (team.rank == 0 && threadIdx.x == 0) own.turned[(round + 1) % 2] = 0;
      team.sync();
      own.turn_away(team, memory, own.turned + round % 2);
      team.sync();
      if (__ldcg(own.turned + round % 2) == 0) break;
    }
    turn ^= 1;
    own.write_members(team);
  }
}

Teams single_teams(const CastShape& shape, int problems, unsigned* arrivals) {
  return make_teams(problems, shape.N, multiprocessors(), arrivals);
}

}  // namespace

SingleBuffers::SingleBuffers(Arena& arena, const CastShape& shape) {
  const std::int64_t tokens = static_cast<std::int64_t>(shape.list_heads) * shape.B * shape.N;
  const std::int64_t problems = shape.problems();
  labels = arena.take<std::int32_t>(tokens);
  order = arena.take<std::int32_t>(tokens);
  offsets = arena.take<std::int32_t>(problems * (shape.clusters + 1));
  histograms = arena.take<std::int32_t>(2ll * multiprocessors() * shape.clusters);
  bars = arena.take<CandidateKey>(problems * shape.clusters);
  arrivals = arena.take<unsigned>(multiprocessors());
  turned = arena.take<std::int32_t>(2 * problems);
}

void cast_single(const CastScores& scores, int units, const SingleBuffers& buffers,
                 std::int64_t size, std::int32_t* members, cudaStream_t stream) {
  const CastShape& shape = scores.shape;
  const int heads = units / scores.blocks;
  SingleArgs args{scores,
                  buffers,
                  single_teams(shape, shape.items * heads, buffers.arrivals),
                  scores.first_unit / scores.blocks,
                  heads,
                  size,
                  members,
                  0};
  COTERIE_CUDA(cudaMemsetAsync(
      buffers.arrivals, 0, static_cast<std::size_t>(args.teams.count) * sizeof(unsigned), stream));
  const std::size_t bytes = group_shared_bytes(shape.clusters, kWarps);
  args.shared_words = static_cast<int>(bytes / sizeof(std::int32_t));
  launch_cooperative(single_kernel, args.teams.blocks(), kThreads, bytes, stream, args);
}

}  // namespace coterie::cuda
