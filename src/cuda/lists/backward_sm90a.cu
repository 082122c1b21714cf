// SPDX-License-Identifier: MIT
// Backward pass of attention of lists over lists (backward.cu) by warpgroup products. Rows
// of up to 64 elements are streamed through shared memory by warps of their own
// (backward_group.cuh); wider ones take the kernels of backward.h.
#include "cuda/lists/backward.h"
#include "cuda/lists/backward_group.cuh"
#include "cuda/lists/backward_products.cuh"
#include "cuda/prim/bands.cuh"

namespace coterie::cuda {
namespace {

// dk and dv of keys in the backward pass of lists on Hopper: a warpgroup owns 64 keys.

// What all weights of a head have in common.
struct KeyWeights {
  float exponent, gradient, scale_bits;
  int window;  // ListRule::ends: of every query; else 0
};

// A lane's two owned keys.
template <ListForm kForm>
struct OwnedKeys {
  int rank;                   // of the upper one; the other's is 8 more
  int first;                  // of the warp's sixteen
  float inverse[2], mean[2];  // the mean times the width and the inverse

  __device__ OwnedKeys(const KeyRecord& record, int first_rank, int width)
      : rank(first_rank + group_row(0)),
        first(first_rank + static_cast<int>(threadIdx.x) % kWarpgroup / 32 * 16) {
    if constexpr (kForm != ListForm::plain) {
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const RowStatistics stats = record.stats[group_row(side)];
        inverse[side] = stats.inverse;
        mean[side] = stats.mean * stats.inverse * static_cast<float>(width);
      }
    }
  }

  // Scores of 16 queries become weights.
  template <bool kMasked>
  __device__ void weigh16(float (&s)[32], int block, const QueryRecord<kForm>& queries,
                          const KeyWeights& how) const {
#pragma unroll
    for (int j = 2 * block; j < 2 * block + 2; ++j) {
      const float2 lse = column_pair<float2>(queries.lse, j);
      float4 query;  // means and inverses
      if constexpr (kForm != ListForm::plain) query = column_pair<float4>(queries.stats, j);
      int4 range;
      if constexpr (kMasked) range = column_pair<int4>(queries.range, j);
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float shift = fmaf(c ? lse.y : lse.x, kLog2e, -how.scale_bits);
        float factor = how.exponent;
        if constexpr (kForm != ListForm::plain) factor *= c ? query.w : query.y;
        int last;  // that the query sees, and how many
        unsigned span;
        if constexpr (kMasked) {
          last = (c ? range.w : range.y) - 1 - rank;
          span = how.window > 0 ? how.window : (c ? range.w - range.z : range.y - range.x);
        }
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          float& x = s[4 * j + 2 * side + c];
          if constexpr (kForm != ListForm::plain)
            x = fmaf(x, inverse[side], -mean[side] * (c ? query.z : query.x));
          x = exp2_approximate(fmaf(x, factor, -shift));
          if (kMasked && static_cast<unsigned>(last - 8 * side) >= span) x = 0.0f;
        }
      }
    }
  }
  __device__ void weigh(float (&s)[32], const QueryRecord<kForm>& queries,
                        const ListProblem& problem, const KeyWeights& how) const {
    const auto range = [&](int row) { return range_of(queries.range[row], problem, kAnyKeys); };
    if (range(kStreamRows - 1).low <= first && range(0).high >= first + 16) {
#pragma unroll
      for (int block = 0; block < 4; ++block) weigh16<false>(s, block, queries, how);
      return;
    }
    // 16 queries that see none of the warp's keys cost nothing.
#pragma unroll
    for (int block = 0; block < 4; ++block) {
      if (range(16 * block + 15).high > first && range(16 * block).low < first + 16) {
        weigh16<true>(s, block, queries, how);
      } else {
#pragma unroll
        for (int i = 8 * block; i < 8 * block + 8; ++i) s[i] = 0.0f;
      }
    }
  }

  // d becomes the factor of the queries' rows, s that of the output gradients; both rounded to T.
  template <class T>
  __device__ void differentiate(float (&s)[32], float (&d)[32], const QueryRecord<kForm>& queries,
                                const KeyWeights& how) const {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 delta = column_pair<float2>(queries.delta, j);
      float2 weight;
      float4 query;
      if constexpr (kForm != ListForm::plain) {
        weight = column_pair<float2>(queries.weight, j);
        query = column_pair<float4>(queries.stats, j);
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int i = 4 * j + e;
        const float own = e % 2 ? delta.y : delta.x;
        if constexpr (kForm == ListForm::plain) {
          d[i] = s[i] * (d[i] - own);
        } else {
          const float factor = e % 2 ? weight.y : weight.x;
          const float inverse = inverse_factor<T>(e % 2 ? query.w : query.y);
          d[i] = s[i] * (inverse * how.gradient) * fmaf(d[i], factor, -own);
          s[i] *= factor;
        }
      }
    }
  }
};

