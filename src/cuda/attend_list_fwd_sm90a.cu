// SPDX-License-Identifier: MIT
// Forward pass of attention over lists on Hopper, for windows that move along long lists.
//
// A block walks along a stretch of a list. One warpgroup copies queries and keys into shared
// memory, each tile once; the others take 64 queries each, in turn, and find the keys of their
// window in a ring of tiles. So keys are read from memory once per stretch, not once per query
// tile.
#include <algorithm>

#include "cuda/device/bands.cuh"
#include "cuda/device/list_forward.cuh"
#include "cuda/device/list_rows.cuh"
#include "cuda/device/store.cuh"
#include "cuda/hopper.h"
#include "cuda/launch.h"

namespace coterie::cuda {
namespace {

constexpr int kTile = 64;                // queries, and keys
constexpr int kTileBytes = kTile * 128;  // rows of up to 64 elements
constexpr int kGroups = 3;               // warpgroups that compute
constexpr int kThreads = (kGroups + 1) * kWarpgroup;
constexpr int kRing = 11;            // tiles of keys and values
constexpr int kSteps = 2 * kGroups;  // tiles of queries
constexpr int kAhead = 2;            // steps on their way that are not announced
constexpr int kProducerRegisters = 56, kConsumerRegisters = 152;

// Shared memory of a block.
struct Ring {
  static constexpr int kQueries = kRing * 2 * kTileBytes;
  static constexpr int kBarriers = kQueries + kSteps * kTileBytes;
  static constexpr int kCurrent = kBarriers + kSteps * 8;
  static constexpr int kBytes = kCurrent + kGroups * 4 * 4;
  std::uint32_t base;

  __device__ std::uint32_t keys(int tile) const { return base + tile % kRing * 2 * kTileBytes; }
  __device__ std::uint32_t values(int tile) const { return keys(tile) + kTileBytes; }
  __device__ std::uint32_t queries(int step) const {
    return base + kQueries + step % kSteps * kTileBytes;
  }
  // Queries of a step and all keys that they see are there.
  __device__ std::uint32_t full(int step) const { return base + kBarriers + step % kSteps * 8; }
  // The step that a computing warp is at.
  __device__ std::uint32_t current(int warp) const { return base + kCurrent + 4 * warp; }

  __device__ void set_current(int warp, int step) const {
    asm volatile("st.release.cta.shared.b32 [%0], %1;" ::"r"(current(warp)), "r"(step) : "memory");
  }
  // The earliest step that is not done. By all lanes of a warp.
  __device__ int earliest() const {
    static_assert(kGroups * 4 <= 32, "a lane for every computing warp");
    int step = 0x7fffffff;
    if (threadIdx.x % 32 < kGroups * 4)
      asm volatile("ld.acquire.cta.shared.b32 %0, [%1];"
                   : "=r"(step)
                   : "r"(current(threadIdx.x % 32))
                   : "memory");
    return __reduce_min_sync(~0u, step);
  }
};

// Steps of a stretch: tiles of queries from `first` on.
struct Walk {
  const ListProblem& problem;
  const ListPair& pair;
  int first, steps;

