// SPDX-License-Identifier: MIT
// Backward pass of full attention and of windows (lists.h): dq, dk and dv in one kernel of five
// products, where backward_sm90a.cu has two kernels of eight.
//   P = exp(S - lse), dS = P (G Vᵀ - delta)      dv += Pᵀ G, dk += dSᵀ Q, dq += dS K
// delta = G . out comes from the rounded output.
//
// Grid: a block for every 128 keys of an item and key head, which walks the queries that see them
// from the last to the first, 128 at a time (64 if rows have more than 64 elements). Parts of dq
// are added in global memory in the order of the keys: a block adds to a tile when the block with
// the keys before has, so sums have one order. Blocks take their keys by a ticket, so that those
// they wait for have started.
//
// 384 threads: two warpgroups of 232 registers compute, each with 64 of the keys, whose dk and dv
// stay in registers, and with half of dq; two warps load, two add dq. Shared memory, 195 KB: keys
// and values, two tiles of queries and gradients, two of dS, one of dq.
//
// Preconditions (plan.cu): all rows of an item, each query with all keys from some position to
// another, aligned 16-bit rows of up to 128 elements, gradients by row. Registers are at their
// limit: check ptxas' output for spills and C7512 (serialised products) after every change.
#include <algorithm>
#include <cstdint>

#include "cuda/launch/dispatch.h"
#include "cuda/launch/launch.h"
#include "cuda/lists/backward.h"
#include "cuda/lists/stream.cuh"
#include "cuda/prim/bands.cuh"
#include "cuda/prim/dependent.cuh"
#include "cuda/prim/row_chunk.cuh"
#include "cuda/prim/store.cuh"
#include "cuda/prim/warp.cuh"

namespace coterie::cuda {
namespace {

constexpr int kPart = kWarpgroup * 32;  // elements of dq that a warpgroup computes
constexpr int kPlaces = 2;
constexpr int kLoadThreads = 64;

template <class T, int kDim>
struct FullShape {
  static constexpr int kKeys = 1 << kFullKeyBits, kQueries = 1 << full_query_bits(kDim);
  static constexpr int kThreads = 3 * kWarpgroup;
  using Keys = Bands<T, kDim, kKeys>;
  using Queries = Bands<T, kDim, kQueries>;
  using Slopes = Bands<T, kQueries, kKeys>;  // dS, a row for each key
  static constexpr int kQueriesAt = 2 * Keys::kBytes;
  static constexpr int kSlopesAt = kQueriesAt + kPlaces * 2 * Queries::kBytes;
  static constexpr int kSumsAt = kSlopesAt + kPlaces * Slopes::kBytes;
  static constexpr int kFactsAt = kSumsAt + 2 * kPart * 4;
  static constexpr int kBarriersAt = kFactsAt + kPlaces * 2 * kQueries * 4;
  static constexpr int kBytes = kBarriersAt + (2 * kPlaces + 6) * 8;
  static_assert(kBytes <= 227 * 1024, "more than the shared memory of a block");
  unsigned char* memory;
  std::uint32_t base;

  __device__ explicit FullShape(unsigned char* at) : memory(at), base(shared_address(at)) {}

  __device__ Keys keys() const { return {base}; }
  __device__ Keys values() const { return {base + Keys::kBytes}; }
  __device__ Queries queries(int place, int tensor) const {
    return {base + kQueriesAt + (2 * place + tensor) * Queries::kBytes};
  }
  __device__ Slopes slopes(int place) const { return {base + kSlopesAt + place * Slopes::kBytes}; }
  __device__ std::uint32_t sums(int group) const { return base + kSumsAt + group * kPart * 4; }
  // Shifts of logits in base 2, and delta.
  __device__ float* facts(int place, int which) const {
    return reinterpret_cast<float*>(memory + kFactsAt) + (2 * place + which) * kQueries;
  }
  __device__ std::uint32_t barrier(int number) const { return base + kBarriersAt + number * 8; }
  __device__ std::uint32_t full(int place) const { return barrier(place); }
  __device__ std::uint32_t empty(int place) const { return barrier(kPlaces + place); }
  __device__ std::uint32_t keys_full() const { return barrier(2 * kPlaces); }
  __device__ std::uint32_t sums_full(int group) const { return barrier(2 * kPlaces + 1 + group); }
  __device__ std::uint32_t sums_empty(int group) const { return barrier(2 * kPlaces + 3 + group); }
  // Both computing warpgroups: dS is there.
  __device__ PartBarrier<2 * kWarpgroup> slopes_there() const {
    return {1, barrier(2 * kPlaces + 5)};
  }