// The keys of a block's steps, over all query heads of their key head.
template <class T, ListForm kForm>
__device__ void key_steps(const ListBackwardArgs<T>& args,
                          const StreamBackwardShape<kForm, true>& shape, const StreamPlan& plan) {
  using Shape = StreamBackwardShape<kForm, true>;
  const ListProblem& problem = args.problem;
  const float scale_bits = log2f(args.weight_scale);
  const int slot_step = problem.k.index ? 1 : problem.k.lists;
  TileWalk<Shape> walk(shape);
#pragma unroll 1
  for (int number = uniform(static_cast<int>(threadIdx.x) / kWarpgroup); number < plan.steps;
       number += Shape::kGroups) {
    const StreamStep& step = shape.plan()[number];
    const int after = number + Shape::kGroups;
    const int keep = uniform(after < plan.steps ? shape.plan()[after].ring : plan.tiles);
    walk.release_below(uniform(step.ring));
    shape.wait_own(number);
    const OwnedKeys<kForm> key(shape.owned(number), step.first, problem.width);
    // Owned rows are done with when they are in registers, unless they are needed behind.
    const bool early = kForm == ListForm::plain || !args.normalise;
    const OwnedFactors<T> factors(shape.own(number, 0), shape.own(number, 1));
    if (early) shape.release_own(number);
    float dk[32], dv[32];
#pragma unroll
    for (int i = 0; i < 32; ++i) dk[i] = dv[i] = 0.0f;
#pragma unroll 1
    for (int turn = 0; turn < problem.group; ++turn) {
      const int begin = uniform(step.ring + turn * step.span), end = begin + uniform(step.tiles);
      const ScoreScale scale(problem, step.head * problem.group + turn);
      const KeyWeights how{scale.exponent, scale.gradient, scale_bits,
                           problem.rule == ListRule::ends ? problem.window : 0};
      if (turn > 0) walk.release_below(begin);
      if (begin == end) continue;
      float s[32], d[32];
      int place = begin % Shape::kRing, tile = begin;
      walk.await(begin, end);
      const auto scores = [&](int k, int at) {
        factors.start(k, s, d, shape.tile_at(at, 0), shape.tile_at(at, 1));
      };
      const auto sums = [&](int k, const auto& p, const auto& ds, int at) {
        start_sum<T>(k, dv, p, shape.tile_at(at, 1));
        start_sum<T>(k, dk, ds, shape.tile_at(at, 0));
      };
      factors.multiply(s, d, shape.tile_at(place, 0), shape.tile_at(place, 1));
#pragma unroll 1
      while (true) {
        const QueryRecord<kForm>& queries = shape.streamed(place);
        key.weigh(s, queries, problem, how);
        key.template differentiate<T>(s, d, queries, how);
        std::uint32_t p[4][4], ds[4][4];
        pack_factor<T>(p, s);
        pack_factor<T>(ds, d);
        // The sums of this tile and the scores of the next begin and end together: the assembler
        // does them one by one otherwise.
        const bool more = tile + 1 < end;
        const int next = Shape::ring_place(place + 1);
        if (more) {
          walk.await(tile + 1, end);
          wgmma_fence();
          for_depths([&](int k) {
            sums(k, p, ds, place);
            scores(k, next);
          });
          wgmma_commit();
        } else {
          wgmma_fence();
          for_depths([&](int k) { sums(k, p, ds, place); });
          wgmma_commit();
        }
        wgmma_wait<0>();
        wgmma_settle(s);
        wgmma_settle(d);
        wgmma_settle(dk);
        wgmma_settle(dv);
        if (tile < keep) walk.release_below(tile + 1);
        if (!more) break;
        ++tile;
        place = next;
      }
    }
    factors.keep(dk[0]);
    const float factor = 1.0f / args.weight_scale;
    const int* rows = shape.owned_rows(number);
    for_sides<kForm>([&](int side) {
      const int own = group_row(side);
      if constexpr (kForm != ListForm::plain)
        if (args.normalise)
          denormalise<0>(dk, Tile<T, 64>{shape.own(number, 0)}, own, shape.owned(number).stats[own],
                         problem.width);
      store_owned(dk, (problem.head_scale ? 1.0f : problem.scale) * factor, args.dk, step, own,
                  rows, slot_step, problem.width);
      store_owned(dv, factor, args.dv, step, own, rows, slot_step, problem.width);
      next_side(dk);
      next_side(dv);
    });
    if (!early) shape.release_own(number);
  }
  walk.release_below(plan.tiles);
}

