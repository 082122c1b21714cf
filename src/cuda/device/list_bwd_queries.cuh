// SPDX-License-Identifier: MIT
// delta and dq of queries in the backward pass of lists on Hopper: a warpgroup owns 64 queries.
#pragma once

#include "cuda/device/list_bwd_group.cuh"

namespace coterie::cuda {

// A lane's two owned queries.
template <ListForm kForm>
struct OwnedQueries {
  int low[2], high[2];
  float shift[2];   // of logits in base 2
  float factor[2];  // of scores
  float delta[2], weight[2];
  RowStatistics stats[2];

  __device__ OwnedQueries(const QueryRecord<kForm>& record, const ListStep& step,
                          const ListProblem& problem, float exponent, float scale_bits) {
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const int row = group_row(side);
      const RankRange range = range_of(record, row, problem, step.keys);
      low[side] = row < step.count ? range.low : 0;
      high[side] = row < step.count ? range.high : 0;
      shift[side] = fmaf(record.lse[row], kLog2e, -scale_bits);
      if (record.lse[row] == -INFINITY) shift[side] = INFINITY;
      delta[side] = record.delta[row];
      factor[side] = exponent;
      if constexpr (kForm != ListForm::plain) {
        weight[side] = record.weight[row];
        stats[side] = record.stats[row];
        factor[side] *= stats[side].inverse;
      }
    }
  }

  // Scores become weights; `first` is the rank of the tile's first key.
  template <bool kMasked>
  __device__ void weigh(float (&s)[32], const KeyRecord<kForm>& keys, int width, int first) const {
    const int column = first + static_cast<int>(threadIdx.x) % 4 * 2;
    const int before[2] = {column - low[0], column - low[1]};
    const unsigned span[2] = {static_cast<unsigned>(high[0] - low[0]),
                              static_cast<unsigned>(high[1] - low[1])};
    float mean[2];
    if constexpr (kForm != ListForm::plain) {
      mean[0] = stats[0].mean * static_cast<float>(width);
      mean[1] = stats[1].mean * static_cast<float>(width);
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      float4 key;  // means and inverses
      if constexpr (kForm != ListForm::plain) {
        key = column_pair<float4>(keys.stats, j);
        key.x *= key.y;
        key.z *= key.w;
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int side = e / 2;
        float& x = s[4 * j + e];
        if constexpr (kForm != ListForm::plain)
          x = fmaf(x, e % 2 ? key.w : key.y, -mean[side] * (e % 2 ? key.z : key.x));
        x = exp2_approximate(fmaf(x, factor[side], -shift[side]));
        if (kMasked && static_cast<unsigned>(before[side] + 8 * j + e % 2) >= span[side]) x = 0.0f;
      }
    }
  }

  // d becomes dS, which is added up by row; both are then factors of the keys' rows.
  __device__ void differentiate(float (&s)[32], float (&d)[32], const KeyRecord<kForm>& keys,
                                float (&sum)[2]) const {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      float4 key;
      if constexpr (kForm != ListForm::plain) key = column_pair<float4>(keys.stats, j);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int i = 4 * j + e, side = e / 2;
        const float rest =
            kForm == ListForm::plain ? d[i] - delta[side] : fmaf(d[i], weight[side], -delta[side]);
        d[i] = s[i] * rest;
        sum[side] += d[i];
        if constexpr (kForm != ListForm::plain) {
          s[i] *= e % 2 ? key.w : key.y;
          d[i] *= e % 2 ? key.w : key.y;
        }
      }
    }
  }

  // A first guess of delta for the rows that have none yet.
  __device__ void guess(const float (&s)[32], const float (&d)[32], bool (&guessed)[2]) {
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      float mean = 0.0f;
      const bool now = guess_delta(s, d, side, mean);
      if constexpr (kForm != ListForm::plain) mean *= weight[side];
      if (!guessed[side]) delta[side] = mean;
      guessed[side] = guessed[side] || now;
    }
  }
};