  __device__ int rank(int step) const { return (first + step) * kTile; }
  __device__ RankRange range(int rank) const {
    return problem.range_at(pair.k.count, rank + pair.shift);
  }
  // Tiles of keys [low, high) that the queries of a step see.
  __device__ int low(int step) const { return range(rank(step)).low / kTile; }
  __device__ int high(int step) const {
    const int last = min(rank(step) + kTile, pair.q.count) - 1;
    return (range(last).high + kTile - 1) / kTile;
  }
};

template <class T>
__device__ void produce(const ListForwardArgs<T>& args, const Walk& walk, const Ring& ring,
                        int head) {
  const ListProblem& problem = args.problem;
  const ListPair& pair = walk.pair;
  const Rows<const T> q = pair.q.rows(args.q.rows(pair.q_span.batch, head, pair.q_span.begin));
  const Rows<const T> k =
      pair.k.rows(args.k.rows(pair.k_span.batch, head / problem.group, pair.k_span.begin));
  const Rows<const T> v =
      pair.k.rows(args.v.rows(pair.k_span.batch, head / problem.value_group, pair.k_span.begin));
  const auto load = [&](std::uint32_t to, const Rows<const T>& rows, const SlotList& list,
                        int rank) {
    load_tile<kTile, kWarpgroup>(Tile<T, 64>{to}, rows, rank, list.count - rank,
                                 list.index_at(rank));
  };
  int announced = 0;
  const auto announce = [&](int end) {
    fence_async_proxy();
    __syncwarp();
    if (threadIdx.x % 32 == 0)
      for (int step = announced; step < end; ++step) mbarrier_arrive(ring.full(step));
    announced = max(announced, end);
  };
  int next_key = walk.low(0);
  for (int step = 0; step < walk.steps; ++step) {
    const int end = walk.high(step);
    const auto room = [&] {
      const int earliest = ring.earliest();
      return earliest > step - kSteps &&
             (end <= next_key || walk.low(min(earliest, step)) + kRing >= end);
    };
    if (!room()) {
      cp_async_wait<0>();
      announce(step);
      while (!room()) __nanosleep(64);
    }
    load(ring.queries(step), q, pair.q, walk.rank(step));
    for (; next_key < end; ++next_key) {
      load(ring.keys(next_key), k, pair.k, next_key * kTile);
      load(ring.values(next_key), v, pair.k, next_key * kTile);
    }
    cp_async_commit();
    cp_async_wait<kAhead>();
    announce(step - kAhead + 1);
  }
  cp_async_wait<0>();
  announce(walk.steps);
}

// The two queries of a thread.
template <class T>
struct GroupRows {
  RankRange range[2];
  RankRange seen, shared;  // by any, and by all of the warp's queries
  RowSoftmax softmax[2];
  float out[32];

  __device__ void start(const Walk& walk, int step) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int rank = min(walk.rank(step) + group_row(half), walk.pair.q.count - 1);
      range[half] = walk.range(rank);
      softmax[half] = {kLowestShift, 0.0f};
    }
    seen = {__shfl_sync(~0u, range[0].low, 0), __shfl_sync(~0u, range[1].high, 31)};
    shared = {__shfl_sync(~0u, range[1].low, 31), __shfl_sync(~0u, range[0].high, 0)};
#pragma unroll
    for (int i = 0; i < 32; ++i) out[i] = 0.0f;
  }

  // New shifts for the rows that need one. A row looks at its own scores only.
  __device__ void rescale(const float (&s)[32], float exponent, float inverse) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top = -INFINITY;
#pragma unroll
      for (int i = 0; i < 16; ++i) top = fmaxf(top, s[i / 2 * 4 + 2 * half + i % 2]);
      top = quad_max(top);
      if (!(top > softmax[half].limit(inverse))) continue;
      const float factor = softmax[half].raise(top, exponent);
#pragma unroll
      for (int i = 0; i < 16; ++i) out[i / 2 * 4 + 2 * half + i % 2] *= factor;
    }
  }

  // Scores of the 64 keys from rank `begin` on become weights.
  __device__ void weigh(float (&s)[32], float exponent, float inverse) {
    const float limits[2] = {softmax[0].limit(inverse), softmax[1].limit(inverse)};
    bool above = false;
#pragma unroll
    for (int i = 0; i < 32; ++i) above |= s[i] > limits[i / 2 % 2];
    if (__any_sync(~0u, above)) rescale(s, exponent, inverse);
#pragma unroll
    for (int i = 0; i < 32; ++i) s[i] = softmax[i / 2 % 2].weight(s[i], exponent);
  }

  // The same where not all queries see all keys; 16 keys that none sees cost nothing.
  __device__ void weigh_cut(float (&s)[32], int begin, float exponent, float inverse) {
    const float limits[2] = {softmax[0].limit(inverse), softmax[1].limit(inverse)};
    bool above = false;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const int key = begin + i / 4 * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + i % 2;
      const RankRange& own = range[i / 2 % 2];
      if (key < own.low || key >= own.high) s[i] = -INFINITY;
      above |= s[i] > limits[i / 2 % 2];
    }
    if (__any_sync(~0u, above)) rescale(s, exponent, inverse);