  __device__ void init() const {
    if (threadIdx.x != 0) return;
    constexpr int kFilled = kLoadThreads / 32 * (32 + kWarpArrivals);
    for (int place = 0; place < kPlaces; ++place) {
      mbarrier_init(full(place), kFilled);
      mbarrier_init(empty(place), 8 * kWarpArrivals);
    }
    mbarrier_init(keys_full(), kFilled);
    for (int group = 0; group < 2; ++group) {
      mbarrier_init(sums_full(group), 4 * kWarpArrivals);
      mbarrier_init(sums_empty(group), 1);
    }
    slopes_there().init();
  }
};

// Query i of an item sees the keys [i + from, i + to] of it.
struct FullSight {
  int from, to;

  FullSight() = default;
  __device__ FullSight(const ListProblem& problem, const ItemSpan& q, const ItemSpan& k) {
    constexpr int kFar = 1 << 29;
    const int shift = problem.offset_rows ? k.length - q.length : 0, window = problem.window;
    const bool sliding = problem.rule == ListRule::sliding;
    from = !sliding ? -kFar : shift - (problem.causal ? window - 1 : window / 2);
    to = problem.rule == ListRule::all ? kFar
         : sliding && !problem.causal  ? shift + (window + 1) / 2 - 1
                                       : shift;
  }
};

// The keys of a block, and the tiles of queries that see some of them: last .. low, for each query
// head of the key head.
struct FullWork {
  int head;  // of the keys
  int first, block;
  int low, last;
  int origin;  // number of the item's first tile of queries
  FullSight sight;
  ItemSpan q, k;
};

// The first block of keys that a tile of queries sees.
template <int kQueries>
__device__ __forceinline__ int first_block(const FullSight& sight, int tile) {
  return max(tile * kQueries + sight.from, 0) >> kFullKeyBits;
}

// Tiles of an item are numbered consecutively, from this number on.
__device__ __forceinline__ int first_number(const ListTiles& tiles, const SlotSide& side,
                                            int item) {
  return tiles.per_list > 0 ? item * tiles.per_list : tiles.first_tile(side, item);
}

template <class T, int kDim>
__device__ FullWork find_work(const FullBackwardArgs<T>& args, int ticket) {
  using Shape = FullShape<T, kDim>;
  const ListProblem& problem = args.lists.problem;
  const ListTiles& tiles = args.lists.k_tiles;
  FullWork work;
  work.head = ticket % problem.k.heads;
  int number = ticket / problem.k.heads;
  if (tiles.per_list > 0)  // the first keys of all items, then the next
    number = number % problem.k.items * tiles.per_list + number / problem.k.items;
  const ListTile tile = tiles.find(problem.k, work.head, number);
  work.first = tile.first;
  work.block = tile.first >> kFullKeyBits;
  work.q = problem.q.spans.span(tile.item);
  work.k = problem.k.spans.span(tile.item);
  work.sight = FullSight(problem, work.q, work.k);
  const int end = min(work.first + Shape::kKeys, work.k.length) - work.sight.from;
  work.low = max(work.first - work.sight.to, 0) / Shape::kQueries;
  work.last = (max(min(work.q.length, end), 0) + Shape::kQueries - 1) / Shape::kQueries - 1;
  work.origin = first_number(args.lists.q_tiles, problem.q, tile.item);
  return work;
}

// Walks the tiles of a block: body(query head, tile, step).
template <class Body>
__device__ __forceinline__ void for_steps(const FullWork& work, int group, const Body& body) {
  int step = 0;
#pragma unroll 1
  for (int member = 0; member < group; ++member)
#pragma unroll 1
    for (int tile = work.last; tile >= work.low; --tile, ++step)
      body(work.head * group + member, tile, step);
}

template <class T, int kDim>
__device__ void load_work(const FullBackwardArgs<T>& args, const FullShape<T, kDim>& shape,
                          const FullWork& work) {
  using Shape = FullShape<T, kDim>;
  const ListBackwardArgs<T>& lists = args.lists;
  const int rows = work.k.length - work.first;
  shape.keys().template load<Shape::kKeys, kLoadThreads>(
      0, lists.k.rows(work.k.batch, work.head, work.k.begin), work.first, rows);
  shape.values().template load<Shape::kKeys, kLoadThreads>(
      0, lists.v.rows(work.k.batch, work.head, work.k.begin), work.first, rows);
  arrive_filled(shape.keys_full());
  for_steps(work, lists.problem.group, [&](int head, int tile, int step) {
    const int place = step % kPlaces, first = tile * Shape::kQueries;
    const int left = work.q.length - first;
    mbarrier_wait(shape.empty(place), step / kPlaces % 2 ^ 1);
    shape.queries(place, 0).template load<Shape::kQueries, kLoadThreads>(
        0, lists.q.rows(work.q.batch, head, work.q.begin), first, left);
    shape.queries(place, 1).template load<Shape::kQueries, kLoadThreads>(
        0, lists.g.rows(work.q.batch, head, work.q.begin), first, left);
    const std::int64_t line = ListProblem::row_base(lists.problem.q, work.q, head) + first;
#pragma unroll
    for (int i = 0; i < Shape::kQueries; i += kLoadThreads) {
      const int row = i + static_cast<int>(threadIdx.x) % kLoadThreads;
      const bool there = row < left;
      const std::int64_t at = line + (there ? row : 0);
      cp_async_value(shape.facts(place, 0) + row, args.scratch.shifts + at, there);
      cp_async_value(shape.facts(place, 1) + row, args.scratch.deltas + at, there);
    }
    arrive_filled(shape.full(place));
  });
  asm volatile("cp.async.wait_all;" ::: "memory");  // copies must finish before their threads exit
}

// Adds a warpgroup's parts of dq, each when the block with the keys before has added its own. By
// one thread.
template <class T, int kDim>
__device__ void add_sums(const FullBackwardArgs<T>& args, const FullShape<T, kDim>& shape,
                         const FullWork& work, int group) {
  for_steps(work, args.lists.problem.group, [&](int head, int tile, int step) {
    const std::int64_t part =
        (static_cast<std::int64_t>(head) * args.lists.q_tiles.total + work.origin + tile) * 2 +
        group;
    float* to = args.scratch.sums + part * kPart;
    std::int32_t* turn = args.scratch.turns + part;
    mbarrier_wait(shape.sums_full(group), step % 2);
    if (work.block == first_block<FullShape<T, kDim>::kQueries>(work.sight, tile)) {
      asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
                   "r"(shape.sums(group)), "r"(kPart * 4)
                   : "memory");
    } else {
      std::int32_t before;
      do {
        asm volatile("ld.acquire.gpu.s32 %0, [%1];" : "=r"(before) : "l"(turn) : "memory");
      } while (before != work.block);
      asm volatile("fence.proxy.async;" ::: "memory");
      asm volatile(
          "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
          "r"(shape.sums(group)), "r"(kPart * 4)
          : "memory");
    }
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    mbarrier_arrive(shape.sums_empty(group));
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    asm volatile("fence.proxy.async;" ::: "memory");
    asm volatile("st.release.gpu.s32 [%0], %1;" ::"l"(turn), "r"(work.block + 1) : "memory");
  });
}

template <class T, int kDim>
struct FullGroup {
  using Shape = FullShape<T, kDim>;
  static constexpr int kQueries = Shape::kQueries, kBands = kDim / 64;
  const FullBackwardArgs<T>& args;
  const Shape& shape;
  const FullWork& work;
  int group;
  float dk[kBands][32], dv[kBands][32];

