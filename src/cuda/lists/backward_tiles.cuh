// SPDX-License-Identifier: MIT
// Backward pass of lists (lists.h) by tiles, for calls that the stream of steps (backward_sm90a.cu)
// does not support: fp32, filters, laplace weights, rows unaligned or wider than 64 elements.
//
// With weights p = exp(score - lse) and g the output gradients times their factors,
//   dP = g vᵀ   delta = sum p dP   dS = p (dP - delta)
//   dq = scale dS k   dk = scale dSᵀ q   dv = pᵀ g
// Laplace weights have no lse and no delta, and dS = laplace'(score) dP. With dropout (P::kDropout)
// dP and the weights in dv are multiplied by its factors.
//
// Grid (tiles of the owned side, its heads); a block of 128 threads owns 64 ranks of a query list
// or (kKeys) of a key list, keeps their sums in registers and walks over the tiles of the other
// list that they interact with; for keys, those of all query heads in turn. Both kernels compute
// the scores; no block waits for another.
//
// Shared memory: the owned rows of two tensors, two stages of two tiles of P::kColumns rows (one in
// use, one in flight), and the metadata of the rows of these tiles: 50 to 110 KB. P computes the
// products: WarpProducts (backward.cu) or GroupProducts (backward_sm90a.cu).
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/launch/launch.h"
#include "cuda/lists/backward.h"
#include "cuda/lists/rows.cuh"
#include "cuda/prim/dependent.cuh"
#include "cuda/prim/dropout.cuh"
#include "cuda/prim/load.cuh"
#include "cuda/prim/store.cuh"

namespace coterie::cuda {

// Two neighbouring elements in shared memory, the first in an even column.
template <class T>
__device__ __forceinline__ float2 load_pair(std::uint32_t address) {
  if constexpr (sizeof(T) == 4) {
    std::uint32_t low, high;
    load_shared64(low, high, address);
    return make_float2(__uint_as_float(low), __uint_as_float(high));
  } else {
    const std::uint32_t word = load_shared32(address);
    return make_float2(to_float(T{static_cast<std::uint16_t>(word)}),
                       to_float(T{static_cast<std::uint16_t>(word >> 16)}));
  }
}

constexpr int kListThreads = 128;
constexpr int kListStages = 2;

template <class P>
struct ListBlockShape {
  static constexpr int kOwnedBytes = kStreamRows * P::kRowBytes;
  static constexpr int kTileBytes = P::kColumns * P::kRowBytes;
  static constexpr int kStages = 2 * kOwnedBytes;
  static constexpr int kColumnData = kStages + 2 * kListStages * kTileBytes;
  template <class Other>
  static constexpr int kBytes = kColumnData +
                                static_cast<int>(sizeof(Other[kListStages][P::kColumns]));

  __device__ static typename P::Matrix owned(std::uint32_t base, int tensor) {
    return {base + tensor * kOwnedBytes};
  }
  __device__ static typename P::Matrix tile(std::uint32_t base, int stage, int tensor) {
    return {base + kStages + (2 * stage + tensor) * kTileBytes};
  }
};

__device__ __forceinline__ int ahead(int stage) { return 1 - stage; }

// First of the 16 or 64 owned rows that this thread's products share.
template <class P>
__device__ __forceinline__ int unit_row() {
  return static_cast<int>(threadIdx.x) / 32 * 16 / P::kUnit * P::kUnit;
}
// The upper (side 0) or lower owned row of this lane.
__device__ __forceinline__ int lane_row(int side) {
  return static_cast<int>(threadIdx.x) / 32 * 16 + 8 * side +
         static_cast<int>(threadIdx.x) % 32 / 4;
}

// The work of a block. It is in shared memory to save registers.
template <class T>
struct ListBlock {
  ListPair pair;
  int first;                 // rank of the first owned row
  Rows<const T> queries[2];  // q and output gradients, by rank where the list has no index
  Rows<const T> keys[2];     // k and v