// delta and dq of queries in the backward pass of lists on Hopper: a warpgroup owns 64 queries.

// A lane's two owned queries, and what all of the warp's sixteen see.
template <ListForm kForm>
struct OwnedQueries {
  int low[2], span[2];     // of the ranks in sight
  RankRange seen, shared;  // by any, and by all of the warp
  float shift[2];          // of logits in base 2
  float factor[2];         // of scores
  float delta[2], weight[2], mean[2];

  __device__ OwnedQueries(const QueryRecord<kForm>& record, int keys, const ListProblem& problem,
                          float exponent, float scale_bits) {
    int high[2];
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const int row = group_row(side);
      const RankRange range = range_of(record.range[row], problem, keys);
      low[side] = range.low;
      high[side] = range.high;
      span[side] = range.high - range.low;
      shift[side] = fmaf(record.lse[row], kLog2e, -scale_bits);
      if (record.lse[row] == -INFINITY) shift[side] = INFINITY;
      delta[side] = record.delta[row];
      factor[side] = exponent;
      if constexpr (kForm != ListForm::plain) {
        weight[side] = record.weight[row];
        mean[side] = record.stats[row].mean * static_cast<float>(problem.width);
        factor[side] *= record.stats[row].inverse;
      }
    }
    seen = {__shfl_sync(~0u, low[0], 0), __shfl_sync(~0u, high[1], 31)};
    shared = {__shfl_sync(~0u, low[1], 31), __shfl_sync(~0u, high[0], 0)};
  }

  // Scores of 16 keys become weights; `first` is the rank of the tile's first key.
  template <bool kMasked>
  __device__ void weigh16(float (&s)[32], int block, const KeyRecord& keys, int first) const {
    const int column = first + static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
    for (int j = 2 * block; j < 2 * block + 2; ++j) {
      float4 key;  // means and inverses
      if constexpr (kForm != ListForm::plain) {
        key = column_pair<float4>(keys.stats, j);
        key.x *= -key.y;
        key.z *= -key.w;
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int side = e / 2;
        float& x = s[4 * j + e];
        if constexpr (kForm != ListForm::plain)
          x = fmaf(x, e % 2 ? key.w : key.y, mean[side] * (e % 2 ? key.z : key.x));
        x = exp2_approximate(fmaf(x, factor[side], -shift[side]));
        if (kMasked && static_cast<unsigned>(column - low[side] + 8 * j + e % 2) >=
                           static_cast<unsigned>(span[side]))
          x = 0.0f;
      }
    }
  }
  __device__ void weigh(float (&s)[32], const KeyRecord& keys, int first) const {
    if (shared.low <= first && shared.high >= first + kStreamRows) {
#pragma unroll
      for (int block = 0; block < 4; ++block) weigh16<false>(s, block, keys, first);
      return;
    }
    // 16 keys that none of the warp's queries sees cost nothing.
#pragma unroll
    for (int block = 0; block < 4; ++block) {
      if (first + 16 * block + 16 > seen.low && first + 16 * block < seen.high) {
        weigh16<true>(s, block, keys, first);
      } else {
#pragma unroll
        for (int i = 8 * block; i < 8 * block + 8; ++i) s[i] = 0.0f;
      }
    }
  }

  // d becomes dS, which is added up by row; both are then factors of the keys' rows, rounded to T.
  template <class T>
  __device__ void differentiate(float (&s)[32], float (&d)[32], const KeyRecord& keys,
                                float (&sum)[4]) const {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      float4 key;
      if constexpr (kForm != ListForm::plain) key = column_pair<float4>(keys.stats, j);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int i = 4 * j + e, side = e / 2;
        d[i] = s[i] * (kForm == ListForm::plain ? d[i] - delta[side]
                                                : fmaf(d[i], weight[side], -delta[side]));
        sum[e] += d[i];
        if constexpr (kForm != ListForm::plain) {
          s[i] *= inverse_factor<T>(e % 2 ? key.w : key.y);
          d[i] *= inverse_factor<T>(e % 2 ? key.w : key.y);
        }
      }
    }
  }

  // A first guess of delta, for rows that have none yet and see a key of this tile: the mean of dP
  // over its keys, by their weights.
  __device__ void guess(const float (&s)[32], const float (&d)[32], bool (&open)[2]) {
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      float sum = 0.0f, weights = 0.0f;
#pragma unroll
      for (int i = 0; i < 32; ++i)
        if (i / 2 % 2 == side) {
          sum = fmaf(s[i], d[i], sum);
          weights += s[i];
        }
      sum = quad_sum(sum);
      weights = quad_sum(weights);
      if (!open[side] || !(weights > 0.0f)) continue;
      delta[side] = __fdividef(sum, weights);
      if constexpr (kForm != ListForm::plain) delta[side] *= weight[side];
      open[side] = false;
    }
  }
};