  // d = this warpgroup's rows of a times the rows of b, transposed.
  __device__ void start(float (&d)[kQueries / 2], const typename Shape::Keys& a,
                        const typename Shape::Queries& b) const {
#pragma unroll
    for (int depth = 0; depth < kDim / 16; ++depth)
      wgmma_step<T, 0>(depth, d, a.by_columns(64 * group, depth), b.by_columns(0, depth));
  }

  // Turns scores into weights. Element 4 j + 2 side + c is query 8 j + 2 (l%4) + c; a lane's two
  // keys are visible from the queries low[side] to low[side] + count.
  template <bool kMasked>
  __device__ static void weigh(float (&s)[kQueries / 2], const float* shifts, float exponent,
                               const int (&low)[2], int count) {
    const int own = static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
    for (int j = 0; j < kQueries / 8; ++j) {
      const float2 shift = *reinterpret_cast<const float2*>(shifts + 8 * j + own);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& x = s[4 * j + i];
        x = exp2_approximate(fmaf(x, exponent, i % 2 ? -shift.y : -shift.x));
        const auto after = static_cast<unsigned>(8 * j + own + i % 2 - low[i / 2]);
        if (kMasked && after > static_cast<unsigned>(count)) x = 0.0f;
      }
    }
  }

  __device__ void step(int head, int tile, int number) {
    const int place = number % kPlaces;
    const typename Shape::Queries queries = shape.queries(place, 0),
                                  grads = shape.queries(place, 1);
    float s[kQueries / 2], d[kQueries / 2];
    mbarrier_wait(shape.full(place), number / kPlaces % 2);
    fence_async_proxy();
    wgmma_fence();
    start(s, shape.keys(), queries);
    wgmma_commit();
    start(d, shape.values(), grads);
    wgmma_commit();
    const float exponent = args.lists.problem.score_scale(head) * kLog2e;
    const int first = tile * kQueries, seen = first + work.sight.to;
    const int count = work.sight.to - work.sight.from;
    int low[2];
    const bool whole = work.first + Shape::kKeys <= min(work.k.length, seen + 1) &&
                       work.first >= first + kQueries - 1 + work.sight.from;
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const int key = work.first + 64 * group + group_row(side);
      low[side] = key < work.k.length ? key - seen : kQueries;
    }
    wgmma_wait<1>();
    wgmma_settle(s);
    if (whole)
      weigh<false>(s, shape.facts(place, 0), exponent, low, count);
    else
      weigh<true>(s, shape.facts(place, 0), exponent, low, count);
    wgmma_wait<0>();
    wgmma_settle(d);
    std::uint32_t p[kQueries / 16][4], ds[kQueries / 16][4];
    const float* deltas = shape.facts(place, 1);
    const int thread = static_cast<int>(threadIdx.x), own = thread % 4 * 2, lane = thread % 32;
#pragma unroll
    for (int j = 0; j < kQueries / 8; ++j) {
      const float2 delta = *reinterpret_cast<const float2*>(deltas + 8 * j + own);
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const int i = 4 * j + 2 * side;
        p[j / 2][j % 2 * 2 + side] = pack2<T>(s[i], s[i + 1]);
        ds[j / 2][j % 2 * 2 + side] =
            pack2<T>(s[i] * (d[i] - delta.x), s[i + 1] * (d[i + 1] - delta.y));
      }
    }
    const typename Shape::Slopes slopes = shape.slopes(place);
    const int row = 64 * group + thread % kWarpgroup / 32 * 16 + lane % 16;
    const std::uint32_t at = slopes.base + row * 128 + ((lane / 16 ^ lane % 8) << 4);