  // Called by one thread: list `at` of a query head.
  __device__ __noinline__ void set(const ListBackwardArgs<T>& args, const ListTile& at, int head) {
    pair = args.problem.pair(at.item, head, at.list);
    first = at.first;
    const ItemSpan &q = pair.q_span, &k = pair.k_span;
    queries[0] = pair.q.rows(args.q.rows(q.batch, head, q.begin));
    queries[1] = pair.q.rows(args.g.rows(q.batch, head, q.begin));
    keys[0] = pair.k.rows(args.k.rows(k.batch, head / args.problem.group, k.begin));
    keys[1] = pair.k.rows(args.v.rows(k.batch, head / args.problem.value_group, k.begin));
  }
};

struct ListQuery {
  RankRange range;  // visible keys
  float lse;        // in base 2; +inf makes all weights 0
  float delta;
  float weight;         // of the output gradient
  RowStatistics stats;  // mean: times the width
  QueryFilter filter;
};

// Index of a query's value: by row, or by slot.
__device__ __forceinline__ std::int64_t value_place(const ListProblem& problem,
                                                    const ListPair& pair, int head, int rank,
                                                    bool by_slot) {
  if (by_slot) return pair.q.slot_of(rank);
  return ListProblem::row_base(problem.q, pair.q_span, head) + pair.q.row(rank);
}

template <class T>
__device__ __forceinline__ ListQuery load_query(const ListBackwardArgs<T>& args,
                                                const ListPair& pair, int head, int rank) {
  const ListProblem& problem = args.problem;
  ListQuery query{{0, 0}, INFINITY, 0.0f, 1.0f, kNoStatistics, QueryFilter()};
  if (rank >= pair.q.count) return query;
  const auto value = [&](const ListValues& values) {
    return values.data[value_place(problem, pair, head, rank, values.by_slot)];
  };
  query.range = problem.range(pair, rank);
  if (args.lse.data) {
    const float sum = value(args.lse);
    if (sum != -INFINITY) query.lse = sum * kLog2e - log2f(args.weight_scale);
  }
  if (args.delta.data && !problem.laplace) query.delta = value(args.delta);
  if (args.weight.data) query.weight = value(args.weight);
  if (problem.q_stats) query.stats = problem.q_stats[value_place(problem, pair, head, rank, false)];
  query.stats.mean *= static_cast<float>(problem.width);
  query.filter = QueryFilter(problem, pair, head, rank);
  return query;
}

// With dropout, a query also has its random words.
struct DroppedQuery : ListQuery {
  DropoutRow words;
};
template <class P>
using QueryOf = std::conditional_t<P::kDropout, DroppedQuery, ListQuery>;

template <class P>
__device__ __forceinline__ QueryOf<P> load_query_of(const ListBackwardArgs<typename P::T>& args,
                                                    const ListPair& pair, int item, int head,
                                                    int rank) {
  if constexpr (P::kDropout) {
    DroppedQuery query;
    static_cast<ListQuery&>(query) = load_query(args, pair, head, rank);
    if (rank < pair.q.count)
      query.words = args.problem.dropout.query(
          static_cast<std::int64_t>(item) * args.problem.q.heads + head, pair.q.row(rank));
    return query;
  } else {
    return load_query(args, pair, head, rank);
  }
}

// Turns products of owned rows and a tile into weights and their derivatives.
template <class P, bool kKeys>
struct TileWeights {
  using Query = QueryOf<P>;
  using Own = std::conditional_t<kKeys, ListKey, Query>;
  using Other = std::conditional_t<kKeys, Query, ListKey>;
  using Scores = typename P::Scores;
  const ScoreScale& scale;
  const Own (&own)[2];   // of this lane
  const Other* columns;  // of the tile

  __device__ static int column(int i) {
    return i / 4 * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + i % 2;
  }
  // Query and key of element i of a lane.
  __device__ const Query& query(int i) const {
    if constexpr (kKeys)
      return columns[column(i)];
    else
      return own[i / 2 % 2];
  }
  __device__ const ListKey& key(int i) const {
    if constexpr (kKeys)
      return own[i / 2 % 2];
    else
      return columns[column(i)];
  }
  __device__ bool laplace_weights() const { return P::kFilters && scale.laplace; }

