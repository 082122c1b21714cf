// SPDX-License-Identifier: MIT
// delta and dq of queries in the backward pass of lists on Hopper: a warpgroup owns 64 queries.
#pragma once

#include "cuda/device/list_bwd_group.cuh"

namespace coterie::cuda {

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

}  // namespace coterie::cuda