#pragma unroll
    for (int i = 0; i < kQueries / 16; ++i)
      stmatrix_x4((at ^ i % 4 * 32) + i / 4 * Shape::Slopes::kBandBytes, ds[i]);
    fence_async_proxy();
    wgmma_fence();
    start_sums(dv, p, grads);
    start_sums(dk, ds, queries);
    wgmma_commit();
    shape.slopes_there().sync();
    float dq[32];
    const int query_band = kBands == 1 ? group : 0, band = kBands == 1 ? 0 : group;
    wgmma_fence();
    wgmma<T, 0, 1, 1>(dq, slopes.by_rows(0, query_band), shape.keys().by_rows(0, band));
#pragma unroll
    for (int k = 1; k < Shape::kKeys / 16; ++k)
      wgmma<T, 1, 1, 1>(dq, slopes.by_rows(16 * k, query_band), shape.keys().by_rows(16 * k, band));
    wgmma_commit();
    wgmma_wait<1>();
    mbarrier_arrive_warp(shape.empty(place));
    mbarrier_wait(shape.sums_empty(group), number % 2 ^ 1);
    wgmma_wait<0>();
    wgmma_settle(dq);
#pragma unroll
    for (int i = 0; i < 8; ++i)
      store_shared16(shape.sums(group) + (i * kWarpgroup + thread % kWarpgroup) * 16,
                     make_uint4(__float_as_uint(dq[4 * i]), __float_as_uint(dq[4 * i + 1]),
                                __float_as_uint(dq[4 * i + 2]), __float_as_uint(dq[4 * i + 3])));
    fence_async_proxy();
    mbarrier_arrive_warp(shape.sums_full(group));
  }

  // Writes the gradients of 64 keys.
  __device__ void store(const Tensor4<T>& tensor, float (&sum)[kBands][32], float factor) const {
    const int first = work.first + 64 * group;
    const Rows<T> rows = tensor.rows(work.k.batch, work.head, work.k.begin);
#pragma unroll
    for (int band = 0; band < kBands; ++band) {
#pragma unroll
      for (int i = 0; i < 32; ++i) sum[band][i] *= factor;
      store_band(rows, sum[band], first, work.k.length - first, 64 * band);
    }
  }

  __device__ void compute() {
#pragma unroll
    for (int i = 0; i < 32 * kBands; ++i) dk[i / 32][i % 32] = dv[i / 32][i % 32] = 0.0f;
    mbarrier_wait(shape.keys_full(), 0);
    for_steps(work, args.lists.problem.group,
              [&](int head, int tile, int number) { step(head, tile, number); });
    wgmma_wait<0>();
#pragma unroll
    for (int band = 0; band < kBands; ++band) {
      wgmma_settle(dk[band]);
      wgmma_settle(dv[band]);
    }
    const float scale = args.lists.problem.score_scale(work.head * args.lists.problem.group);
    store(args.lists.dk.rows, dk, scale / args.lists.weight_scale);
    store(args.lists.dv.rows, dv, 1.0f / args.lists.weight_scale);
  }
};