  // Turns s into weights; with laplace into logits, -inf if hidden.
  template <bool kMasked>
  __device__ void weigh(Scores& s) const {
#pragma unroll
    for (int i = 0; i < P::kColumns / 2; ++i) {
      const ListQuery& q = query(i);
      const ListKey& k = key(i);
      const float product =
          (s[i] - q.stats.mean * k.stats.mean) * (q.stats.inverse * k.stats.inverse);
      bool seen = !kMasked || (k.rank >= q.range.low && k.rank < q.range.high);
      if constexpr (P::kFilters) seen = seen && q.filter.sees(k.row);
      if (laplace_weights())
        s[i] = seen ? product * scale.score : -INFINITY;
      else
        s[i] = seen ? exp2_approximate(fmaf(product, scale.exponent, -q.lse)) : 0.0f;
    }
  }
  // Bit i: dropout keeps the weight of element i of a lane.
  __device__ unsigned kept_bits(const Dropout& dropout) const {
    unsigned bits = 0;
    if constexpr (P::kDropout) {
#pragma unroll
      for (int i = 0; i < P::kColumns / 2; ++i)
        bits |= dropout.drops(query(i).words, key(i).row) ? 0u : 1u << i;
    }
    return bits;
  }
  // Turns d into dP, with the factors of the output gradients and of dropout, which are `keep`.
  __device__ void weigh_gradients(Scores& d, unsigned bits, float keep) const {
#pragma unroll
    for (int i = 0; i < P::kColumns / 2; ++i) {
      d[i] *= query(i).weight;
      if constexpr (P::kDropout) d[i] = bits >> i & 1 ? d[i] * keep : 0.0f;
    }
  }
  // Computes p and dS, rounded, as factors of the other side's rows. Adds dS of owned queries to
  // `sum`, or weights times dP if not `slopes`.
  __device__ void differentiate(Scores& s, Scores& d, bool slopes, unsigned bits, float keep,
                                float (&sum)[2], typename P::Factor& p,
                                typename P::Factor& ds) const {
#pragma unroll
    for (int part = 0; part < P::kColumns / 16; ++part) {
#pragma unroll
      for (int i = 8 * part; i < 8 * part + 8; ++i) {
        const Query& q = query(i);
        float slope = s[i];
        if (laplace_weights()) {
          slope = laplace_slope(s[i]);
          s[i] = laplace(s[i]);
        }
        if constexpr (kKeys) {
          s[i] *= q.weight;
          if constexpr (P::kDropout) s[i] = bits >> i & 1 ? s[i] * keep : 0.0f;
          d[i] = slope * q.stats.inverse * fmaf(d[i], scale.gradient, -q.delta);
        } else {
          d[i] = (slopes ? slope : s[i]) * (d[i] - q.delta);
          sum[i / 2 % 2] += d[i];
          s[i] *= key(i).stats.inverse;
          d[i] *= key(i).stats.inverse;
        }
      }
      P::round(p[part], s, part);
      P::round(ds[part], d, part);
    }
  }
};

// Stores owned rows of sums times a factor to rows of a tensor or to slots.
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
template <class P>
__device__ void store_sums(const typename P::Sums& sum, float factor,
                           const ListSums<typename P::T>& to, const SlotList& list, int first,
                           const ItemSpan& span, int head, int width) {
  if (!to.wanted()) return;
  if (to.rows.data || to.rounded) {
    store_sums<P>(sum, factor, to.rows_of(span, head, width), list, first, !to.rows.data);
  } else {
    const Rows<float> out{static_cast<float*>(to.slots), width, width, width % 4 == 0};
    store_sums<P>(sum, factor, out, list, first, true);
  }
}

// dk and dv of 64 keys, or dq and delta of 64 queries. If delta is not given, dS is computed with a
// guess c instead, and dq is corrected at the end:
//   e = sum p (dP - c) = delta - c   dq = scale (sum p (dP - c) k - e sum p k)
// The guess keeps the rounded values as small as dS. Without dq, delta is computed as a plain sum.
template <class P, bool kKeys>
__global__ void __launch_bounds__(kListThreads, P::kBlocks)
    list_tile_kernel(const __grid_constant__ ListBackwardArgs<typename P::T> args) {
  await_writes();  // first: sums after this kernel read the slots of tokens early
  release_next();
  using S = ListBlockShape<P>;
  using Weights = TileWeights<P, kKeys>;
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ ListBlock<typename P::T> block;
  __shared__ int item;  // with dropout
  __shared__ RankRange
      ranges[kStreamRows];  // of owned queries; keys: from the first to the last end
  const ListProblem& problem = args.problem;
  const int own_head = blockIdx.y, heads = kKeys ? problem.group : 1, first_head = own_head * heads;
  ListTile at;
  if (threadIdx.x == 0) {
    at = (kKeys ? args.k_tiles : args.q_tiles)
             .find(kKeys ? problem.k : problem.q, own_head, blockIdx.x);
    block.set(args, at, first_head);
    if constexpr (P::kDropout) item = at.item;
  }
  __syncthreads();
  const ListPair& pair = block.pair;
  const SlotList& own_list = kKeys ? pair.k : pair.q;
  const SlotList& other_list = kKeys ? pair.q : pair.k;
  const int first = block.first, count = min(own_list.count - first, kStreamRows);
  if (count <= 0) return;
  const std::uint32_t base = shared_address(memory);
  auto* columns =
      reinterpret_cast<typename Weights::Other(*)[P::kColumns]>(memory + S::kColumnData);

  P::template load<kStreamRows>({S::owned(base, 0), S::owned(base, 1)},
                                kKeys ? block.keys : block.queries, first, count,
                                own_list.index_at(first));
  if (!kKeys && threadIdx.x < count) ranges[threadIdx.x] = problem.range(pair, first + threadIdx.x);
  typename Weights::Own own[2];
#pragma unroll
  for (int side = 0; side < 2; ++side)
    if constexpr (kKeys)
      own[side] = load_key(problem, pair, own_head, first + lane_row(side));
    else
      own[side] = load_query_of<P>(args, pair, item, own_head, first + lane_row(side));
  const bool wanted = kKeys || args.dq.wanted(), guess = !kKeys && wanted && args.delta_out;
  bool guessed[2] = {!guess, !guess};
  float rest[2] = {0.0f, 0.0f};
  // dS times rows: dk or dq; weights times rows: dv, or the correction of dq.
  typename P::Sums slopes = {}, weighted = {};
  typename P::Factor p, ds;
#pragma unroll 1
  for (int head = first_head; head < first_head + heads; ++head) {
    if (head > first_head) __syncthreads();  // all are done with the previous head
    if (kKeys && threadIdx.x == 0) {
      if (head > first_head) block.set(args, at, head);
      const RankRange seers = problem.queries_of(pair, first, first + count);
      ranges[0].low = seers.low;
      ranges[count - 1].high = seers.high;
    }
    __syncthreads();
    const ScoreScale scale(problem, head);
    const int begin = ranges[0].low / P::kColumns * P::kColumns, end = ranges[count - 1].high;
    typename Weights::Other next;
    int stage = 1;
#pragma unroll 1
    for (int rank = begin - P::kColumns; rank < end; rank += P::kColumns, stage = ahead(stage)) {
      if (rank >= begin) {
        if (threadIdx.x < P::kColumns) columns[stage][threadIdx.x] = next;
        P::template wait<0>();  // for the sums that read the stage loaded next
        cp_async_wait<0>();
        P::publish();
        __syncthreads();
      }
      if (const int then = rank + P::kColumns; then < end) {
        P::template load<P::kColumns>(
            {S::tile(base, ahead(stage), 0), S::tile(base, ahead(stage), 1)},
            kKeys ? block.queries : block.keys, then, other_list.count - then,
            other_list.index_at(then));
        cp_async_commit();
        if (threadIdx.x < P::kColumns) {
          if constexpr (kKeys) {
            next = load_query_of<P>(args, pair, item, head, then + static_cast<int>(threadIdx.x));
            next.delta *= scale.gradient;
          } else {
            next =
                load_key(problem, pair, head / problem.group, then + static_cast<int>(threadIdx.x));
          }
          next.stats.inverse = inverse_factor<F16>(next.stats.inverse);
        }
      }
      if (rank < begin) continue;
      // Ranges of the first and last query of the unit or of the tile, and the keys.
      RankRange top, bottom;
      if constexpr (kKeys) {
        top = columns[stage][0].range;
        bottom = columns[stage][min(P::kColumns, pair.q.count - rank) - 1].range;
      } else {
        top = ranges[min(unit_row<P>(), count - 1)];
        bottom = ranges[min(unit_row<P>() + P::kUnit, count) - 1];
      }
      const int from = kKeys ? first + unit_row<P>() : rank;
      const int to = from + (kKeys ? P::kUnit : P::kColumns);
      if (bottom.high <= from || top.low >= to) continue;
      P::settle(slopes);
      P::settle(weighted);
      typename P::Scores s, d;
      P::fence();
      P::start_scores(s, S::owned(base, 0), S::tile(base, stage, 0));
      P::start_scores(d, S::owned(base, 1), S::tile(base, stage, 1));
      P::template wait<1>();
      P::settle(s);
      const Weights weights{scale, own, columns[stage]};
      if (!P::kFilters && bottom.low <= from && top.high >= to)  // every query sees every key
        weights.template weigh<false>(s);
      else
        weights.template weigh<true>(s);
      P::settle(s);  // not after the wait
      P::template wait<0>();
      P::settle(d);
      const unsigned bits = weights.kept_bits(problem.dropout);
      const auto keep = static_cast<float>(problem.dropout.keep_scale);
      weights.weigh_gradients(d, bits, keep);
      if constexpr (!kKeys) {
        if (__any_sync(~0u, !guessed[0] || !guessed[1])) {
#pragma unroll
          for (int side = 0; side < 2; ++side) {
            float mean = 0.0f;
            const bool now = guess_delta(s, d, side, mean);
            if (!guessed[side]) own[side].delta = mean;
            guessed[side] = guessed[side] || now;
          }
        }
      }
      weights.differentiate(s, d, wanted, bits, keep, rest, p, ds);
      if (!wanted) continue;
      P::fence();
      P::start_sums(slopes, ds, S::tile(base, stage, 0));
      if (kKeys || guess) P::start_sums(weighted, p, S::tile(base, stage, kKeys ? 1 : 0));
    }
    P::template wait<0>();
    P::settle(slopes);
    P::settle(weighted);
  }
  const float unscaled = 1.0f / args.weight_scale, score = problem.score_scale(first_head);
  if constexpr (!kKeys) {
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      rest[side] = quad_sum(rest[side]) * unscaled;
      const int rank = first + lane_row(side);
      if (args.delta_out && threadIdx.x % 4 == 0 && rank < pair.q.count)
        args.delta_out[value_place(problem, pair, own_head, rank, args.delta_out_by_slot)] =
            own[side].delta + rest[side];
    }
    if (!wanted) return;
    if (guess) {
#pragma unroll
      for (int i = 0; i < P::kWidth / 2; ++i)
        slopes[i] = fmaf(-rest[i / 2 % 2], weighted[i], slopes[i]);
    }
  }
  if (args.normalise) {
    // If no tile was visited, the copies of owned rows have not been committed yet.
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    RowStatistics stats[2] = {own[0].stats, own[1].stats};
    if (!kKeys) {
      stats[0].mean /= static_cast<float>(problem.width);
      stats[1].mean /= static_cast<float>(problem.width);
    }
    const auto pair_of = [&](int side) {
      return
          [&base, side](int column) { return P::pair(S::owned(base, 0), lane_row(side), column); };
    };
    const float product[2] = {denormalise<0>(slopes, stats[0], problem.width, pair_of(0)),
                              denormalise<1>(slopes, stats[1], problem.width, pair_of(1))};
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const int rank = first + lane_row(side);
      if (!kKeys && args.dq_products && threadIdx.x % 4 == 0 && rank < pair.q.count)
        args.dq_products[value_place(problem, pair, own_head, rank, false)] =
            product[side] * score * unscaled;
    }
  }
  if constexpr (kKeys) {
    // Per-head scales are already in dS.
    store_sums<P>(slopes, (problem.head_scale ? 1.0f : problem.scale) * unscaled, args.dk, pair.k,
                  first, pair.k_span, own_head, problem.width);
    store_sums<P>(weighted, unscaled, args.dv, pair.k, first, pair.k_span, own_head, problem.width);
  } else {
    store_sums<P>(slopes, score * unscaled, args.dq, pair.q, first, pair.q_span, own_head,
                  problem.width);
  }
}

template <class P, bool kKeys>
void launch_tiles(const ListBackwardArgs<typename P::T>& args, cudaStream_t stream) {
  const SlotSide& side = kKeys ? args.problem.k : args.problem.q;
  const dim3 grid(static_cast<unsigned>((kKeys ? args.k_tiles : args.q_tiles).total),
                  static_cast<unsigned>(side.heads));
  if (grid.x == 0) return;
  using Other = typename TileWeights<P, kKeys>::Other;
  launch_early("list_tile_kernel", list_tile_kernel<P, kKeys>, grid, kListThreads,
               ListBlockShape<P>::template kBytes<Other>, stream, args);
}
template <class P>
void launch_tiles(const ListBackwardArgs<typename P::T>& args, bool keys, cudaStream_t stream) {
  keys ? launch_tiles<P, true>(args, stream) : launch_tiles<P, false>(args, stream);
}

}  // namespace coterie::cuda
