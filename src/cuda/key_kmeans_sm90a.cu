// SPDX-License-Identifier: MIT
// A team of blocks takes one problem; each block takes a part of its rows, and in the steps by
// centroids a part of these. What blocks tell each other goes through global memory.
#include "cuda/device/await.cuh"
#include "cuda/device/key_kmeans_rows.cuh"
#include "cuda/hopper.h"
#include "cuda/tuning.h"

namespace coterie::cuda {

using namespace key_kmeans_detail;

namespace {

constexpr int kMostRows = 1 << 24;  // counts of rows are exact below that many

// One problem from its keys to the order of its rows.
template <class T>
struct KeyKMeans : KeyRows<T> {
  using Base = KeyRows<T>;
  using Base::args;
  using Base::Base;
  using Base::done;
  using Base::head;
  using Base::item;
  using Base::span;
  using Base::team;

  // Returns the rounds so far.
  __device__ int run(FirstMeeting& meeting) {
    fill_padding(args.shape, team, item, head, args.run.labels, args.run.order);
    if (span.length <= args.shape.clusters) {
      this->run_single();
      return done;
    }
    this->make_metric(meeting);
    this->load(0);
    this->load(1);
#pragma unroll 1
    for (int number = 0;; ++number) {
      // All rows of the first table by every block for itself, later ones by the team.
      const bool alone = number == 0;
      const RowRange own = this->share();
      this->weigh(alone ? 0 : own.begin, alone ? kClusters : own.end - own.begin);
      if (!alone) this->share_table();
      if (!alone) {
        team.sync();
        this->stage_table();
      }
      this->pass(number + 1 == args.run.passes);
      if (number + 1 == args.run.passes) break;
      team.arrive();
      this->load(0);
      this->load(1);
      team.wait();
      this->write_means(args.centroids, true);
      __syncthreads();
    }
    team.arrive();
    const auto places = this->load_places(static_cast<int>(threadIdx.x));
    team.wait();
    const auto members = this->load_members();
    if (args.run.means) this->write_means(args.run.means, false);
    this->write_order(members, places);
    __syncthreads();  // before the next problem's keys
    return done;
  }
};

template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    key_kmeans_kernel(const __grid_constant__ KeyKMeansArgs<T> args) {
  extern __shared__ __align__(1024) unsigned char shared[];
  Memory& memory = *reinterpret_cast<Memory*>(shared);
  if (threadIdx.x < kSlots) {
    mbarrier_init(shared_address(memory.ready + threadIdx.x), kThreads);
    mbarrier_init(shared_address(memory.free + threadIdx.x), kThreads);
  }
  Team team(args.teams);
  await_writes();
  FirstMeeting meeting(team);
  args.run.zeroed.zero();
  int done = 0;
  for (int number = team.number; number < args.shape.problems(); number += args.teams.count)
    done = KeyKMeans<T>(args, memory, team, number, done).run(meeting);
}

Teams kmeans_teams(const ClusterShape& shape, unsigned* arrivals) {
  const int size =
      min(make_teams(shape.problems(), shape.rows, multiprocessors(), nullptr).size, kMostParts);
  return {min(shape.problems(), multiprocessors() / size), size, arrivals};
}

}  // namespace

bool key_kmeans_fits(const AttentionCall& call, const ClusterShape& shape) {
  constexpr int kFewProblems = 8, kFewRows = 8192;  // below both a problem needs more blocks
  return call.inputs.q.dtype != DType::f32 && call.Dk <= kWidth && shape.clusters <= kClusters &&
         (shape.problems() >= kFewProblems || shape.rows <= kFewRows) && shape.rows < kMostRows &&
         on_hopper();
}

bool key_kmeans_serves(const AttentionCall& call, const ClusterShape& shape) {
  return tensor4<const F16>(call.inputs.q).aligned && tensor4<const F16>(call.k).aligned &&
         key_kmeans_fits(call, shape);
}

KeyKMeansBuffers::KeyKMeansBuffers(Arena& arena, const AttentionCall& call,
                                   const ClusterShape& shape) {
  const Teams teams = kmeans_teams(shape, nullptr);
  const std::int64_t parts = static_cast<std::int64_t>(teams.blocks()) * kClusters;
  sums = arena.take<float>(parts * kWidth);
  counts = arena.take<std::int32_t>(parts);
  ranks = arena.take<std::int32_t>(call.B * call.H * call.N);
  tables = arena.take<unsigned char>(static_cast<std::int64_t>(teams.count) * kSharedTableBytes);
  arrivals = arena.take<unsigned>(teams.count);
}

void key_kmeans(const AttentionCall& call, const ClusterShape& shape,
                const KeyMetricBuffers& metric, const KeyKMeansBuffers& buffers,
                const KeyKMeansRun& run, cudaStream_t stream) {
  const auto launch = [&](auto tag) {
    using T = typename decltype(tag)::type;
    const KeyKMeansArgs<T> args{shape,
                                kmeans_teams(shape, buffers.arrivals),
                                tensor4<const T>(call.inputs.q),
                                tensor4<const T>(call.k),
                                metric.covariance,
                                metric.centroids,
                                buffers.sums,
                                buffers.tables,
                                buffers.counts,
                                buffers.ranks,
                                run,
                                static_cast<int>(call.Dk),
                                512};
    launch_cooperative_early(key_kmeans_kernel<T>, args.teams.blocks(), kThreads, sizeof(Memory),
                             stream, args);
  };
  if (call.inputs.q.dtype == DType::bf16)
    launch(TypeTag<Bf16>{});
  else
    launch(TypeTag<F16>{});
}

}  // namespace coterie::cuda
