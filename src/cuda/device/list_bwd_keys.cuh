// SPDX-License-Identifier: MIT
// dk and dv of keys in the backward pass of lists on Hopper: a warpgroup owns 64 keys.
#pragma once

#include "cuda/device/list_bwd_group.cuh"

namespace coterie::cuda {

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

}  // namespace coterie::cuda