#pragma unroll
    for (int block = 0; block < 4; ++block) {
      const int first = begin + 16 * block;
      if (first + 16 > seen.low && first < seen.high) {
#pragma unroll
        for (int i = 8 * block; i < 8 * block + 8; ++i)
          s[i] = softmax[i / 2 % 2].weight(s[i], exponent);
      } else {
#pragma unroll
        for (int i = 8 * block; i < 8 * block + 8; ++i) s[i] = 0.0f;
      }
    }
  }

  __device__ void write(const ListForwardArgs<T>& args, const Walk& walk, int head, int step) {
    const ListProblem& problem = args.problem;
    const ListPair& pair = walk.pair;
    const Rows<T> by_row = args.out.rows(pair.q_span.batch, head, pair.q_span.begin);
    const Rows<float> by_slot{args.slot_out, problem.width, problem.width, problem.width % 4 == 0};
    const std::int64_t base = ListProblem::row_base(problem.q, pair.q_span, head);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int rank = walk.rank(step) + group_row(half);
      const bool there = rank < pair.q.count;
      const int to = there ? pair.q.row(rank) : 0;
      const std::int64_t slot = there ? pair.q.slot_of(rank) : 0;
      const float sum = quad_sum(softmax[half].sum);
      if (there && args.lse && threadIdx.x % 4 == 0)
        args.lse[args.slot_out ? slot : base + to] = row_lse(softmax[half], sum);
      const float factor = sum == 0.0f ? 0.0f : __fdividef(1.0f, sum);
#pragma unroll
      for (int d = 0; d < 2; ++d) {
        Accumulator columns[2];
#pragma unroll
        for (int i = 0; i < 16; ++i) columns[i / 8][i / 4 % 2][i % 4] = out[16 * d + i] * factor;
        if (args.slot_out)
          store_columns(by_slot, slot, there, 32 * d, columns, half);
        else
          store_columns(by_row, to, there, 32 * d, columns, half);
      }
    }
  }
};

template <class T>
__device__ __forceinline__ void start_scores(float (&s)[32], std::uint32_t queries,
                                             std::uint32_t keys) {
  row_products(s, Bands<T, 64, kTile>{queries}, 0, Bands<T, 64, kTile>{keys}, 0);
}

template <class T>
__device__ void consume(const ListForwardArgs<T>& args, const Walk& walk, const Ring& ring,
                        int head) {
  const int warp = threadIdx.x / 32;
  const float exponent = args.problem.scale * kLog2e, inverse = __fdividef(1.0f, exponent);
  for (int step = threadIdx.x / kWarpgroup; step < walk.steps; step += kGroups) {
    GroupRows<T> rows;
    rows.start(walk, step);
    const int first = walk.low(step), end = walk.high(step);
    mbarrier_wait(ring.full(step), step / kSteps & 1);
    float s[32];
    if (first < end) {
      wgmma_fence();
      start_scores<T>(s, ring.queries(step), ring.keys(first));
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_settle(s);
    }
#pragma unroll 1
    for (int tile = first; tile < end; ++tile) {
      const int begin = tile * kTile;
      if (begin >= rows.shared.low && begin + kTile <= rows.shared.high)
        rows.weigh(s, exponent, inverse);
      else
        rows.weigh_cut(s, begin, exponent, inverse);
      std::uint32_t p[4][4];
      pack_factor<T>(p, s);
      // Products begin and end in one step: the assembler does them one by one otherwise. After
      // the last tile its scores are computed again, for nothing, which saves a branch here.
      wgmma_fence();
      float(&out)[1][32] = reinterpret_cast<float(&)[1][32]>(rows.out);
      add_products<T, 64, kTile>(out, p, Bands<T, 64, kTile>{ring.values(tile)}, 0);
      start_scores<T>(s, ring.queries(step), ring.keys(min(tile + 1, end - 1)));
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_settle(s);
      wgmma_settle(rows.out);
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) ring.set_current(warp, step + kGroups);
    rows.write(args, walk, head, step);
  }
  __syncwarp();
  if (threadIdx.x % 32 == 0) ring.set_current(warp, 0x7fffffff);
}