// The queries of a block's rounds; see list_query_kernel for the guess of delta.
template <class T, ListForm kForm>
__device__ void query_rounds(const ListBackwardArgs<T>& args, StreamMemory<kForm, false>& memory,
                             int rounds) {
  const ListProblem& problem = args.problem;
  const int group = uniform(static_cast<int>(threadIdx.x) / kWarpgroup);
  const bool wanted = args.dq.wanted(), guess = wanted && args.delta_out;
  const float scale_bits = log2f(args.weight_scale), unscaled = 1.0f / args.weight_scale;
#pragma unroll 1
  for (int round = 0; round < rounds; ++round) {
    memory.await_owned(group, round);
    const ListStep step = memory.step[round % 2][group];
    const ScoreScale scale(problem, step.head);
    const auto& owned = memory.owned[round % 2][group];
    const auto& record = memory.owned_rows[round % 2][group];
    OwnedQueries<kForm> query(record.rows, step, problem, scale.exponent, scale_bits);
    const RankRange top = range_of(record.rows, 0, problem, step.keys);
    const RankRange last = range_of(record.rows, max(step.count - 1, 0), problem, step.keys);
    const OwnedPlace place(step, record.row);
    bool guessed[2] = {!guess || !place.there[0], !guess || !place.there[1]};
    float rest[2] = {0.0f, 0.0f};
    float dq[32], weighted[32];
#pragma unroll
    for (int i = 0; i < 32; ++i) dq[i] = weighted[i] = 0.0f;
    float s[32], d[32];
    FragmentA<T> p[4], ds[4];
    const auto rank_of = [&](int number) { return step.rank + (number - step.number) * 64; };
    walk_tiles(
        memory, step,
        [&](int number) {
          const int rank = rank_of(number);
          return step.count > 0 && rank < last.high && rank + 64 > top.low;
        },
        [&](int number) {
          start_products<T>(s, owned[0], memory.ring[number % kStreamRing][0]);
          start_products<T>(d, owned[1], memory.ring[number % kStreamRing][1]);
        },
        [&](int number) {
          const int rank = rank_of(number);
          const auto& keys = memory.rows[number % kStreamRing];
          if (last.low <= rank && top.high >= rank + 64)
            query.template weigh<false>(s, keys, problem.width, rank);
          else
            query.template weigh<true>(s, keys, problem.width, rank);
          if (__any_sync(~0u, !guessed[0] || !guessed[1])) query.guess(s, d, guessed);
          query.differentiate(s, d, keys, rest);
          round_factor(ds, d);
          round_factor(p, s);
        },
        [&](int number) {
          if (!wanted) return;
          start_sums(dq, ds, memory.ring[number % kStreamRing][0]);
          if (guess) start_sums(weighted, p, memory.ring[number % kStreamRing][0]);
        },
        [&] {
          wgmma_settle(s);
          wgmma_settle(d);
          wgmma_settle(dq);
          wgmma_settle(weighted);
        });
    if (step.count <= 0) {
      memory.release_owned(round);
      continue;
    }
    const std::int64_t row_base = ListProblem::row_base(problem.q, step.span, step.head);
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      rest[side] = quad_sum(rest[side]) * unscaled;
      if (args.delta_out && threadIdx.x % 4 == 0 && place.there[side])
        args.delta_out[args.delta_out_by_slot ? place.slot(step, side)
                                              : row_base + place.row[side]] =
            query.delta[side] + rest[side];
    }
    if (!wanted) {
      memory.release_owned(round);
      continue;
    }
    if (guess) {
#pragma unroll
      for (int i = 0; i < 32; ++i) dq[i] = fmaf(-rest[i / 2 % 2], weighted[i], dq[i]);
    }
    const float factor = scale.score * unscaled;
    if constexpr (kForm != ListForm::plain) {
      if (args.normalise) {
        float product[2];
        denormalise(dq, Tile<T, 64>{shared_address(owned[0])}, query.stats, problem.width, product);
#pragma unroll
        for (int side = 0; side < 2; ++side)
          if (args.dq_products && threadIdx.x % 4 == 0 && place.there[side])
            args.dq_products[row_base + place.row[side]] = product[side] * factor;
      }
    }
    memory.release_owned(round);
    place.store(dq, factor, args.dq, step, problem.width);
  }
}

}  // namespace coterie::cuda
