// SPDX-License-Identifier: MIT
// A team of blocks takes one problem; each block takes a part of its rows, and in the steps by
// centroids a part of these. What blocks tell each other goes through global memory.
//
// A round is 256 rows, 64 for each warpgroup:
//   labels   a warpgroup's rows times all centroids, as in nearest_sm90a.cu
//   sums     onehot(labels)ᵀ times the round's rows, a warpgroup for 64 clusters: exact products,
//            added up in fp32 registers over all rounds
// A warpgroup labels its rows of round r + 1 before it adds up round r, so that others multiply
// while it looks at scores.
#include <algorithm>

#include "cuda/device/await.cuh"
#include "cuda/device/key_kmeans.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/hopper.h"
#include "cuda/tuning.h"

namespace coterie::cuda {

using namespace key_kmeans_detail;

namespace {

template <class T>
__device__ __forceinline__ std::uint32_t both(float value) {
  return pack2<T>(value, value);
}

// 1 where two pairs of numbers are equal, else 0.
__device__ __forceinline__ std::uint32_t equal_pairs(std::uint32_t a, std::uint32_t b,
                                                     __nv_bfloat16) {
  std::uint32_t ones;
  asm("set.eq.bf16x2.bf16x2 %0, %1, %2;" : "=r"(ones) : "r"(a), "r"(b));
  return ones;
}
__device__ __forceinline__ std::uint32_t equal_pairs(std::uint32_t a, std::uint32_t b, __half) {
  std::uint32_t ones;
  asm("set.eq.f16x2.f16x2 %0, %1, %2;" : "=r"(ones) : "r"(a), "r"(b));
  return ones;
}

// The bits of the larger absolute value of two numbers, as a float.
template <class T>
__device__ __forceinline__ float magnitude(std::uint32_t bits) {
  if constexpr (std::is_same_v<T, __half>)
    return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
  return __uint_as_float(bits << 16);
}

// The steps by rows.
template <class T>
struct KeyKMeans : KeyProblem<T> {
  using Base = KeyProblem<T>;
  using Base::args;
  using Base::Base;
  using Base::done;
  using Base::group;
  using Base::head;
  using Base::item;
  using Base::lane;
  using Base::memory;
  using Base::problem;
  using Base::range;
  using Base::rounds;
  using Base::rows;
  using Base::span;
  using Base::team;
  using Base::warp;

  __device__ std::uint32_t slot(int round) const {
    return shared_address(memory.ring) + (done + round) % kSlots * kSlotBytes;
  }
  __device__ std::uint32_t ready(int round) const {
    return shared_address(memory.ready + (done + round) % kSlots);
  }
  __device__ std::uint32_t free(int round) const {
    return shared_address(memory.free + (done + round) % kSlots);
  }
  __device__ int phase(int round) const { return (done + round) / kSlots & 1; }

  // Starts to load this warpgroup's rows of a round.
  __device__ void load(int round) const {
    const int first = range.begin + round * kRound + group() * 64;
    if (round < rounds)
      load_tile<64, kWarpgroup>(Tile<T, 64>{slot(round) + group() * kTileBytes}, rows, first,
                                range.end - first);
    cp_async_commit();
  }

