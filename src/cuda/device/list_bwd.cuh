// SPDX-License-Identifier: MIT
// Kernels of the backward pass of lists (lists.h). With weights p = exp(score - lse) and g the
// output gradients times their factors,
//   dP = g vᵀ   delta = sum p dP   dS = p (dP - delta)
//   dq = scale dS k   dk = scale dSᵀ q   dv = pᵀ g
// A block owns 64 ranks of a query list or of a key list, keeps their sums in registers and walks
// the other list in tiles that start where it does. Scores are computed by both; nobody waits for
// another block.
//
// P: how products are made, WarpProducts or GroupProducts.
#pragma once

#include <cstdint>

#include "cuda/device/await.cuh"
#include "cuda/device/list_bwd_weights.cuh"
#include "cuda/device/store.cuh"

namespace coterie::cuda {

constexpr int kListRows = 64, kListRowBits = 6;  // that a block owns
constexpr int kListThreads = 128;

// Owned rows of two tensors, two stages of two tiles of the other side, and what is known of its
// rows.
template <class P>
struct ListBlockShape {
  static constexpr int kOwnedBytes = kListRows * P::kRowBytes;
  static constexpr int kTileBytes = P::kColumns * P::kRowBytes;
  static constexpr int kStages = 2 * kOwnedBytes;
  static constexpr int kColumnData = kStages + 4 * kTileBytes;
  template <class Columns>
  static constexpr int kBytes = kColumnData + 2 * static_cast<int>(sizeof(Columns));

  __device__ static typename P::Matrix owned(std::uint32_t base, int tensor) {
    return {base + tensor * kOwnedBytes};
  }
  __device__ static typename P::Matrix tile(std::uint32_t base, int number, int tensor) {
    return {base + kStages + (number % 2 * 2 + tensor) * kTileBytes};
  }
};

// First of the 16 or 64 owned rows that this thread's products have in common.
template <class P>
__device__ __forceinline__ int unit_row() {
  return static_cast<int>(threadIdx.x) / 32 * 16 / P::kUnit * P::kUnit;
}
// The owned row that this lane holds above (side 0) or below.
__device__ __forceinline__ int lane_row(int side) {
  return static_cast<int>(threadIdx.x) / 32 * 16 + 8 * side +
         static_cast<int>(threadIdx.x) % 32 / 4;
}

// Owned rows of sums times a factor, to rows of a tensor or to slots.
template <class P, class Out>
__device__ __forceinline__ void store_sums(const typename P::Sums& sum, float factor,
                                           const Rows<Out>& rows, const SlotList& list, int first,
                                           bool by_slot) {
#pragma unroll
  for (int part = 0; part < P::kWidth / 32; ++part) {
    Accumulator two[2];
#pragma unroll
    for (int i = 0; i < 16; ++i) two[i / 8][i / 4 % 2][i % 4] = sum[16 * part + i] * factor;
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const int rank = first + lane_row(side);
      const bool there = rank < list.count;
      const std::int64_t row = !there ? 0 : by_slot ? list.slot_of(rank) : list.row(rank);
      store_columns(rows, row, there, 32 * part, two, side);
    }
  }
}

// Where gradients of a side go: rows of a tensor, slots, or nowhere.
template <class T>
struct ListSums {
  Tensor4<T> rows;
  float* slots;

  __host__ __device__ bool wanted() const { return rows.data || slots; }
  template <class P>
  __device__ void store(const typename P::Sums& sum, float factor, const SlotList& list, int first,
                        const ItemSpan& span, int head, int width) const {
    if (rows.data) {
      store_sums<P>(sum, factor, rows.rows(span.batch, head, span.begin), list, first, false);
    } else if (slots) {
      const Rows<float> out{slots, width, width, width % 4 == 0};
      store_sums<P>(sum, factor, out, list, first, true);
    }
  }
};

template <class T>
struct ListBackwardArgs {
  ListProblem problem;
  ListTiles q_tiles, k_tiles;
  Tensor4<const T> q, k, v, g;
  ListValues weight, lse, delta;
  float* delta_out;  // computed here where delta is not given
  bool delta_out_by_slot;
  ListSums<T> dq, dk, dv;
  float weight_scale;  // fp16 weights are kept in range by a power of two; 1 for other types

  __device__ QuerySource source() const { return {problem, weight, lse, delta, weight_scale}; }
};