template <class T, int kDim>
__global__ void __launch_bounds__(FullShape<T, kDim>::kThreads, 1)
    full_kernel(const __grid_constant__ FullBackwardArgs<T> args) {
  await_previous();
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ FullWork work;  // not in registers, of which there are none to spare
  const FullShape<T, kDim> shape(memory);
  shape.init();
  if (threadIdx.x == 0) work = find_work<T, kDim>(args, atomicAdd(args.scratch.ticket, 1));
  __syncthreads();
  if (work.first >= work.k.length) return;
  if (threadIdx.x >= 2 * kWarpgroup) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(40));
    const int warp = static_cast<int>(threadIdx.x) / 32 - 8;
    if (warp < kLoadThreads / 32)
      load_work(args, shape, work);
    else if (threadIdx.x % 32 == 0)
      add_sums(args, shape, work, warp - kLoadThreads / 32);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(232));
    FullGroup<T, kDim> group{args, shape, work,
                             uniform(static_cast<int>(threadIdx.x) / kWarpgroup)};
    group.compute();
  }
}

// Shifts and delta of all rows, eight lanes a row; no part of dq has been added.
constexpr int kPrepareThreads = 256, kRowLanes = 8;
template <class T>
__global__ void __launch_bounds__(kPrepareThreads)
    prepare_kernel(const __grid_constant__ FullBackwardArgs<T> args, std::int64_t rows,
                   std::int64_t parts) {
  await_previous();
  const std::int64_t thread = static_cast<std::int64_t>(blockIdx.x) * kPrepareThreads + threadIdx.x;
  const std::int64_t line = thread / kRowLanes;
  for (std::int64_t i = thread; i < parts;
       i += static_cast<std::int64_t>(gridDim.x) * kPrepareThreads)
    args.scratch.turns[i] = 0;
  if (thread == 0) *args.scratch.ticket = 0;
  const SlotSide& side = args.lists.problem.q;
  const bool there = line < rows;
  const std::int64_t number = there ? line : 0, plane = number / side.spans.rows;
  const int row = static_cast<int>(number % side.spans.rows);
  const int batch = static_cast<int>(plane / side.heads),
            head = static_cast<int>(plane % side.heads);
  const Rows<const T> g = args.lists.g.rows(batch, head, row),
                      out = args.out.rows(batch, head, row);
  float sum = 0.0f;
  for (int column = static_cast<int>(thread % kRowLanes) * 8; column < g.width;
       column += kRowLanes * 8) {
    float a[8] = {}, b[8] = {};
    add_chunk<T>(a, *reinterpret_cast<const uint4*>(g.data + column));
    add_chunk<T>(b, *reinterpret_cast<const uint4*>(out.data + column));
#pragma unroll
    for (int i = 0; i < 8; ++i) sum = fmaf(a[i], b[i], sum);
  }
#pragma unroll
  for (int step = kRowLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (!there || thread % kRowLanes != 0) return;
  const float lse = args.lists.lse.data[line];
  args.scratch.deltas[line] = sum;
  // A query without keys has weights of 0.
  args.scratch.shifts[line] =
      lse == -INFINITY ? INFINITY : fmaf(lse, kLog2e, -log2f(args.lists.weight_scale));
}

// Writes dq from its sums: a block for each part.
template <class T, int kDim>
__global__ void __launch_bounds__(kWarpgroup)
    finish_kernel(const __grid_constant__ FullBackwardArgs<T> args) {
  await_previous();
  constexpr int kQueries = FullShape<T, kDim>::kQueries;
  const ListProblem& problem = args.lists.problem;
  const int number = static_cast<int>(blockIdx.x) / 2, half = static_cast<int>(blockIdx.x) % 2,
            head = static_cast<int>(blockIdx.y);
  const ListTile tile = args.lists.q_tiles.find(problem.q, head, number);
  const ItemSpan q = problem.q.spans.span(tile.item), k = problem.k.spans.span(tile.item);
  const int first = tile.first + (kDim == 64 ? 64 * half : 0);
  if (first >= q.length) return;
  // No key has added to a tile that sees none.
  const FullSight sight(problem, q, k);
  const bool seen =
      k.length > 0 && tile.first + sight.from < k.length && tile.first + kQueries + sight.to > 0;
  const auto* from = reinterpret_cast<const float4*>(
      args.scratch.sums +
      ((static_cast<std::int64_t>(head) * args.lists.q_tiles.total + number) * 2 + half) * kPart);
  const float factor = problem.score_scale(head) / args.lists.weight_scale;
  float sum[32];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float4 four = seen ? from[i * kWarpgroup + threadIdx.x] : make_float4(0, 0, 0, 0);
    sum[4 * i] = four.x * factor;
    sum[4 * i + 1] = four.y * factor;
    sum[4 * i + 2] = four.z * factor;
    sum[4 * i + 3] = four.w * factor;
  }
  store_band(args.lists.dq.rows.rows(q.batch, head, q.begin), sum, first, q.length - first,
             kDim == 64 ? 0 : 64 * half);
}

}  // namespace

