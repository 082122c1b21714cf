// SPDX-License-Identifier: MIT
// Launches of the kernels of backward.h, for the files that instantiate them.
#pragma once

#include <cstdint>

#include "cuda/launch/launch.h"
#include "cuda/lists/backward_block.cuh"
#include "cuda/lists/backward_ranges.cuh"
#include "cuda/lists/backward_weights.cuh"
#include "cuda/prim/dependent.cuh"

namespace coterie::cuda {

// Kernels of the backward pass of lists (lists.h). With weights p = exp(score - lse) and g the
// output gradients times their factors,
//   dP = g vᵀ   delta = sum p dP   dS = p (dP - delta)
//   dq = scale dS k   dk = scale dSᵀ q   dv = pᵀ g
// A block owns 64 ranks of a query list or of a key list, keeps their sums in registers and walks
// the other list in tiles that start where it does. Scores are computed by both; nobody waits for
// another block.
//
// P: how products are made, WarpProducts or GroupProducts.

// delta and dq of 64 queries. Where delta is not given, dS is computed with a guess c instead and
// put right at the end:
//   e = sum p (dP - c) = delta - c   dq = scale (sum p (dP - c) k - e sum p k)
// The guess keeps what is rounded as small as dS. Without dq, delta is computed as a plain sum.
template <class P, ListForm kForm>
__global__ void __launch_bounds__(kListThreads, P::kBlocks)
    list_query_kernel(const __grid_constant__ ListBackwardArgs<typename P::T> args) {
  await_writes();  // first: sums behind this kernel read the slots of tokens early
  release_next();
  using S = ListBlockShape<P>;
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ ListBlock<typename P::T> block;
  __shared__ RankRange ranges[kListRows];
  const ListProblem& problem = args.problem;
  const int head = blockIdx.y;
  if (threadIdx.x < 32) block.set(args, args.q_tiles.find(problem.q, head, blockIdx.x), head);
  __syncthreads();
  const ListPair& pair = block.pair;
  const int first = block.first, count = min(pair.q.count - first, kListRows);
  if (count <= 0) return;
  const std::uint32_t base = shared_address(memory);
  auto* columns = reinterpret_cast<KeyColumns<P::kColumns, kForm>*>(memory + S::kColumnData);

  P::template load<kListRows>({S::owned(base, 0), S::owned(base, 1)}, block.queries, first, count,
                              pair.q.index_at(first));
  if (threadIdx.x < count) ranges[threadIdx.x] = problem.range(pair, first + threadIdx.x);
  __syncthreads();
  const int begin = ranges[0].low / P::kColumns * P::kColumns, end = ranges[count - 1].high;
  const ScoreScale scale(problem, head);
  const bool wanted = args.dq.wanted(), guess = wanted && args.delta_out;
  bool guessed[2] = {!guess, !guess};
  QueryValues query[2];
#pragma unroll
  for (int side = 0; side < 2; ++side) {
    query[side] = args.source().template load<kForm>(pair, head, first + lane_row(side));
    if (lane_row(side) < count) {
      query[side].low = ranges[lane_row(side)].low;
      query[side].high = ranges[lane_row(side)].high;
    }
  }
  // Of the rows in step.
  const RankRange top = ranges[min(unit_row<P>(), count - 1)];
  const RankRange bottom = ranges[min(unit_row<P>() + P::kUnit, count) - 1];
  float rest[2] = {0.0f, 0.0f};
  typename P::Sums dq = {}, weighted = {};
  typename P::Factor p, ds;
  int stage = 1;
#pragma unroll 1
  for (int rank = begin - P::kColumns; rank < end; rank += P::kColumns, stage = ahead(stage)) {
    if (rank >= begin) {
      P::template wait<0>();  // for the sums, which read the stage that is loaded next
      cp_async_wait<0>();
      P::publish();
      __syncthreads();
    }
    if (const int next = rank + P::kColumns; next < end) {
      P::template load<P::kColumns>(
          {S::tile(base, ahead(stage), 0), S::tile(base, ahead(stage), 1)}, block.keys, next,
          pair.k.count - next, pair.k.index_at(next));
      cp_async_commit();
      columns[ahead(stage)].load(problem, pair, head / problem.group, next);
    }
    if (rank < begin || rank >= bottom.high || rank + P::kColumns <= top.low) continue;
    const bool whole = bottom.low <= rank && top.high >= rank + P::kColumns;
    P::settle(dq);
    P::settle(weighted);
    typename P::Scores s, d;
    P::fence();
    P::start_scores(s, S::owned(base, 0), S::tile(base, stage, 0));
    P::start_scores(d, S::owned(base, 1), S::tile(base, stage, 1));
    P::template wait<1>();
    P::settle(s);
    const TileWeights<P, kForm> weights{scale, rank};
    weights.weigh_rows(s, query, columns[stage], wanted, whole);
    P::settle(s);  // not after the wait
    P::template wait<0>();
    P::settle(d);
    weights.weigh_gradients(d, query);
    if (__any_sync(~0u, !guessed[0] || !guessed[1])) {
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        float mean = 0.0f;
        const bool now = guess_delta(s, d, side, mean);
        if (!guessed[side]) query[side].delta = mean;
        guessed[side] = guessed[side] || now;
      }
    }
    weights.differentiate_rows(s, d, query, columns[stage], rest, p, ds);
    if (!wanted) continue;
    P::fence();
    P::start_sums(dq, ds, S::tile(base, stage, 0));
    if (guess) P::start_sums(weighted, p, S::tile(base, stage, 0));
  }
  P::template wait<0>();
  P::settle(dq);
  P::settle(weighted);
#pragma unroll
  for (int side = 0; side < 2; ++side) {
    rest[side] = quad_sum(rest[side]) / args.weight_scale;
    const int rank = first + lane_row(side);
    if (args.delta_out && threadIdx.x % 4 == 0 && rank < pair.q.count)
      args.delta_out[value_place(problem, pair, head, rank, args.delta_out_by_slot)] =
          query[side].delta + rest[side];
  }
  if (!wanted) return;
  if (guess) {
#pragma unroll
    for (int i = 0; i < P::kWidth / 2; ++i) dq[i] = fmaf(-rest[i / 2 % 2], weighted[i], dq[i]);
  }
  if constexpr (kForm != ListForm::plain) {
    if (args.normalise) {
      await_owned_rows();
      RowStatistics stats[2] = {query[0].stats, query[1].stats};
      stats[0].mean /= static_cast<float>(problem.width);
      stats[1].mean /= static_cast<float>(problem.width);
      float product[2];
      denormalise<P>(dq, S::owned(base, 0), stats, problem.width, product);
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const int rank = first + lane_row(side);
        if (args.dq_products && threadIdx.x % 4 == 0 && rank < pair.q.count)
          args.dq_products[value_place(problem, pair, head, rank, false)] =
              product[side] * scale.score / args.weight_scale;
      }
    }
  }
  args.dq.template store<P>(dq, scale.score / args.weight_scale, pair.q, first, pair.q_span, head,
                            problem.width);
}