// delta and dq of 64 queries. Where delta is to be computed, the keys are walked twice.
template <class P, ListForm kForm>
__global__ void __launch_bounds__(kListThreads, P::kBlocksOne)
    list_query_kernel(const __grid_constant__ ListBackwardArgs<typename P::T> args) {
  await_previous();
  using S = ListBlockShape<P>;
  extern __shared__ __align__(1024) unsigned char memory[];
  const ListProblem& problem = args.problem;
  const int head = blockIdx.y, key_head = head / problem.group;
  const ListTile at = args.q_tiles.find(problem.q, head, blockIdx.x);
  const ListPair pair = problem.pair(at.item, head, at.list);
  const int first = at.first, count = min(pair.q.count - first, kListRows);
  if (count <= 0) return;
  const std::uint32_t base = shared_address(memory);
  auto* columns = reinterpret_cast<KeyColumns<P::kColumns, kForm>*>(memory + S::kColumnData);

  const RankRange top = problem.range(pair, first), bottom = problem.range(pair, first + count - 1);
  const int begin = top.low / P::kColumns * P::kColumns;
  const int tiles = (max(bottom.high - begin, 0) + P::kColumns - 1) / P::kColumns;
  const int sums = args.delta_out ? tiles : 0;  // tiles of the first walk
  const int total = sums + (args.dq.wanted() ? tiles : 0);
  const int unit = first + unit_row<P>(), unit_end = min(unit + P::kUnit, first + count);
  const RankRange unit_top = problem.range(pair, min(unit, first + count - 1));
  const RankRange unit_bottom = problem.range(pair, max(unit_end - 1, first));

  const auto fetch = [&](int number) {
    const int rank = begin + number % tiles * P::kColumns, left = pair.k.count - rank;
    const auto k = pair.k.rows(args.k.rows(pair.k_span.batch, key_head, pair.k_span.begin));
    const auto v =
        pair.k.rows(args.v.rows(pair.k_span.batch, head / problem.value_group, pair.k_span.begin));
    P::template load<P::kColumns, kListThreads>(S::tile(base, number, 0), k, rank, left,
                                                pair.k.index_at(rank));
    P::template load<P::kColumns, kListThreads>(S::tile(base, number, 1), v, rank, left,
                                                pair.k.index_at(rank));
    cp_async_commit();
    columns[number % 2].load(problem, pair, key_head, rank);
  };
  const auto q = pair.q.rows(args.q.rows(pair.q_span.batch, head, pair.q_span.begin));
  const auto g = pair.q.rows(args.g.rows(pair.q_span.batch, head, pair.q_span.begin));
  P::template load<kListRows, kListThreads>(S::owned(base, 0), q, first, count,
                                            pair.q.index_at(first));
  P::template load<kListRows, kListThreads>(S::owned(base, 1), g, first, count,
                                            pair.q.index_at(first));
  if (total > 0) fetch(0);

  const ScoreScale scale(problem, head);
  QueryValues query[2];
#pragma unroll
  for (int side = 0; side < 2; ++side)
    query[side] = args.source().template load<kForm>(pair, head, first + lane_row(side));
  float delta[2] = {0.0f, 0.0f};
  typename P::Sums dq = {};
#pragma unroll 1
  for (int number = 0; number < total; ++number) {
    if (number == sums && args.delta_out) {
#pragma unroll
      for (int side = 0; side < 2; ++side) query[side].delta = quad_sum(delta[side]);
    }
    cp_async_wait<0>();
    P::publish();
    __syncthreads();
    if (number + 1 < total) fetch(number + 1);
    const int rank = begin + number % tiles * P::kColumns;
    // No row of the unit sees a key of the tile, or all see all.
    if (unit >= unit_end || rank >= unit_bottom.high || rank + P::kColumns <= unit_top.low)
      continue;
    const bool whole = unit_bottom.low <= rank && unit_top.high >= rank + P::kColumns;
    typename P::Scores s, d;
    P::fence();
    P::start_scores(s, S::owned(base, 0), S::tile(base, number, 0));
    P::start_scores(d, S::owned(base, 1), S::tile(base, number, 1));
    P::template wait<0>();
    P::settle(s);
    P::settle(d);
    const TileWeights<P, kForm> weights{scale, rank};
    if (number < sums) {
      weights.add_deltas(s, d, query, columns[number % 2], whole, delta);
      continue;
    }
    weights.differentiate_rows(s, d, query, columns[number % 2], whole);
    typename P::Factor ds;
    P::round(ds, d);
    P::settle(dq);
    P::fence();
    P::start_sums(dq, ds, S::tile(base, number, 0));
    P::template wait<0>();
    P::settle(dq);
  }
  if (args.delta_out) {
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const int rank = first + lane_row(side);
      const float sum = quad_sum(delta[side]);
      if (threadIdx.x % 4 == 0 && rank < pair.q.count)
        args.delta_out[value_place(problem, pair, head, rank, args.delta_out_by_slot)] =
            sum / args.weight_scale;
    }
  }
  args.dq.template store<P>(dq, scale.score / args.weight_scale, pair.q, first, pair.q_span, head,
                            problem.width);
}