  // Labels of this warpgroup's rows of a round.
  __device__ void label(int round, const float2& bounds) const {
    const Tile<T, 64> tile{slot(round) + group() * kTileBytes};
    const int warp_row = warp() % 4 * 16;
    std::uint32_t a[4][4], shift[4], most[2] = {}, best[2] = {};
    float offset[2];
#pragma unroll
    for (int d = 0; d < 4; ++d) {
      FragmentA<T> fragment;
      load_a(fragment, tile, warp_row, 16 * d);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        a[d][i] = fragment.r[i];
        most[i % 2] = __vmaxu2(most[i % 2], fragment.r[i] & 0x7fff7fffu);
      }
    }
    const int quad = lane() % 4;
    bool finite[2];
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      most[side] = max(most[side] & 0xffffu, most[side] >> 16);
      most[side] = max(most[side], __shfl_xor_sync(~0u, most[side], 1));
      most[side] = max(most[side], __shfl_xor_sync(~0u, most[side], 2));
      const float largest = magnitude<T>(most[side]);
      finite[side] = largest < INFINITY;
      offset[side] = key_offset(largest, bounds.x, bounds.y);
      shift[side] = quad == 0   ? both<__nv_bfloat16>(1.0f)
                    : quad == 1 ? pack2<__nv_bfloat16>(1.0f, offset[side])
                                : 0;
      shift[2 + side] = 0;
    }
    const std::uint64_t table = matrix_descriptor(shared_address(memory.table));
    const std::uint64_t bias = narrow_descriptor(shared_address(memory.bias));
    const int columns = (args.shape.clusters + kStep - 1) / kStep * kStep;
#pragma unroll 1
    for (int column = 0; column < columns; column += kStep) {
      float d[kStep / 2];
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        const std::uint64_t b = descriptor_behind(table, column * 128 + step * 32);
        if (step == 0)
          wgmma<T, 0, 0>(d, a[step], b);
        else
          wgmma<T, 1, 0>(d, a[step], b);
      }
      // Last: what K pushes out of the sum is lost once.
      wgmma<__nv_bfloat16, 1, 0>(d, shift, descriptor_behind(bias, column * kBiasBytes));
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_settle(d);
      std::uint32_t found[2] = {};
#pragma unroll
      for (int j = 0; j < kStep / 8; ++j)
#pragma unroll
        for (int side = 0; side < 2; ++side)
          found[side] = best_key(found[side], d[4 * j + 2 * side], d[4 * j + 2 * side + 1],
                                 args.key_scale, 511 - 2 * j);
#pragma unroll
      for (int side = 0; side < 2; ++side)
        best[side] = max(best[side], found[side] - static_cast<std::uint32_t>(column) / 4);
    }
    const int first = range.begin + round * kRound + group() * 64;
    std::int32_t* labels = args.run.labels + args.shape.start(span, head);
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const Point point = decode_key(best[side]);
      const int r = warp_row + 8 * side + lane() / 4;
      const bool there = first + r < range.end, valid = __float_as_uint(offset[side]) >> 23 < 255;
      const int label = valid ? min(point.label, args.shape.clusters - 1) : 0;
      if (quad == side) {
        if (there) labels[first + r] = label;
        if (there) atomicAdd(&memory.counts[label], 1);
        const std::uint32_t number = both<T>(there ? static_cast<float>(label) : -1.0f);
        memory.labels[(done + round) % kSlots][group() * 64 + r] =
            static_cast<std::uint16_t>(number);
      }
      if (there && !finite[side]) {  // 0 times such a row would reach all sums
        store_shared16(tile.chunk(r, 2 * quad), make_uint4(0, 0, 0, 0));
        store_shared16(tile.chunk(r, 2 * quad + 1), make_uint4(0, 0, 0, 0));
        memory.poisoned = 1;
        fence_async_proxy();
      }
    }
    __syncwarp();
    if (lane() == 0) mbarrier_arrive(ready(round));
  }

  // Adds the rows of a round to the sums of this warpgroup's 64 clusters.
  __device__ void add(int round, float (&sums)[32]) const {
    constexpr int kDepth = 4;  // steps at a time
    mbarrier_wait(ready(round), phase(round));
    if (group() * 64 < args.shape.clusters) {
      const float cluster = static_cast<float>(group() * 64 + warp() % 4 * 16 + lane() / 4);
      const std::uint32_t own[2] = {both<T>(cluster), both<T>(cluster + 8.0f)};
      const auto* labels =
          reinterpret_cast<const std::uint32_t*>(memory.labels[(done + round) % kSlots]) +
          lane() % 4;
      const std::uint64_t right = matrix_descriptor(slot(round));
      float d[32];
#pragma unroll
      for (int i = 0; i < 32; ++i) d[i] = 0.0f;
#pragma unroll 1
      for (int first = 0; first < kRound / 16; first += kDepth) {
        std::uint32_t left[kDepth][4];
#pragma unroll
        for (int step = 0; step < kDepth; ++step)
#pragma unroll
          for (int i = 0; i < 4; ++i)
            left[step][i] = equal_pairs(labels[(first + step) * 8 + i / 2 * 4], own[i % 2], T());
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < kDepth; ++step)
          wgmma<T, 1, 1>(d, left[step], descriptor_behind(right, (first + step) * (16 * 128)));
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_settle(d);
      }
#pragma unroll
      for (int i = 0; i < 32; ++i) sums[i] += d[i];
    }
    __syncwarp();
    if (lane() == 0) mbarrier_arrive(free(round));
  }

  // Labels of the block's rows, and its sums of clusters and their sizes to global memory.
  __device__ void pass() {
    const float2 bounds = this->stage_table();
    float sums[32];
#pragma unroll
    for (int i = 0; i < 32; ++i) sums[i] = 0.0f;
#pragma unroll 1
    for (int round = 0; round <= rounds; ++round) {
      if (round < rounds) {
        cp_async_wait<1>();
        fence_async_proxy();
        asm volatile("bar.sync %0, %1;" ::"r"(1 + group()), "n"(kWarpgroup) : "memory");
        if (done + round >= 2) mbarrier_wait(free(round + 2), phase(round - 2));
        load(round + 2);
        label(round, bounds);
      }
      if (round > 0) add(round - 1, sums);
    }
    cp_async_wait<0>();
    const std::int64_t start =
        (static_cast<std::int64_t>(team.number) * team.size + team.rank) * kClusters;
    const int cluster = group() * 64 + warp() % 4 * 16 + lane() / 4;
    __syncthreads();
    done += rounds;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int c = cluster + i % 2 * 8;
      float* to = args.sums + (start + c) * kWidth + i / 2 * 8 + lane() % 4 * 2;
      const bool poisoned = c == 0 && memory.poisoned;
      store2(to, poisoned ? NAN : sums[i / 2 * 4 + i % 2 * 2],
             poisoned ? NAN : sums[i / 2 * 4 + i % 2 * 2 + 1]);
    }
    if (threadIdx.x < kClusters) args.counts[start + threadIdx.x] = memory.counts[threadIdx.x];
  }

  __device__ void sort(int turn) const {
    const std::int64_t start = args.shape.start(span, head);
    const int clusters = args.shape.clusters;
    group_rows(team, range,
               {args.run.labels + start, args.run.order + start,
                args.run.offsets + static_cast<std::int64_t>(problem) * (clusters + 1),
                histograms_of(args.histograms, args.teams, team, turn, clusters), clusters},
               reinterpret_cast<std::int32_t*>(memory.ring), sizeof(memory.ring) / 4);
  }

  // Returns the rounds so far.
  __device__ int run(int turn) {
    fill_padding(args.shape, team, item, head, args.run.labels, args.run.order);
    if (span.length <= args.shape.clusters) {
      this->run_single();
      return done;
    }
    this->load_covariance();
    for (int number = 0; number < args.run.passes; ++number) {
      load(0);
      load(1);
      if (number == 0) {
        this->load_row(this->initial_row(0), this->reference);
        cp_async_wait<2>();
        __syncthreads();
      }
      this->weigh(number == 0);
      team.sync();
      pass();
      if (number + 1 < args.run.passes) team.sync();
    }
    sort(turn);  // the blocks meet in it
    if (args.run.means) this->write_means();
    __syncthreads();  // before the next problem's keys
    return done;
  }
};

