// SPDX-License-Identifier: MIT
// dk and dv of keys in the backward pass of lists on Hopper: a warpgroup owns 64 keys.
#pragma once

#include "cuda/device/list_bwd_group.cuh"

namespace coterie::cuda {

// A lane's two owned keys.
template <ListForm kForm>
struct OwnedKeys {
  int rank[2];
  RowStatistics stats[2];

  __device__ OwnedKeys(const KeyRecord<kForm>& record, int first) {
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      rank[side] = first + group_row(side);
      if constexpr (kForm != ListForm::plain) stats[side] = record.stats[group_row(side)];
    }
  }

  // Scores become weights.
  template <bool kMasked>
  __device__ void weigh(float (&s)[32], const QueryRecord<kForm>& queries,
                        const ListProblem& problem, int keys, float exponent,
                        float scale_bits) const {
    float mean[2];
    if constexpr (kForm != ListForm::plain) {
#pragma unroll
      for (int side = 0; side < 2; ++side)
        mean[side] = stats[side].mean * stats[side].inverse * static_cast<float>(problem.width);
    }
    const bool ends = problem.rule == ListRule::ends;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 lse = column_pair<float2>(queries.lse, j);
      float4 query;  // means and inverses
      if constexpr (kForm != ListForm::plain) query = column_pair<float4>(queries.stats, j);
      int4 range;
      if constexpr (kMasked) range = column_pair<int4>(queries.range, j);
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float shift = fmaf(c ? lse.y : lse.x, kLog2e, -scale_bits);
        float factor = exponent;
        if constexpr (kForm != ListForm::plain) factor *= c ? query.w : query.y;
        int last;  // that the query sees, and how many
        unsigned span;
        if constexpr (kMasked) {
          last = c ? range.w : range.y;
          span = ends ? problem.window : last - (c ? range.z : range.x);
          last = (ends ? min(last, keys) : last) - 1;
        }
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          float& x = s[4 * j + 2 * side + c];
          if constexpr (kForm != ListForm::plain)
            x = fmaf(x, stats[side].inverse, -mean[side] * (c ? query.z : query.x));
          x = exp2_approximate(fmaf(x, factor, -shift));
          if (kMasked && static_cast<unsigned>(last - rank[side]) >= span) x = 0.0f;
        }
      }
    }
  }

  // d becomes the factor of the queries' rows, s that of the output gradients.
  __device__ void differentiate(float (&s)[32], float (&d)[32], const QueryRecord<kForm>& queries,
                                float gradient) const {
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
          d[i] = s[i] * ((e % 2 ? query.w : query.y) * gradient) * fmaf(d[i], factor, -own);
          s[i] *= factor;
        }
      }
    }
  }
};

// The keys of a block's rounds, over all query heads of their key head.
template <class T, ListForm kForm>
__device__ void key_rounds(const ListBackwardArgs<T>& args, StreamMemory<kForm, true>& memory,
                           int rounds) {
  const ListProblem& problem = args.problem;
  const int group = uniform(static_cast<int>(threadIdx.x) / kWarpgroup);
  const float scale_bits = log2f(args.weight_scale);
#pragma unroll 1
  for (int round = 0; round < rounds; ++round) {
    memory.await_owned(group, round);
    const ListStep step = memory.step[round % 2][group];
    const auto& owned = memory.owned[round % 2][group];
    const OwnedKeys<kForm> key(memory.owned_rows[round % 2][group].rows, step.first);
    const OwnedPlace place(step, memory.owned_rows[round % 2][group].row);
    float dk[32], dv[32];
#pragma unroll
    for (int i = 0; i < 32; ++i) dk[i] = dv[i] = 0.0f;
    float s[32], d[32];
    FragmentA<T> p[4], ds[4];
    const auto first_of = [&](int number) {
      return range_of(memory.rows[number % kStreamRing], 0, problem, step.keys);
    };
    const auto last_of = [&](int number) {
      const int at = number % kStreamRing;
      return range_of(memory.rows[at], memory.facts[at].count - 1, problem, step.keys);
    };
    walk_tiles(
        memory, step,
        [&](int number) {
          return step.count > 0 && last_of(number).high > step.first &&
                 first_of(number).low < step.first + 64;
        },
        [&](int number) {
          start_products<T>(s, owned[0], memory.ring[number % kStreamRing][0]);
          start_products<T>(d, owned[1], memory.ring[number % kStreamRing][1]);
        },
        [&](int number) {
          const auto& queries = memory.rows[number % kStreamRing];
          const TileFacts facts = memory.facts[number % kStreamRing];
          const ScoreScale scale(problem, facts.head);
          if (facts.count == 64 && last_of(number).low <= step.first &&
              first_of(number).high >= step.first + 64)
            key.template weigh<false>(s, queries, problem, step.keys, scale.exponent, scale_bits);
          else
            key.template weigh<true>(s, queries, problem, step.keys, scale.exponent, scale_bits);
          key.differentiate(s, d, queries, scale.gradient);
          round_factor(p, s);
          round_factor(ds, d);
        },
        [&](int number) {
          start_sums(dv, p, memory.ring[number % kStreamRing][1]);
          start_sums(dk, ds, memory.ring[number % kStreamRing][0]);
        },
        [&] {
          wgmma_settle(s);
          wgmma_settle(d);
          wgmma_settle(dk);
          wgmma_settle(dv);
        });
    if (step.count <= 0) {
      memory.release_owned(round);
      continue;
    }
    const float factor = 1.0f / args.weight_scale;
    if constexpr (kForm != ListForm::plain) {
      if (args.normalise) {
        float product[2];
        denormalise(dk, Tile<T, 64>{shared_address(owned[0])}, key.stats, problem.width, product);
      }
    }
    memory.release_owned(round);
    place.store(dk, (problem.head_scale ? 1.0f : problem.scale) * factor, args.dk, step,
                problem.width);
    place.store(dv, factor, args.dv, step, problem.width);
  }
}

}  // namespace coterie::cuda