// The queries of a block's steps; see list_query_kernel for the guess of delta.
template <class T, ListForm kForm>
__device__ void query_steps(const ListBackwardArgs<T>& args,
                            const StreamBackwardShape<kForm, false>& shape,
                            const StreamPlan& plan) {
  using Shape = StreamBackwardShape<kForm, false>;
  const ListProblem& problem = args.problem;
  const bool wanted = args.dq.wanted(), guess = wanted && args.delta_out;
  const float scale_bits = log2f(args.weight_scale), unscaled = 1.0f / args.weight_scale;
  const int slot_step = problem.q.index ? 1 : problem.q.lists;
  TileWalk<Shape> walk(shape);
#pragma unroll 1
  for (int number = uniform(static_cast<int>(threadIdx.x) / kWarpgroup); number < plan.steps;
       number += Shape::kGroups) {
    const StreamStep& step = shape.plan()[number];
    const int after = number + Shape::kGroups, begin = uniform(step.ring);
    const int end = begin + uniform(step.tiles);
    const int keep = uniform(after < plan.steps ? shape.plan()[after].ring : plan.tiles);
    walk.release_below(begin);
    shape.wait_own(number);
    const auto& record = shape.owned(number);
    const ScoreScale scale(problem, step.head);
    OwnedQueries<kForm> query(record, step.count, problem, scale.exponent, scale_bits);
    // Rows without a guess of delta.
    bool open[2] = {guess && group_row(0) < step.rows, guess && group_row(1) < step.rows};
    float rests[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    float dq[32], weighted[32];
#pragma unroll
    for (int i = 0; i < 32; ++i) dq[i] = weighted[i] = 0.0f;
    // Owned rows are done with when they are in registers, unless they are needed behind.
    const bool early = kForm == ListForm::plain || !args.normalise;
    const OwnedFactors<T> factors(shape.own(number, 0), shape.own(number, 1));
    if (early) shape.release_own(number);
    if (begin < end) {
      float s[32], d[32];
      int place = begin % Shape::kRing, rank = step.low, tile = begin;
      walk.await(begin, end);
      const auto scores = [&](int k, int at) {
        factors.start(k, s, d, shape.tile_at(at, 0), shape.tile_at(at, 1));
      };
      factors.multiply(s, d, shape.tile_at(place, 0), shape.tile_at(place, 1));
#pragma unroll 1
      while (true) {
        const KeyRecord& keys = shape.streamed(place);
        query.weigh(s, keys, rank);
        if (__any_sync(~0u, open[0] || open[1])) query.guess(s, d, open);
        query.template differentiate<T>(s, d, keys, rests);
        std::uint32_t p[4][4], ds[4][4];
        pack_factor<T>(ds, d);
        pack_factor<T>(p, s);
        // The sums of this tile and the scores of the next begin and end together: the assembler
        // does them one by one otherwise.
        const bool more = tile + 1 < end;
        const int next = Shape::ring_place(place + 1);
        if (more) walk.await(tile + 1, end);
        const auto finish = [&] {
          wgmma_commit();
          wgmma_wait<0>();
          wgmma_settle(s);
          wgmma_settle(d);
          wgmma_settle(dq);
          wgmma_settle(weighted);
        };
        const std::uint32_t rows = shape.tile_at(place, 0);
        wgmma_fence();
        if (guess && more) {
          for_depths([&](int k) {
            start_sum<T>(k, dq, ds, rows);
            start_sum<T>(k, weighted, p, rows);
            scores(k, next);
          });
          finish();
        } else if (guess) {
          for_depths([&](int k) {
            start_sum<T>(k, dq, ds, rows);
            start_sum<T>(k, weighted, p, rows);
          });
          finish();
        } else if (wanted && more) {
          for_depths([&](int k) {
            start_sum<T>(k, dq, ds, rows);
            scores(k, next);
          });
          finish();
        } else if (wanted) {
          for_depths([&](int k) { start_sum<T>(k, dq, ds, rows); });
          finish();
        } else if (more) {
          for_depths([&](int k) { scores(k, next); });
          finish();
        }
        if (tile < keep) walk.release_below(tile + 1);
        if (!more) break;
        ++tile;
        place = next;
        rank += kStreamRows;
      }
    }
    factors.keep(rests[0]);
    const std::int64_t row_base =
        ListProblem::row_base(problem.q, {step.batch, step.own_begin, 0}, step.head);
    const int* rows = shape.owned_rows(number);
    const float factor = scale.score * unscaled;
    for_sides<kForm>([&](int side) {
      const int own = group_row(side);
      const bool writes = threadIdx.x % 4 == 0 && own < step.rows;
      const float rest = quad_sum(side == 0 ? rests[0] + rests[1] : rests[2] + rests[3]) * unscaled;
      if (args.delta_out && writes)
        args.delta_out[args.delta_out_by_slot
                           ? step.own_slot + static_cast<std::int64_t>(own) * slot_step
                           : row_base + rows[own]] =
            (side == 0 ? query.delta[0] : query.delta[1]) + rest;
      if (!wanted) return;
      if (guess) {
#pragma unroll
        for (int i = 0; i < 32; i += i % 4 == 0 ? 1 : 3) dq[i] = fmaf(-rest, weighted[i], dq[i]);
        next_side(weighted);
      }
      if constexpr (kForm != ListForm::plain) {
        if (args.normalise) {
          const float product = denormalise<0>(dq, Tile<T, 64>{shape.own(number, 0)}, own,
                                               record.stats[own], problem.width);
          if (args.dq_products && writes) args.dq_products[row_base + rows[own]] = product * factor;
        }
      }
      store_owned(dq, factor, args.dq, step, own, rows, slot_step, problem.width);
      next_side(dq);
    });
    if (!early) shape.release_own(number);
  }
  walk.release_below(plan.tiles);
}

// Products of the backward pass of lists (backward.h) by warpgroup products: 16-bit types, rows
// of 64 or 128 elements, only for sm_90a. As backward_products.cuh, but the work is only started:
// every function that starts some makes one group of it, for wait.

template <class Type, int kRowWidth>
struct GroupProducts {
  using T = Type;
  static constexpr int kWidth = kRowWidth;
  static constexpr int kColumns = 64;
  static constexpr int kUnit = 64;
  static constexpr int kRowBytes = kWidth * 2;
  static constexpr int kBlocks = 2;  // on a multiprocessor
  using Scores = float[32];
  using Sums = float[kWidth / 2];
  using Factor = FragmentA<T>[4];
  using Matrix = Bands<T, kWidth, 64>;

  __device__ static float (&band(Sums& sums, int number))[32] {
    return *reinterpret_cast<float(*)[32]>(sums + 32 * number);
  }

  // Rows of two tensors, by the 128 threads of a block: ranks from `first` on, `count` of them and
  // zeros beyond.
  template <int kRows>
  __device__ static void load(const Matrix (&to)[2], const Rows<const T> (&rows)[2], int first,
                              int count, const std::int32_t* index) {
    static_assert(kRows == 64, "whole matrices");
    constexpr int kStep = kWarpgroup / 8;              // rows at a time
    const Rows<const T> both[2] = {rows[0], rows[1]};  // read once, not after every copy
    const int r = static_cast<int>(threadIdx.x) / 8, chunk = static_cast<int>(threadIdx.x) % 8;
    std::int64_t row[64 / kStep];
    bool there[64 / kStep];
#pragma unroll
    for (int i = 0; i < 64 / kStep; ++i) there[i] = r + i * kStep < count;
    if (index) {
#pragma unroll
      for (int i = 0; i < 64 / kStep; ++i) row[i] = there[i] ? index[r + i * kStep] : 0;
    }
#pragma unroll
    for (int tensor = 0; tensor < 2; ++tensor)
#pragma unroll
      for (int band = 0; band < Matrix::kCount; ++band) {
        const Rows<const T>& from = both[tensor];
        const std::uint32_t target =
            Tile<T, 64>{to[tensor].base + band * Matrix::kBandBytes}.chunk(r, chunk);
        const int column = 64 * band + 8 * chunk;
        const T* source = from.row(first + r) + column;
#pragma unroll
        for (int i = 0; i < 64 / kStep; ++i) {
          if (index) source = from.row(row[i]) + column;
          cp_async16(target + i * kStep * 128, source, there[i] && column < from.width ? 16 : 0);
          source += kStep * from.pitch;
        }
      }
  }
  __device__ static void start_scores(Scores& s, const Matrix& a, const Matrix& b) {
    row_products(s, a, 0, b, 0);
    wgmma_commit();
  }
  __device__ static void start_sums(Sums& sum, const Factor& p, const Matrix& b) {
#pragma unroll
    for (int k = 0; k < 4; ++k)
#pragma unroll
      for (int part = 0; part < Matrix::kCount; ++part)
        wgmma<T, 1, 1>(band(sum, part), p[k].r, b.by_rows(16 * k, part));
    wgmma_commit();
  }
  __device__ static void round(FragmentA<T>& factor, Scores& s, int part) {
    to_fragment(factor, *reinterpret_cast<Accumulator*>(s + 8 * part));
  }

  // An element of a matrix in an even column, and the next.
  __device__ static float2 pair(const Matrix& matrix, int row, int column) {
    const Tile<T, 64> tile{matrix.base + column / 64 * Matrix::kBandBytes};
    return load_pair<T>(tile.address(row, column % 64));
  }

  // Before products of what registers or this thread's copies hold.
  __device__ static void fence() { wgmma_fence(); }
  // Before the barrier behind which products read copied rows.
  __device__ static void publish() { fence_async_proxy(); }
  template <int kPending>
  __device__ static void wait() {
    wgmma_wait<kPending>();
  }
  template <int kCount>
  __device__ static void settle(float (&values)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(values[i])::"memory");
  }
};

constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;

// The steps of a block.
struct StepRun {
  int heads, of_head;  // all steps, and those of a head
  int count;           // of a block, at most
  bool rounds;         // three steps walk over their tiles together
  bool by_work;        // WorkCut says which

  // Number `place` of a block's, -1 if there is none. In rounds blocks take three at a time, forth
  // and back, those of the longest ranges first where ranges grow or shrink along a list.
  __device__ int number(int place, bool keys) const {
    const int block = static_cast<int>(blockIdx.x), blocks = static_cast<int>(gridDim.x);
    if (!rounds) {
      const int number = block * count + place;
      return number < heads * of_head ? number : -1;
    }
    const int turn = place / kBackwardGroups,
              threes = (of_head + kBackwardGroups - 1) / kBackwardGroups;
    const int three = turn * blocks + (turn % 2 ? blocks - 1 - block : block);
    const int unit = keys ? three / heads : threes - 1 - three / heads;
    const int step = unit * kBackwardGroups + place % kBackwardGroups;
    return three < threes * heads && step < of_head ? three % heads * of_head + step : -1;
  }
};

template <class T, ListForm kForm, bool kKeys>
__global__ void __launch_bounds__(StreamBackwardShape<kForm, kKeys>::kThreads, 1)
    list_stream_kernel(const __grid_constant__ ListBackwardArgs<T> args,
                       const __grid_constant__ ListTiles tiles, const StepRun run) {
  await_writes();  // first: sums behind this kernel read the slots of tokens early
  release_next();
  extern __shared__ __align__(1024) unsigned char memory[];
  const StreamBackwardShape<kForm, kKeys> shape(memory);
  shape.template init<0>();
  static_assert(kCutBytes <= StreamBackwardShape<kForm, kKeys>::kPlanAt, "room to measure lists");
  const ListProblem& problem = args.problem;
  const bool by_work = kForm != ListForm::plain && run.by_work;
  WorkCut<kKeys> cut(problem, memory);
  const int count = by_work ? cut.take() : run.count;
  const auto make = [&](int place, StreamStep& step) {
    const StepPlace at =
        by_work ? cut.find(place)
                : numbered_step(kKeys ? problem.k : problem.q, tiles, run.number(place, kKeys));
    make_step<T, kKeys>(args, at, step);
  };
  const StreamPlan plan = plan_steps(shape, count, run.rounds, kKeys ? problem.group : 1, make);
  if (threadIdx.x >= shape.kGroups * kWarpgroup) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kProducerRegisters));
    const ListLoader<T, kForm, kKeys> loader{args, shape};
    load_steps(
        shape, plan, run.rounds,
        [&](int number, const StreamStep& step, const auto& ready) {
          loader.own(number, step, ready);
        },
        [&](int number, const StreamStep& step, int place, const auto& ready) {
          loader.tile(number, step, place, ready);
        });
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kConsumerRegisters));
    if constexpr (kKeys)
      key_steps<T, kForm>(args, shape, plan);
    else
      query_steps<T, kForm>(args, shape, plan);
  }
}