template <class T>
void launch_full_sm90a(const FullBackwardArgs<T>& args, cudaStream_t stream) {
  const ListProblem& problem = args.lists.problem;
  const SlotSide& q = problem.q;
  const std::int64_t batches = q.spans.cu_seqlens ? 1 : q.items;
  const std::int64_t rows = batches * q.heads * q.spans.rows;
  const int tiles = args.lists.q_tiles.total, blocks = args.lists.k_tiles.total * problem.k.heads;
  const std::int64_t parts = static_cast<std::int64_t>(tiles) * q.heads * 2;
  constexpr int kRowsOfBlock = kPrepareThreads / kRowLanes;
  launch_early("full_prepare", prepare_kernel<T>,
               dim3(static_cast<unsigned>((rows + kRowsOfBlock - 1) / kRowsOfBlock)),
               kPrepareThreads, 0, stream, args, rows, parts);
  const int width = std::max(args.lists.q.width, args.lists.g.width);
  dispatch_head_dim("full", width, [&](auto dim) {
    constexpr int kDim = decltype(dim)::value;
    using Shape = FullShape<T, kDim>;
    if (blocks > 0)
      launch_early("full_gradient", full_kernel<T, kDim>, dim3(static_cast<unsigned>(blocks)),
                   Shape::kThreads, Shape::kBytes, stream, args);
    launch_early("full_finish", finish_kernel<T, kDim>,
                 dim3(static_cast<unsigned>(2 * tiles), static_cast<unsigned>(q.heads)), kWarpgroup,
                 0, stream, args);
  });
}

template void launch_full_sm90a(const FullBackwardArgs<Bf16>&, cudaStream_t);
template void launch_full_sm90a(const FullBackwardArgs<F16>&, cudaStream_t);

}  // namespace coterie::cuda