// dk and dv of 64 keys, over all query heads of their key head.
template <class P, ListForm kForm>
__global__ void __launch_bounds__(kListThreads, P::kBlocks)
    list_key_kernel(const __grid_constant__ ListBackwardArgs<typename P::T> args) {
  await_writes();  // first: sums behind this kernel read the slots of tokens early
  release_next();
  using S = ListBlockShape<P>;
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ ListBlock<typename P::T> block;
  __shared__ RankRange seers;
  const ListProblem& problem = args.problem;
  const int key_head = blockIdx.y, first_head = key_head * problem.group;
  ListTile at;
  if (threadIdx.x < 32) {
    at = args.k_tiles.find(problem.k, key_head, blockIdx.x);
    block.set(args, at, first_head);
  }
  __syncthreads();
  const ListPair& pair = block.pair;
  const int first = block.first, count = min(pair.k.count - first, kListRows);
  if (count <= 0) return;
  const std::uint32_t base = shared_address(memory);
  auto* columns = reinterpret_cast<QueryColumns<P::kColumns, kForm>*>(memory + S::kColumnData);

  P::template load<kListRows>({S::owned(base, 0), S::owned(base, 1)}, block.keys, first, count,
                              pair.k.index_at(first));
  KeyValues key[2];
#pragma unroll
  for (int side = 0; side < 2; ++side)
    key[side] = load_key<kForm>(problem, pair, key_head, first + lane_row(side));
  const int unit = first + unit_row<P>();

  typename P::Sums dk = {}, dv = {};
  typename P::Factor p, ds;
#pragma unroll 1
  for (int head = first_head; head < first_head + problem.group; ++head) {
    if (head > first_head) __syncthreads();  // all are done with the head before
    if (threadIdx.x < 32) {
      if (head > first_head) block.set(args, at, head);
      __syncwarp();
      const RankRange found = queries_of(problem, pair, first, first + count);
      if (threadIdx.x == 0) seers = found;
    }
    __syncthreads();
    const ScoreScale scale(problem, head);
    const int begin = seers.low / P::kColumns * P::kColumns, end = seers.high;
    QueryValues next;
    int stage = 1;
#pragma unroll 1
    for (int rank = begin - P::kColumns; rank < end; rank += P::kColumns, stage = ahead(stage)) {
      if (rank >= begin) {
        if (threadIdx.x < P::kColumns) columns[stage].store(threadIdx.x, next, scale.gradient);
        P::template wait<0>();  // for the sums, which read the stage that is loaded next
        cp_async_wait<0>();
        P::publish();
        __syncthreads();
      }
      if (const int then = rank + P::kColumns; then < end) {
        P::template load<P::kColumns>(
            {S::tile(base, ahead(stage), 0), S::tile(base, ahead(stage), 1)}, block.queries, then,
            pair.q.count - then, pair.q.index_at(then));
        cp_async_commit();
        if (threadIdx.x < P::kColumns) {
          const int own = then + static_cast<int>(threadIdx.x);
          next = args.source().template load<kForm>(pair, head, own);
          if (own < pair.q.count) {
            const RankRange range = problem.range(pair, own);
            next.low = range.low;
            next.high = range.high;
          }
        }
      }
      if (rank < begin) continue;
      const QueryColumns<P::kColumns, kForm>& seen = columns[stage];
      const int last = min(P::kColumns, pair.q.count - rank) - 1;
      if (seen.high[last] <= unit || seen.low[0] >= unit + P::kUnit) continue;
      const bool whole =
          last + 1 == P::kColumns && seen.low[last] <= unit && seen.high[0] >= unit + P::kUnit;
      P::settle(dk);
      P::settle(dv);
      typename P::Scores s, d;
      P::fence();
      P::start_scores(s, S::owned(base, 0), S::tile(base, stage, 0));
      P::start_scores(d, S::owned(base, 1), S::tile(base, stage, 1));
      P::template wait<1>();
      P::settle(s);
      const TileWeights<P, kForm> weights{scale, first};
      weights.weigh_columns(s, key, seen, whole);
      P::settle(s);  // not after the wait
      P::template wait<0>();
      P::settle(d);
      weights.differentiate_columns(s, d, seen, p, ds);
      P::fence();
      P::start_sums(dv, p, S::tile(base, stage, 1));
      P::start_sums(dk, ds, S::tile(base, stage, 0));
    }
    P::template wait<0>();
    P::settle(dk);
    P::settle(dv);
  }
  const float factor = 1.0f / args.weight_scale;
  if constexpr (kForm != ListForm::plain) {
    if (args.normalise) {
      await_owned_rows();
      float product[2];
      denormalise<P>(dk, S::owned(base, 0), {key[0].stats, key[1].stats}, problem.width, product);
    }
  }
  args.dk.template store<P>(dk, (problem.head_scale ? 1.0f : problem.scale) * factor, pair.k, first,
                            pair.k_span, key_head, problem.width);
  args.dv.template store<P>(dv, factor, pair.k, first, pair.k_span, key_head, problem.width);
}