// Tiles of the other side that 64 rows meet, at most; for ends, and lists of unknown lengths, what
// is to be expected.
std::int64_t span_tiles(const ListProblem& problem, const SlotSide& other) {
  std::int64_t ranks = other.spans.rows;
  if (other.layout == ListLayout::residues) ranks = (ranks + other.lists - 1) / other.lists;
  if (other.layout == ListLayout::members) ranks = other.width;
  const std::int64_t window = problem.window;
  if (problem.rule == ListRule::sliding || problem.rule == ListRule::ends)
    ranks = min(ranks, kStreamRows + window);
  if (problem.rule == ListRule::blocked)
    ranks = min(ranks, kStreamRows + window * (1 + problem.before + problem.after));
  return (ranks + kStreamRows - 1) / kStreamRows;
}

template <class T, ListForm kForm, bool kKeys>
void launch_stream(const ListBackwardArgs<T>& args, cudaStream_t stream) {
  using Shape = StreamBackwardShape<kForm, kKeys>;
  const ListProblem& problem = args.problem;
  const SlotSide& side = kKeys ? problem.k : problem.q;
  const ListTiles tiles = list_tiles(side, kStreamBits);
  if (tiles.total == 0) return;
  StepRun run{side.heads, tiles.total, 0, false, false};
  // Steps at work share a ring that holds what they meet, and some tiles on their way.
  run.rounds = span_tiles(problem, kKeys ? problem.q : problem.k) + 2 > Shape::kRing ||
               (kKeys && problem.group > 1);
  const auto split = [](int whole, int parts) { return (whole + parts - 1) / parts; };
  const int unit = run.rounds ? kBackwardGroups : 1;
  const int units = run.rounds ? split(tiles.total, unit) * side.heads : tiles.total * side.heads;
  const int waves = split(units, multiprocessors() * (kStreamPlan / unit));
  const int of_block = split(units, multiprocessors() * waves);
  run.count = of_block * unit;
  const int most = min(multiprocessors() * waves, units);
  run.by_work = cut_by_work(kForm, problem, side, units, most, run.rounds);
  const int blocks = run.by_work ? most : split(units, of_block);
  launch_early("list_stream_kernel", list_stream_kernel<T, kForm, kKeys>,
               dim3(static_cast<unsigned>(blocks)), Shape::kThreads, Shape::kBytes, stream, args,
               tiles, run);
}