template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    key_kmeans_kernel(const __grid_constant__ KeyKMeansArgs<T> args) {
  await_previous();
  args.run.zeroed.zero();
  extern __shared__ __align__(1024) unsigned char shared[];
  Memory& memory = *reinterpret_cast<Memory*>(shared);
  if (threadIdx.x < kSlots) {
    mbarrier_init(shared_address(memory.ready + threadIdx.x), kWarps);
    mbarrier_init(shared_address(memory.free + threadIdx.x), kWarps);
  }
  __syncthreads();
  Team team(args.teams);
  int turn = 0, done = 0;
  for (int number = team.number; number < args.shape.problems();
       number += args.teams.count, turn ^= 1)
    done = KeyKMeans<T>(args, memory, team, number, done).run(turn);
}

Teams kmeans_teams(const ClusterShape& shape, unsigned* arrivals) {
  const int size = std::min(
      make_teams(shape.problems(), shape.rows, multiprocessors(), nullptr).size, kMostParts);
  return {std::min(shape.problems(), multiprocessors() / size), size, arrivals};
}

}  // namespace

bool key_kmeans_serves(const AttentionCall& call, const ClusterShape& shape) {
  constexpr int kFewProblems = 8, kFewRows = 8192;  // below both a problem needs more blocks
  const TensorView& q = call.inputs.q;
  return q.dtype != DType::f32 && call.Dk <= kWidth && shape.clusters <= kClusters &&
         (shape.problems() >= kFewProblems || shape.rows <= kFewRows) &&
         tensor4<const __half>(q).aligned && on_hopper();
}

KeyKMeansBuffers::KeyKMeansBuffers(Arena& arena, const ClusterShape& shape) {
  const Teams sizes = kmeans_teams(shape, nullptr);
  teams = sizes.count;
  const std::int64_t columns = teams * kClusters;
  const std::int64_t parts = static_cast<std::int64_t>(sizes.blocks()) * kClusters;
  this->columns = arena.take<std::uint16_t>(columns * kWidth);
  bias = arena.take<float>(columns);
  norms = arena.take<float>(columns);
  sums = arena.take<float>(parts * kWidth);
  counts = arena.take<std::int32_t>(parts);
  histograms = arena.take<std::int32_t>(2 * sizes.blocks() * std::int64_t{shape.clusters});
  arrivals = arena.take<unsigned>(teams);
}

void key_kmeans(const AttentionCall& call, const ClusterShape& shape,
                const KeyMetricBuffers& metric, const KeyKMeansBuffers& buffers,
                const KeyKMeansRun& run, cudaStream_t stream) {
  const auto launch = [&](auto tag) {
    using T = typename decltype(tag)::type;
    const KeyKMeansArgs<T> args{shape,
                                kmeans_teams(shape, buffers.arrivals),
                                tensor4<const T>(call.inputs.q),
                                metric.covariance,
                                metric.centroids,
                                static_cast<T*>(buffers.columns),
                                buffers.bias,
                                buffers.norms,
                                buffers.sums,
                                buffers.counts,
                                buffers.histograms,
                                run,
                                static_cast<int>(call.Dk),
                                512};
    launch_cooperative_early(key_kmeans_kernel<T>, args.teams.blocks(), kThreads, sizeof(Memory),
                             stream, args);
  };
  if (call.inputs.q.dtype == DType::bf16)
    launch(TypeTag<__nv_bfloat16>{});
  else
    launch(TypeTag<__half>{});
}

}  // namespace coterie::cuda
