// SPDX-License-Identifier: MIT
// k-means of 64-bit codes in Hamming distance (docs/mechanisms.md: clustered), all iterations and
// the counting sort in one kernel. A team of blocks works on one (item, head).
//
// Update: only codes that changed their cluster vote. A block counts changes of its rows in shared
// memory, lane l of a warp bits l%16 and l%16 + 16 of word l/16 as two 16-bit halves of one
// counter; the owner of a cluster adds the blocks' changes to the cluster's votes. Bit 63, which
// codes leave free, counts the members. All sums are of integers, so the order of the atomics does
// not matter.
#include "cuda/device/group.cuh"
#include "cuda/device/hamming_rows.cuh"

namespace coterie::cuda {

using namespace hamming_detail;

namespace {

// The block's changes to global memory, and zeros in their place.
__device__ __forceinline__ void write_changes(const HammingArgs& args, const Stage& stage,
                                              std::int64_t part) {
  auto* from = reinterpret_cast<uint4*>(stage.changes);
  auto* to = reinterpret_cast<uint4*>(args.changes) + part * args.shape.clusters * 8;
#pragma unroll 4
  for (int i = threadIdx.x; i < args.shape.clusters * 8; i += kThreads) {
    to[i] = from[i];
    from[i] = make_uint4(0, 0, 0, 0);
  }
}

// One assignment pass over the block's rows, and its changes to global memory. `moved` centroids
// are not those of the pass before.
template <bool kShared>
__device__ void assign_pass(const HammingArgs& args, const Problem& problem, const Stage& stage,
                            int iteration, int moved) {
  const bool vote = iteration < args.run.iterations;
  const RowAssigner<kShared> assigner{args,
                                      problem,
                                      stage,
                                      iteration == 0,
                                      vote,
                                      static_cast<int>(threadIdx.x) % 32,
                                      static_cast<int>(threadIdx.x) / 32};
  for (int segment = 0; segment < args.segments; ++segment) {
    if (segment > 0) __syncthreads();
    const int begin = min(segment * kSegmentRows, problem.rows());
    assigner.assign(begin, min(begin + kSegmentRows, problem.rows()), moved);
    if (!kShared || !vote) continue;
    __syncthreads();
    const std::int64_t part = static_cast<std::int64_t>(blockIdx.x) * args.segments + segment;
    write_changes(args, stage, part);
  }
}

// New centroids of the clusters that this block owns, a warp for each, by majority of the votes.
template <bool kShared>
__device__ void update_centroids(const HammingArgs& args, const Team& team, const Problem& problem,
                                 int iteration) {
  const int clusters = args.shape.clusters, lane = threadIdx.x % 32;
  const RandomStream stream{args.shape.seed, RandomUse::empty_cluster,
                            static_cast<std::uint32_t>(problem.number)};
  const std::uint64_t mask = (std::uint64_t{1} << args.run.bits) - 1;
  const int parts = kShared ? team.size * args.segments : 0;
  for (int c = threadIdx.x / 32 * team.size + team.rank; c < clusters; c += kWarps * team.size) {
    const std::int64_t row = static_cast<std::int64_t>(problem.number) * clusters + c;
    auto* votes = reinterpret_cast<int2*>(args.votes) + row * 32 + lane;
    const std::uint64_t before = iteration == 0 ? 0 : args.centroids[row];
    int2 sum = kShared && iteration == 0 ? make_int2(0, 0) : *votes;
    const std::uint32_t* changes =
        args.changes +
        (static_cast<std::int64_t>(team.number) * team.size * args.segments * clusters + c) * 32 +
        lane;
#pragma unroll 8
    for (int part = 0; part < parts; ++part) {
      const std::uint32_t packed = changes[static_cast<std::int64_t>(part) * clusters * 32];
      const int low = static_cast<std::int16_t>(packed & 0xffffu);
      sum.x += low;
      sum.y += static_cast<int>(packed - static_cast<std::uint32_t>(low)) >> 16;
    }
    if (kShared) *votes = sum;
    const int members = __shfl_sync(0xffffffffu, sum.y, 31);
    const unsigned even = __ballot_sync(0xffffffffu, 2 * sum.x > members);
    const unsigned odd = __ballot_sync(0xffffffffu, 2 * sum.y > members);
    if (lane != 0) continue;
    const std::uint32_t low = (even & 0xffffu) | (odd << 16);
    const std::uint32_t high = (even >> 16) | (odd & 0xffff0000u);
    std::uint64_t code = (static_cast<std::uint64_t>(high) << 32) | low;
    if (members == 0)
      code = random_u64(stream, static_cast<std::uint64_t>(iteration) * clusters + c);
    code &= mask;
    args.centroids[row] = code;
    if (iteration == 0 || members == 0 || code != before)
      args.busy[problem.number * args.run.iterations + iteration] = 1;
  }
}

template <bool kShared>
__device__ void cluster_codes(const HammingArgs& args, Team& team, const Problem& problem,
                              const Stage& stage) {
  const int clusters = args.shape.clusters;
  if (kShared) {
    for (int i = threadIdx.x; i < clusters * 8; i += kThreads)
      reinterpret_cast<uint4*>(stage.changes)[i] = make_uint4(0, 0, 0, 0);
  } else {
    const std::int64_t first = static_cast<std::int64_t>(problem.number) * clusters * 64;
    for (int i = team.rank * kThreads + threadIdx.x; i < clusters * 64; i += team.size * kThreads)
      args.votes[first + i] = 0;
    team.sync();
  }
  for (int iteration = 0; iteration <= args.run.iterations; ++iteration) {
    // With the same centroids this pass would repeat the one before.
    const int busy =
        iteration == 0 || args.busy[problem.number * args.run.iterations + iteration - 1];
    int moved = clusters;
    if (clusters <= args.columns) moved = stage_all(args, problem, iteration == 0, stage);
    if (!busy) break;
    __syncthreads();
    assign_pass<kShared>(args, problem, stage, iteration, moved);
    if (iteration == args.run.iterations) break;
    team.sync();
    update_centroids<kShared>(args, team, problem, iteration);
    team.sync();
  }
}

template <bool kShared>
__global__ void __launch_bounds__(kThreads, 1) hamming_kmeans_kernel(HammingArgs args) {
  await_previous();
  extern __shared__ uint4 shared[];
  const Stage stage(shared, args, kShared);
  const GroupLists all{args.run.labels, args.run.order, args.run.offsets, args.histograms,
                       args.shape.clusters};
  group_problems(args.shape, args.teams, all, args.run.labels,
                 reinterpret_cast<std::int32_t*>(shared), args.shared_words,
                 [&](Team& team, const TeamProblem& own) {
                   const RowRange& range = own.range;
                   const Problem problem{own.number,
                                         own.span.length,
                                         args.run.codes + own.start,
                                         range,
                                         args.run.codes + own.start + range.begin,
                                         args.run.labels + own.start + range.begin};
                   __syncthreads();  // the sort of the last problem used the same memory
                   if (own.span.length <= args.shape.clusters) {
                     for (int i = threadIdx.x; i < problem.rows(); i += kThreads)
                       problem.labels[i] = range.begin + i;
                     return;
                   }
                   for (int i = threadIdx.x; stage.held && i < problem.rows(); i += kThreads)
                     stage.codes[i] = problem.codes[i];
                   cluster_codes<kShared>(args, team, problem, stage);
                   __syncthreads();
                   for (int i = threadIdx.x; stage.held && i < problem.rows(); i += kThreads)
                     problem.labels[i] = stage.labels[i];
                 });
}

Teams hamming_teams(const ClusterShape& shape, unsigned* arrivals) {
  return make_teams(shape.problems(), shape.rows, multiprocessors(), arrivals);
}

// Rows of a block, at most.
int block_rows(const ClusterShape& shape, const Teams& teams) {
  return ((shape.rows + teams.size - 1) / teams.size + 63) / 64 * 64;
}

int num_segments(const ClusterShape& shape, const Teams& teams) {
  return (block_rows(shape, teams) + kSegmentRows - 1) / kSegmentRows;
}

int staged_columns(const ClusterShape& shape) {
  return min(kMostColumns, padded_columns(shape.clusters));
}

bool votes_fit(const ClusterShape& shape) {
  return Stage::bytes(staged_columns(shape), shape.clusters, true) <=
         static_cast<std::size_t>(kSharedBytes);
}

template <bool kShared>
void launch(HammingArgs args, cudaStream_t stream) {
  const std::size_t sort = group_shared_bytes(args.shape.clusters, kWarps);  // in the same memory
  std::size_t bytes =
      (max(sort, Stage::bytes(args.columns, args.shape.clusters, kShared)) + 15) / 16 * 16;
  args.shared_words = static_cast<int>(bytes / sizeof(std::int32_t));
  const int rows = block_rows(args.shape, args.teams);
  if (bytes + static_cast<std::size_t>(rows) * kRowBytes <= kSharedBytes) {
    args.held_rows = rows;
    bytes += static_cast<std::size_t>(rows) * kRowBytes;
  }
  launch_cooperative_early(hamming_kmeans_kernel<kShared>, args.teams.blocks(), kThreads, bytes,
                           stream, args);
}

}  // namespace

HammingBuffers::HammingBuffers(Arena& arena, const ClusterShape& shape, int iterations) {
  const Teams teams = hamming_teams(shape, nullptr);
  const std::int64_t problems = shape.problems(), clusters = shape.clusters;
  centroids = arena.take<std::uint64_t>(problems * clusters);
  votes = arena.take<std::int32_t>(problems * clusters * 64);
  if (votes_fit(shape))
    changes = arena.take<std::uint32_t>(static_cast<std::int64_t>(teams.blocks()) *
                                        num_segments(shape, teams) * clusters * 32);
  histograms = arena.take<std::int32_t>(2 * static_cast<std::int64_t>(teams.blocks()) * clusters);
  zeroed_count = teams.count + problems * iterations;
  zeroed = arena.take<unsigned>(zeroed_count);
}

void hamming_kmeans(const ClusterShape& shape, const HammingRun& run, const HammingBuffers& buffers,
                    cudaStream_t stream) {
  HammingArgs args{};
  args.shape = shape;
  args.run = run;
  args.teams = hamming_teams(shape, buffers.zeroed);
  args.centroids = buffers.centroids;
  args.votes = buffers.votes;
  args.histograms = buffers.histograms;
  args.changes = buffers.changes;
  args.busy = reinterpret_cast<int*>(buffers.zeroed + args.teams.count);
  args.segments = num_segments(shape, args.teams);
  args.columns = staged_columns(shape);
  args.key_scale = 512;
  if (votes_fit(shape))
    launch<true>(args, stream);
  else
    launch<false>(args, stream);
}

}  // namespace coterie::cuda