template <class T, ListForm kForm>
void launch_form(const ListBackwardArgs<T>& args, const ListKernels& wanted, cudaStream_t stream) {
  if (wanted.queries) launch_stream<T, kForm, false>(args, stream);
  if (wanted.keys) launch_stream<T, kForm, true>(args, stream);
}

}  // namespace

template <class T, int kWidth>
void launch_lists_sm90a(const ListBackwardArgs<T>& args, ListForm form, const ListKernels& wanted,
                        cudaStream_t stream) {
  if constexpr (kWidth == 64) {
    if (form == ListForm::plain)
      launch_form<T, ListForm::plain>(args, wanted, stream);
    else
      launch_form<T, ListForm::normalised>(args, wanted, stream);
  } else {
    // Of wide rows one form serves both, for the sake of the time to compile.
    launch_lists<GroupProducts<T, kWidth>, ListForm::normalised>(args, wanted, stream);
  }
}

#define COTERIE_INSTANTIATE(T, width)                                              \
  template void launch_lists_sm90a<T, width>(const ListBackwardArgs<T>&, ListForm, \
                                             const ListKernels&, cudaStream_t)
COTERIE_INSTANTIATE(Bf16, 64);
COTERIE_INSTANTIATE(Bf16, 128);
COTERIE_INSTANTIATE(F16, 64);
COTERIE_INSTANTIATE(F16, 128);
#undef COTERIE_INSTANTIATE

}  // namespace coterie::cuda
