// SPDX-License-Identifier: MIT
#include "cuda/cluster/group.h"

#include "cuda/cluster/group.cuh"

namespace coterie::cuda {

namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;

struct GroupArgs {
  ClusterShape shape;
  Teams teams;
  GroupRun run;
  std::int32_t* histograms;
  int shared_words;
};

__global__ void __launch_bounds__(kThreads, 1) group_kernel(GroupArgs args) {
  await_previous();
  extern __shared__ std::int32_t shared[];
  const GroupLists all{args.run.labels, args.run.order, args.run.offsets, args.histograms,
                       args.shape.clusters};
  group_problems(args.shape, args.teams, all, nullptr, shared, args.shared_words,
                 [](const Team&, const TeamProblem&) {});
}

}  // namespace

void group_by_label(const ClusterShape& shape, const GroupRun& run, Arena& arena,
                    cudaStream_t stream) {
  GroupArgs args{};
  args.shape = shape;
  args.run = run;
  args.teams = make_teams(shape.problems(), shape.rows, multiprocessors(), nullptr);
  args.histograms =
      arena.take<std::int32_t>(2 * static_cast<std::int64_t>(args.teams.blocks()) * shape.clusters);
  args.teams.arrivals = arena.take<unsigned>(args.teams.count);
  if (arena.counting() || shape.problems() == 0) return;
  COTERIE_CUDA(cudaMemsetAsync(args.teams.arrivals, 0,
                               static_cast<std::size_t>(args.teams.count) * sizeof(unsigned),
                               stream));
  const std::size_t bytes = group_shared_bytes(shape.clusters, kWarps);
  args.shared_words = static_cast<int>(bytes / sizeof(std::int32_t));
  launch_cooperative_early(group_kernel, args.teams.blocks(), kThreads, bytes, stream, args);
}

}  // namespace coterie::cuda