template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    list_forward_sm90a_kernel(const __grid_constant__ ListForwardArgs<T> args, int tiles) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const ListProblem& problem = args.problem;
  const int head = blockIdx.y, lists = problem.q.lists;
  const ListPair pair = problem.pair(blockIdx.z / lists, head, blockIdx.z % lists);
  const int first = blockIdx.x * tiles;
  const Walk walk{problem, pair, first, min((pair.q.count + kTile - 1) / kTile - first, tiles)};
  if (walk.steps <= 0) return;
  const Ring ring{shared_address(memory)};
  if (threadIdx.x < kSteps) mbarrier_init(ring.full(threadIdx.x), kWarpgroup / 32);
  if (threadIdx.x < kGroups * 4) ring.set_current(threadIdx.x, threadIdx.x / 4);
  __syncthreads();
  if (threadIdx.x >= kGroups * kWarpgroup) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kProducerRegisters));
    produce(args, walk, ring, head);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kConsumerRegisters));
    consume(args, walk, ring, head);
  }
}

// Tiles of keys that the queries of a tile can span, at most.
std::int64_t span_tiles(const ListRanges& ranges) {
  return (kTile + ranges.window - 2) / kTile + 2;
}

// Blocked windows gain nothing here: their ranges take a division each.
bool takes(const AttentionCall& call, const ListPlan& plan) {
  const auto along = [](const ListSide& side) { return side.layout == ListLayout::residues; };
  return on_hopper() && list_form(plan) == ListForm::plain && call.Dk <= 64 &&
         plan.ranges.rule == ListRule::sliding && along(plan.queries) && along(plan.keys) &&
         plan.scale > 0 && !plan.head_scale && span_tiles(plan.ranges) <= kRing &&
         call.num_items() * plan.lists <= 0xffff;
}

// Tiles of a stretch such that all multiprocessors end together; a stretch costs `extra` tiles to
// begin.
int stretch_tiles(std::int64_t lists, std::int64_t tiles, std::int64_t extra) {
  const std::int64_t places = multiprocessors();
  std::int64_t best = tiles, best_time = -1;
  for (std::int64_t parts = 1; parts <= std::max<std::int64_t>(4 * places / lists, 1); ++parts) {
    const std::int64_t each = (tiles + parts - 1) / parts;
    const std::int64_t time = (lists * parts + places - 1) / places * (each + extra);
    if (best_time >= 0 && time >= best_time) continue;
    best = each;
    best_time = time;
  }
  return static_cast<int>(best);
}

}  // namespace

template <class T>
bool list_forward_sm90a(const AttentionCall& call, const ListPlan& plan,
                        const ListForwardArgs<T>& args, cudaStream_t stream) {
  if (!takes(call, plan)) return false;
  const std::int64_t rows = (call.N + plan.lists - 1) / plan.lists;
  const std::int64_t lists = call.num_items() * plan.lists, tiles = (rows + kTile - 1) / kTile;
  const int each = stretch_tiles(lists * call.H, tiles, span_tiles(plan.ranges));
  const dim3 grid(static_cast<unsigned>((tiles + each - 1) / each), static_cast<unsigned>(call.H),
                  static_cast<unsigned>(lists));
  allow_shared_memory(list_forward_sm90a_kernel<T>, Ring::kBytes);
  list_forward_sm90a_kernel<T><<<grid, kThreads, Ring::kBytes, stream>>>(args, each);
  COTERIE_LAUNCH("list_forward_sm90a");
  return true;
}

template bool list_forward_sm90a(const AttentionCall&, const ListPlan&,
                                 const ListForwardArgs<__nv_bfloat16>&, cudaStream_t);
template bool list_forward_sm90a(const AttentionCall&, const ListPlan&,
                                 const ListForwardArgs<__half>&, cudaStream_t);

}  // namespace coterie::cuda