struct ListKernels {
  bool queries, keys;  // which of the two run
};

template <class P, ListForm kForm>
void launch_lists(const ListBackwardArgs<typename P::T>& args, const ListKernels& wanted,
                  cudaStream_t stream) {
  using S = ListBlockShape<P>;
  const ListProblem& problem = args.problem;
  const dim3 queries(static_cast<unsigned>(args.q_tiles.total),
                     static_cast<unsigned>(problem.q.heads));
  const dim3 keys(static_cast<unsigned>(args.k_tiles.total),
                  static_cast<unsigned>(problem.k.heads));
  if (wanted.queries && queries.x > 0)
    launch_early("list_query_kernel", list_query_kernel<P, kForm>, queries, kListThreads,
                 S::template kBytes<KeyColumns<P::kColumns, kForm>>, stream, args);
  if (wanted.keys && keys.x > 0)
    launch_early("list_key_kernel", list_key_kernel<P, kForm>, keys, kListThreads,
                 S::template kBytes<QueryColumns<P::kColumns, kForm>>, stream, args);
}

// 16-bit types, aligned rows, forms plain and normalised. backward_sm90a.cu
template <class T, int kWidth>
void launch_lists_sm90a(const ListBackwardArgs<T>& args, ListForm form, const ListKernels& wanted,
                        cudaStream_t stream);

// Lists that fit a block as a whole, all gradients at once: calls that launch_lists_sm90a would
// serve, of which this one is taken. Returns whether `cleared` become 0. whole_backward_sm90a.cu
template <class T>
bool takes_whole_lists(const ListBackwardArgs<T>& args);
template <class T>
bool launch_whole_lists_sm90a(const ListBackwardArgs<T>& args,
                              const std::array<TensorView, 3>& cleared, cudaStream_t stream);

// Windows along all rows of an item, all gradients at once: plain calls that launch_lists_sm90a
// would serve, of which this one is taken. window_backward_sm90a.cu
template <class T>
bool takes_windows(const ListBackwardArgs<T>& args);
template <class T>
void launch_windows_sm90a(const ListBackwardArgs<T>& args, cudaStream_t stream);

}  // namespace coterie::cuda