// dk and dv of 64 keys, over all query heads of their key head.
template <class P, ListForm kForm>
__global__ void __launch_bounds__(kListThreads, P::kBlocksTwo)
    list_key_kernel(const __grid_constant__ ListBackwardArgs<typename P::T> args) {
  await_previous();
  using S = ListBlockShape<P>;
  extern __shared__ __align__(1024) unsigned char memory[];
  const ListProblem& problem = args.problem;
  const int key_head = blockIdx.y, first_head = key_head * problem.group;
  const int value_head = first_head / problem.value_group;
  const ListTile at = args.k_tiles.find(problem.k, key_head, blockIdx.x);
  ListPair pair = problem.pair(at.item, first_head, at.list);
  const int first = at.first, count = min(pair.k.count - first, kListRows);
  if (count <= 0) return;
  const std::uint32_t base = shared_address(memory);
  auto* columns = reinterpret_cast<QueryColumns<P::kColumns, kForm>*>(memory + S::kColumnData);

  const auto k = pair.k.rows(args.k.rows(pair.k_span.batch, key_head, pair.k_span.begin));
  const auto v = pair.k.rows(args.v.rows(pair.k_span.batch, value_head, pair.k_span.begin));
  P::template load<kListRows, kListThreads>(S::owned(base, 0), k, first, count,
                                            pair.k.index_at(first));
  P::template load<kListRows, kListThreads>(S::owned(base, 1), v, first, count,
                                            pair.k.index_at(first));
  KeyValues key[2];
#pragma unroll
  for (int side = 0; side < 2; ++side)
    key[side] = load_key<kForm>(problem, pair, key_head, first + lane_row(side));
  const int unit = first + unit_row<P>();

  typename P::Sums dk = {}, dv = {};
#pragma unroll 1
  for (int head = first_head; head < first_head + problem.group; ++head) {
    if (head > first_head) pair = problem.pair(at.item, head, at.list);
    const RankRange seers = queries_of(problem, pair, first, first + count);
    const int begin = seers.low / P::kColumns * P::kColumns;
    const int total = (max(seers.high - begin, 0) + P::kColumns - 1) / P::kColumns;
    if (total == 0) continue;
    const ScoreScale scale(problem, head);
    QueryValues next;
    const auto fetch = [&](int number) {
      const int rank = begin + number * P::kColumns, left = pair.q.count - rank;
      const auto q = pair.q.rows(args.q.rows(pair.q_span.batch, head, pair.q_span.begin));
      const auto g = pair.q.rows(args.g.rows(pair.q_span.batch, head, pair.q_span.begin));
      P::template load<P::kColumns, kListThreads>(S::tile(base, number, 0), q, rank, left,
                                                  pair.q.index_at(rank));
      P::template load<P::kColumns, kListThreads>(S::tile(base, number, 1), g, rank, left,
                                                  pair.q.index_at(rank));
      cp_async_commit();
      if (threadIdx.x < P::kColumns)
        next = args.source().template load<kForm>(pair, head, rank + static_cast<int>(threadIdx.x));
    };
    __syncthreads();  // all are done with the head before
    fetch(0);
#pragma unroll 1
    for (int number = 0; number < total; ++number) {
      if (threadIdx.x < P::kColumns) columns[number % 2].store(threadIdx.x, next, scale.gradient);
      cp_async_wait<0>();
      P::publish();
      __syncthreads();
      if (number + 1 < total) fetch(number + 1);
      const int rank = begin + number * P::kColumns;
      const QueryColumns<P::kColumns, kForm>& seen = columns[number % 2];
      const int last = min(P::kColumns, pair.q.count - rank) - 1;
      if (seen.high[last] <= unit || seen.low[0] >= unit + P::kUnit) continue;
      const bool whole =
          last + 1 == P::kColumns && seen.low[last] <= unit && seen.high[0] >= unit + P::kUnit;
      typename P::Scores s, d;
      P::fence();
      P::start_scores(s, S::owned(base, 0), S::tile(base, number, 0));
      P::start_scores(d, S::owned(base, 1), S::tile(base, number, 1));
      P::template wait<0>();
      P::settle(s);
      P::settle(d);
      TileWeights<P, kForm>{scale, first}.differentiate_columns(s, d, key, seen, whole);
      typename P::Factor p, ds;
      P::round(p, s);
      P::round(ds, d);
      P::settle(dk);
      P::settle(dv);
      P::fence();
      P::start_sums(dv, p, S::tile(base, number, 1));
      P::start_sums(dk, ds, S::tile(base, number, 0));
      P::template wait<0>();
      P::settle(dk);
      P::settle(dv);
    }
  }
  const float factor = 1.0f / args.weight_scale;
  args.dk.template store<P>(dk, (problem.head_scale ? 1.0f : problem.scale) * factor, pair.k, first,
                            pair.k_span, key_head, problem.width);
  args.dv.template store<P>(dv, factor, pair.k, first, pair.k_span, key_head, problem.width);
}

}  // namespace coterie::cuda
