// SPDX-License-Identifier: MIT
// order and offsets of rows by cluster, a stable counting sort (sorted_runs.cuh), of one side or
// two.
//
// Grid and block: cooperative, one block of 512 threads a multiprocessor; teams of blocks take the
// items and heads of both sides in turn. Shared memory: sort_shared_bytes, up to 128 KB.
// Preconditions: up to kMaxClusters clusters. Kernels that label rows themselves (hamming.cu,
// nearest.cu, routing's scan) sort at their end instead.
#include "cuda/cluster/group.h"

#include "cuda/cluster/sorted_runs.cuh"
#include "cuda/launch/device.h"

namespace coterie::cuda {

namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;

struct SortArgs {
  SortSide sides[2];
  Teams teams;
  std::int32_t* numbers;
  int shared_words;
};

__global__ void __launch_bounds__(kThreads, 1)
    sort_by_cluster_kernel(const __grid_constant__ SortArgs args) {
  await_previous();
  extern __shared__ std::int32_t shared[];
  Team team(args.teams);
  const int first = args.sides[0].shape.problems();
  const int problems = first + args.sides[1].shape.problems();
  int turn = 0;
  for (int number = team.number; number < problems; number += args.teams.count, turn ^= 1) {
    const SortSide& side = args.sides[number >= first];
    const int clusters = side.shape.clusters;
    sort_problem(side, number >= first ? number - first : number, team,
                 histograms_of(args.numbers, args.teams, team, turn, clusters),
                 starts_of(args.numbers, args.teams, clusters), shared, args.shared_words);
  }
}

}  // namespace

void sort_by_cluster(const SortSide& first, const SortSide* second, Arena& arena,
                     cudaStream_t stream) {
  SortArgs args{};
  args.sides[0] = first;
  if (second) args.sides[1] = *second;
  const int clusters = first.shape.clusters;
  int rows = 0, problems = 0;
  for (const SortSide& side : args.sides) {
    rows = max(rows, side.shape.rows * side.per_row);
    problems += side.shape.problems();
  }
  args.teams = make_teams(problems, rows, multiprocessors(), nullptr);
  args.numbers =
      arena.take<std::int32_t>(3 * static_cast<std::int64_t>(args.teams.blocks()) * clusters);
  args.teams.arrivals = arena.take<unsigned>(args.teams.count);
  if (arena.counting() || problems == 0) return;
  COTERIE_CUDA(cudaMemsetAsync(args.teams.arrivals, 0,
                               static_cast<std::size_t>(args.teams.count) * sizeof(unsigned),
                               stream));
  const std::size_t bytes = sort_shared_bytes(clusters, kWarps);
  args.shared_words = static_cast<int>(bytes / sizeof(std::int32_t));
  launch_cooperative_early(sort_by_cluster_kernel, args.teams.blocks(), kThreads, bytes, stream,
                           args);
}

}  // namespace coterie::cuda
