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
#include "cuda/device/load.cuh"
#include "cuda/device/store.cuh"

namespace coterie::cuda {

constexpr int kListRows = 64, kListRowBits = 6;  // that a block owns
constexpr int kListThreads = 128;
constexpr int kListStages = 2;  // of tiles: one in use, one on its way

// Owned rows of two tensors, two stages of two tiles of the other side, and what is known of its
// rows.
template <class P>
struct ListBlockShape {
  static constexpr int kOwnedBytes = kListRows * P::kRowBytes;
  static constexpr int kTileBytes = P::kColumns * P::kRowBytes;
  static constexpr int kStages = 2 * kOwnedBytes;
  static constexpr int kColumnData = kStages + 2 * kListStages * kTileBytes;
  template <class Columns>
  static constexpr int kBytes = kColumnData + static_cast<int>(sizeof(Columns[kListStages]));

  __device__ static typename P::Matrix owned(std::uint32_t base, int tensor) {
    return {base + tensor * kOwnedBytes};
  }
  __device__ static typename P::Matrix tile(std::uint32_t base, int stage, int tensor) {
    return {base + kStages + (2 * stage + tensor) * kTileBytes};
  }
};

__device__ __forceinline__ int ahead(int stage) { return 1 - stage; }

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
  std::int64_t row[2];
  bool there[2];
#pragma unroll
  for (int side = 0; side < 2; ++side) {
    const int rank = first + lane_row(side);
    there[side] = rank < list.count;
    row[side] = !there[side] ? 0 : by_slot ? list.slot_of(rank) : list.row(rank);
  }
#pragma unroll
  for (int part = 0; part < P::kWidth / 32; ++part) {
    Accumulator two[2];
#pragma unroll
    for (int i = 0; i < 16; ++i) two[i / 8][i / 4 % 2][i % 4] = sum[16 * part + i] * factor;
#pragma unroll
    for (int side = 0; side < 2; ++side)
      store_columns(rows, row[side], there[side], 32 * part, two, side);
  }
}

// Where nothing was walked over, nobody has committed the copies of owned rows or waited for them.
__device__ __forceinline__ void await_owned_rows() {
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
}

// From the gradient g of a normalised row y to that of the row x it was made of, for owned rows
// that are still in shared memory: inverse (g - mean g - y mean(g y)). Leaves g . y in `product`.
template <class P>
__device__ __forceinline__ void denormalise(typename P::Sums& sum, const typename P::Matrix& rows,
                                            const RowStatistics (&stats)[2], int width,
                                            float (&product)[2]) {
  float mean[2] = {0.0f, 0.0f};
  product[0] = product[1] = 0.0f;
  const auto normalised = [&](int i) {
    const int column = i / 4 * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + i % 2, side = i / 2 % 2;
    if (column >= width) return 0.0f;
    return (P::element(rows, lane_row(side), column) - stats[side].mean) * stats[side].inverse;
  };
#pragma unroll
  for (int i = 0; i < P::kWidth / 2; ++i) {
    mean[i / 2 % 2] += sum[i];
    product[i / 2 % 2] = fmaf(sum[i], normalised(i), product[i / 2 % 2]);
  }
#pragma unroll
  for (int side = 0; side < 2; ++side) {
    mean[side] = quad_sum(mean[side]) / static_cast<float>(width);
    product[side] = quad_sum(product[side]);
  }
#pragma unroll
  for (int i = 0; i < P::kWidth / 2; ++i) {
    const int side = i / 2 % 2;
    sum[i] = (sum[i] - mean[side] - normalised(i) * product[side] / static_cast<float>(width)) *
             stats[side].inverse;
  }
}

// Where gradients of a side go: rows of a tensor, slots, or nowhere.
template <class T>
struct ListSums {
  Tensor4<T> rows;
  void* slots;
  bool rounded;  // slots are of T, else floats

  __host__ __device__ bool wanted() const { return rows.data || slots; }
  // Of T: where rows or slots are counted from.
  __device__ Rows<T> rows_of(const ItemSpan& span, int head, int width) const {
    if (rows.data) return rows.rows(span.batch, head, span.begin);
    return {static_cast<T*>(slots), width, width, width * sizeof(T) % 16 == 0};
  }
  template <class P>
  __device__ void store(const typename P::Sums& sum, float factor, const SlotList& list, int first,
                        const ItemSpan& span, int head, int width) const {
    if (!wanted()) return;
    if (rows.data || rounded) {
      store_sums<P>(sum, factor, rows_of(span, head, width), list, first, !rows.data);
    } else {
      const Rows<float> out{static_cast<float*>(slots), width, width, width % 4 == 0};
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
  bool normalise;      // dq and dk are those of the rows before their normalisation
  float* dq_products;  // then optional, by query row: dq . normalised row
  float weight_scale;  // fp16 weights are kept in range by a power of two; 1 for other types

  __device__ QuerySource source() const { return {problem, weight, lse, delta, weight_scale}; }
};

// What a block works on. It stands in shared memory, for want of registers beside the sums.
template <class T>
struct ListBlock {
  ListPair pair;
  int first;                 // rank of the first owned row
  Rows<const T> queries[2];  // q and output gradients, by rank where the list has no index
  Rows<const T> keys[2];     // k and v

  // By one warp: list `list` of an item and query head.
  __device__ void set(const ListBackwardArgs<T>& args, const ListTile& at, int head) {
    const ListPair found = args.problem.pair(at.item, head, at.list);
    if (threadIdx.x % 32 != 0) return;
    const int key_head = head / args.problem.group, value_head = head / args.problem.value_group;
    pair = found;
    first = at.first;
    queries[0] = found.q.rows(args.q.rows(found.q_span.batch, head, found.q_span.begin));
    queries[1] = found.q.rows(args.g.rows(found.q_span.batch, head, found.q_span.begin));
    keys[0] = found.k.rows(args.k.rows(found.k_span.batch, key_head, found.k_span.begin));
    keys[1] = found.k.rows(args.v.rows(found.k_span.batch, value_head, found.k_span.begin));
  }
};

// delta and dq of 64 queries. Where delta is not given, dS is computed with a guess c instead and
// put right at the end:
//   e = sum p (dP - c) = delta - c   dq = scale (sum p (dP - c) k - e sum p k)
// The guess keeps what is rounded as small as dS. Without dq, delta is computed as a plain sum.
template <class P, ListForm kForm>
__global__ void __launch_bounds__(kListThreads, P::kBlocks)
    list_query_kernel(const __grid_constant__ ListBackwardArgs<typename P::T> args) {
  await_previous();
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
  await_previous();
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

}  // namespace coterie::cuda
