// SPDX-License-Identifier: MIT
// Backward pass of attention of lists over lists (backward.cu) by warpgroup products. Rows
// of up to 64 elements are streamed through shared memory by warps of their own
// (backward_group.cuh); wider ones take the kernels of backward.h.
#include <cstdint>
#include <type_traits>

#include "cuda/lists/backward.h"
#include "cuda/lists/backward_group.cuh"
#include "cuda/lists/backward_tiles.cuh"
#include "cuda/lists/rows.cuh"
#include "cuda/prim/bands.cuh"

namespace coterie::cuda {
namespace {

// Scores of 64 by 64 become weights: of 16 columns at a time by weigh(masked, block). Columns that
// no row of the warp sees cost nothing.
template <class Seen, class Weigh>
__device__ __forceinline__ void weigh_blocks(float (&s)[32], bool whole, const Seen& seen,
                                             const Weigh& weigh) {
  if (whole) {
#pragma unroll
    for (int block = 0; block < 4; ++block) weigh(std::false_type{}, block);
    return;
  }
#pragma unroll
  for (int block = 0; block < 4; ++block) {
    if (seen(block)) {
      weigh(std::true_type{}, block);
    } else {
#pragma unroll
      for (int i = 8 * block; i < 8 * block + 8; ++i) s[i] = 0.0f;
    }
  }
}

// A lane's two owned keys.
template <class T, ListForm kForm>
struct OwnedKeys {
  int rank;                   // of the upper one; the other's is 8 more
  int first;                  // of the warp's sixteen
  float inverse[2], mean[2];  // the mean times the width and the inverse
  float scale_bits;
  int window;                // ListRule::ends: of every query; else 0
  float exponent, gradient;  // of a head

  __device__ OwnedKeys(const KeyRecord& record, const StreamStep& step, const ListProblem& problem,
                       float bits, bool)
      : rank(step.first + group_row(0)),
        first(step.first + static_cast<int>(threadIdx.x) % kWarpgroup / 32 * 16),
        scale_bits(bits),
        window(problem.rule == ListRule::ends ? problem.window : 0) {
    if constexpr (kForm != ListForm::plain) {
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const RowStatistics stats = record.stats[group_row(side)];
        inverse[side] = stats.inverse;
        mean[side] = stats.mean * stats.inverse * static_cast<float>(problem.width);
      }
    }
  }
  __device__ void set_head(const ScoreScale& scale) {
    exponent = scale.exponent;
    gradient = scale.gradient;
  }

  // Scores of 16 queries become weights.
  template <bool kMasked>
  __device__ void weigh16(float (&s)[32], int block, const QueryRecord<kForm>& queries) const {
#pragma unroll
    for (int j = 2 * block; j < 2 * block + 2; ++j) {
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
          last = (c ? range.w : range.y) - 1 - rank;
          span = window > 0 ? window : (c ? range.w - range.z : range.y - range.x);
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
  __device__ void weigh(float (&s)[32], const QueryRecord<kForm>& queries, int,
                        const ListProblem& problem) const {
    const auto range = [&](int row) { return range_of(queries.range[row], problem, kAnyKeys); };
    weigh_blocks(
        s, range(kStreamRows - 1).low <= first && range(0).high >= first + 16,
        [&](int block) {
          return range(16 * block + 15).high > first && range(16 * block).low < first + 16;
        },
        [&](auto masked, int block) { weigh16<decltype(masked)::value>(s, block, queries); });
  }

  // d becomes the factor of the queries' rows, s that of the output gradients; both rounded to T.
  __device__ void differentiate(float (&s)[32], float (&d)[32],
                                const QueryRecord<kForm>& queries) const {
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
          d[i] = s[i] * (inverse * gradient) * fmaf(d[i], factor, -own);
          s[i] *= factor;
        }
      }
    }
  }
};

// A lane's two owned queries, and what all of the warp's sixteen see.
template <class T, ListForm kForm>
struct OwnedQueries {
  int low[2], span[2];     // of the ranks in sight
  RankRange seen, shared;  // by any, and by all of the warp
  float shift[2];          // of logits in base 2
  float factor[2], score;  // of scores, and to logits
  float delta[2], weight[2], mean[2];
  bool open[2];  // rows without a guess of delta
  float rests[4] = {0.0f, 0.0f, 0.0f, 0.0f};

  __device__ OwnedQueries(const QueryRecord<kForm>& record, const StreamStep& step,
                          const ListProblem& problem, float scale_bits, bool guess) {
    int high[2];
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const int row = group_row(side);
      const RankRange range = range_of(record.range[row], problem, step.count);
      low[side] = range.low;
      high[side] = range.high;
      span[side] = range.high - range.low;
      shift[side] = fmaf(record.lse[row], kLog2e, -scale_bits);
      if (record.lse[row] == -INFINITY) shift[side] = INFINITY;
      delta[side] = record.delta[row];
      open[side] = guess && row < step.rows;
      if constexpr (kForm != ListForm::plain) {
        weight[side] = record.weight[row];
        mean[side] = record.stats[row].mean * static_cast<float>(problem.width);
        factor[side] = record.stats[row].inverse;
      }
    }
    seen = {__shfl_sync(~0u, low[0], 0), __shfl_sync(~0u, high[1], 31)};
    shared = {__shfl_sync(~0u, low[1], 31), __shfl_sync(~0u, high[0], 0)};
  }
  __device__ void set_head(const ScoreScale& scale) {
    score = scale.score;
#pragma unroll
    for (int side = 0; side < 2; ++side)
      factor[side] = kForm == ListForm::plain ? scale.exponent : scale.exponent * factor[side];
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
  __device__ void weigh(float (&s)[32], const KeyRecord& keys, int first,
                        const ListProblem&) const {
    weigh_blocks(
        s, shared.low <= first && shared.high >= first + kStreamRows,
        [&](int block) {
          return first + 16 * block + 16 > seen.low && first + 16 * block < seen.high;
        },
        [&](auto masked, int block) { weigh16<decltype(masked)::value>(s, block, keys, first); });
  }

  // For rows that have no delta yet and see a key of this tile.
  __device__ void guess(const float (&s)[32], const float (&d)[32]) {
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      float mean = 0.0f;
      if (!guess_delta(s, d, side, mean) || !open[side]) continue;
      delta[side] = kForm == ListForm::plain ? mean : mean * weight[side];
      open[side] = false;
    }
  }
  // d becomes dS, which is added up by row; both are then factors of the keys' rows, rounded to T.
  __device__ void differentiate(float (&s)[32], float (&d)[32], const KeyRecord& keys) {
    if (__any_sync(~0u, open[0] || open[1])) guess(s, d);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      float4 key;
      if constexpr (kForm != ListForm::plain) key = column_pair<float4>(keys.stats, j);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int i = 4 * j + e, side = e / 2;
        d[i] = s[i] * (kForm == ListForm::plain ? d[i] - delta[side]
                                                : fmaf(d[i], weight[side], -delta[side]));
        rests[e] += d[i];
        if constexpr (kForm != ListForm::plain) {
          s[i] *= inverse_factor<T>(e % 2 ? key.w : key.y);
          d[i] *= inverse_factor<T>(e % 2 ? key.w : key.y);
        }
      }
    }
  }
};

// A computing warpgroup's steps, 64 owned rows each: dk and dv of keys, over all query heads of
// their key head; or dq and delta of queries, see list_tile_kernel for the guess of delta.
template <class T, ListForm kForm, bool kKeys>
__device__ void compute_steps(const ListBackwardArgs<T>& args,
                              const StreamBackwardShape<kForm, kKeys>& shape,
                              const StreamPlan& plan) {
  using Shape = StreamBackwardShape<kForm, kKeys>;
  using Owned = std::conditional_t<kKeys, OwnedKeys<T, kForm>, OwnedQueries<T, kForm>>;
  const ListProblem& problem = args.problem;
  const SlotSide& own_side = kKeys ? problem.k : problem.q;
  const int heads = kKeys ? problem.group : 1, slot_step = own_side.index ? 1 : own_side.lists;
  // Which sums are wanted: of dS times rows, and of weights times rows.
  const bool wanted = kKeys || args.dq.wanted(), both = kKeys || (wanted && args.delta_out);
  const float scale_bits = log2f(args.weight_scale), unscaled = 1.0f / args.weight_scale;
  TileWalk<Shape> walk(shape);
#pragma unroll 1
  for (int number = uniform(static_cast<int>(threadIdx.x) / kWarpgroup); number < plan.steps;
       number += Shape::kGroups) {
    const StreamStep& step = shape.plan()[number];
    const int after = number + Shape::kGroups;
    const int keep = uniform(after < plan.steps ? shape.plan()[after].ring : plan.tiles);
    walk.release_below(uniform(step.ring));
    shape.wait_own(number);
    const auto& record = shape.owned(number);
    Owned own(record, step, problem, scale_bits, both);
    // Owned rows are done with when they are in registers, unless they are needed behind.
    const bool early = kForm == ListForm::plain || !args.normalise;
    const OwnedFactors<T> factors(shape.own(number, 0), shape.own(number, 1));
    if (early) shape.release_own(number);
    float slopes[32], weighted[32];  // dk or dq; dv, or what corrects dq
#pragma unroll
    for (int i = 0; i < 32; ++i) slopes[i] = weighted[i] = 0.0f;
#pragma unroll 1
    for (int turn = 0; turn < heads; ++turn) {
      const int begin = uniform(step.ring + (kKeys ? turn * step.span : 0));
      const int end = begin + uniform(step.tiles);
      own.set_head(ScoreScale(problem, step.head * heads + turn));
      if (turn > 0) walk.release_below(begin);
      if (begin == end) continue;
      float s[32], d[32];
      int place = begin % Shape::kRing, rank = step.low, tile = begin;
      walk.await(begin, end);
      factors.multiply(s, d, shape.tile_at(place, 0), shape.tile_at(place, 1));
#pragma unroll 1
      while (true) {
        const auto& streamed = shape.streamed(place);
        own.weigh(s, streamed, rank, problem);
        own.differentiate(s, d, streamed);
        std::uint32_t p[4][4], ds[4][4];
        pack_factor<T>(ds, d);
        pack_factor<T>(p, s);
        // The sums of this tile and the scores of the next begin and end together: the assembler
        // does them one by one otherwise.
        const bool more = tile + 1 < end;
        const int next = Shape::ring_place(place + 1);
        if (more) walk.await(tile + 1, end);
        const std::uint32_t rows[2] = {shape.tile_at(place, 0), shape.tile_at(place, kKeys)};
        const auto products = [&](auto slope_sums, auto weight_sums, auto scores) {
          wgmma_fence();
          for_depths([&](int k) {
            if constexpr (decltype(slope_sums)::value) start_sum<T>(k, slopes, ds, rows[0]);
            if constexpr (decltype(weight_sums)::value) start_sum<T>(k, weighted, p, rows[1]);
            if constexpr (decltype(scores)::value)
              factors.start(k, s, d, shape.tile_at(next, 0), shape.tile_at(next, 1));
          });
          wgmma_commit();
          wgmma_wait<0>();
          wgmma_settle(s);
          wgmma_settle(d);
          wgmma_settle(slopes);
          wgmma_settle(weighted);
        };
        constexpr std::true_type kYes;
        constexpr std::false_type kNo;
        if (both && more)
          products(kYes, kYes, kYes);
        else if (both)
          products(kYes, kYes, kNo);
        else if (wanted && more)
          products(kYes, kNo, kYes);
        else if (wanted)
          products(kYes, kNo, kNo);
        else if (more)
          products(kNo, kNo, kYes);
        if (tile < keep) walk.release_below(tile + 1);
        if (!more) break;
        ++tile;
        place = next;
        rank += kStreamRows;
      }
    }
    factors.keep(slopes[0]);
    const std::int64_t row_base =
        ListProblem::row_base(problem.q, {step.batch, step.own_begin, 0}, step.head);
    const int* rows = shape.owned_rows(number);
    float factor = unscaled;  // where heads have scales of their own they are in dS of keys
    if constexpr (!kKeys)
      factor *= own.score;
    else if (!problem.head_scale)
      factor *= problem.scale;
    for_sides<kForm>([&](int side) {
      const int row = group_row(side);
      const bool writes = !kKeys && threadIdx.x % 4 == 0 && row < step.rows;
      if constexpr (!kKeys) {
        const float rest =
            quad_sum(side == 0 ? own.rests[0] + own.rests[1] : own.rests[2] + own.rests[3]) *
            unscaled;
        if (args.delta_out && writes)
          args.delta_out[args.delta_out_by_slot
                             ? step.own_slot + static_cast<std::int64_t>(row) * slot_step
                             : row_base + rows[row]] =
              (side == 0 ? own.delta[0] : own.delta[1]) + rest;
        if (!wanted) return;
        if (both) {
#pragma unroll
          for (int i = 0; i < 32; i += i % 4 == 0 ? 1 : 3)
            slopes[i] = fmaf(-rest, weighted[i], slopes[i]);
          next_side(weighted);
        }
      }
      if constexpr (kForm != ListForm::plain) {
        if (args.normalise) {
          const Tile<T, 64> owned{shape.own(number, 0)};
          const float product = denormalise<0>(
              slopes, record.stats[row], problem.width,
              [&](int column) { return unpack2<T>(load_shared32(owned.address(row, column))); });
          if (writes && args.dq_products) args.dq_products[row_base + rows[row]] = product * factor;
        }
      }
      store_owned(slopes, factor, kKeys ? args.dk : args.dq, step, row, rows, slot_step,
                  problem.width);
      next_side(slopes);
      if constexpr (kKeys) {
        store_owned(weighted, unscaled, args.dv, step, row, rows, slot_step, problem.width);
        next_side(weighted);
      }
    });
    if (!early) shape.release_own(number);
  }
  walk.release_below(plan.tiles);
}

// Products of the backward pass of lists (backward_tiles.cuh) by warpgroup products: 16-bit types,
// rows of 64 or 128 elements, only for sm_90a. As backward_products.cuh, but the work is only
// started: every function that starts some makes one group of it, for wait.

template <class Type, int kRowWidth>
struct GroupProducts {
  using T = Type;
  static constexpr int kWidth = kRowWidth;
  static constexpr bool kFilters = false;
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
#pragma unroll
    for (int tensor = 0; tensor < 2; ++tensor)
#pragma unroll
      for (int band = 0; band < Matrix::kCount; ++band) {
        const Rows<const T>& from = rows[tensor];
        load_tile<kRows, kWarpgroup>(
            Tile<T, 64>{to[tensor].base + band * Matrix::kBandBytes},
            Rows<const T>{from.data + 64 * band, from.pitch, from.width - 64 * band, true}, first,
            count, index);
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

// Number `place` of a block's steps, -1 if there is none. In rounds blocks take two at a time,
// forth and back, those of the longest ranges first where ranges grow or shrink along a list.
template <bool kKeys>
__device__ int step_number(const StreamRun& run, int place) {
  if (!run.rounds) return run.in_order(place);
  const int block = static_cast<int>(blockIdx.x), blocks = static_cast<int>(gridDim.x);
  const int turn = place / kBackwardGroups;
  const int pairs = (run.of_head + kBackwardGroups - 1) / kBackwardGroups;
  const int pair = turn * blocks + (turn % 2 ? blocks - 1 - block : block);
  const int unit = kKeys ? pair / run.heads : pairs - 1 - pair / run.heads;
  const int step = unit * kBackwardGroups + place % kBackwardGroups;
  return pair < pairs * run.heads && step < run.of_head ? pair % run.heads * run.of_head + step
                                                        : -1;
}

template <class T, ListForm kForm, bool kKeys>
__global__ void __launch_bounds__(StreamBackwardShape<kForm, kKeys>::kThreads, 1)
    list_stream_kernel(const __grid_constant__ ListBackwardArgs<T> args, const StreamRun run) {
  await_writes();  // first: sums behind this kernel read the slots of tokens early
  release_next();
  extern __shared__ __align__(1024) unsigned char memory[];
  const StreamBackwardShape<kForm, kKeys> shape(memory);
  shape.init();
  static_assert(kCutBytes <= StreamBackwardShape<kForm, kKeys>::kPlanAt, "room to measure lists");
  const ListProblem& problem = args.problem;
  const bool by_work = kForm != ListForm::plain && run.by_work;
  WorkCut<kKeys> cut(problem, memory);
  const int count = by_work ? cut.take() : run.count;
  const auto make = [&](int place, StreamStep& step) {
    const StepPlace at =
        by_work ? cut.find(place)
                : numbered_step(kKeys ? problem.k : problem.q, kKeys ? args.k_tiles : args.q_tiles,
                                step_number<kKeys>(run, place));
    make_step<kKeys>(problem, at, step);
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
    compute_steps<T, kForm, kKeys>(args, shape, plan);
  }
}

template <class T, ListForm kForm, bool kKeys>
void launch(const ListBackwardArgs<T>& args, const StreamRun& run, cudaStream_t stream) {
  using Shape = StreamBackwardShape<kForm, kKeys>;
  if (run.blocks > 0)
    launch_early("list_stream_kernel", list_stream_kernel<T, kForm, kKeys>,
                 dim3(static_cast<unsigned>(run.blocks)), Shape::kThreads, Shape::kBytes, stream,
                 args, run);
}

}  // namespace

template <class T>
void launch_list_stream_sm90a(const ListBackwardArgs<T>& args, const ListBackwardPlan& plan,
                              bool keys, cudaStream_t stream) {
  const bool plain = plan.form == ListForm::plain;
  if (keys && plain)
    launch<T, ListForm::plain, true>(args, plan.key_run, stream);
  else if (keys)
    launch<T, ListForm::normalised, true>(args, plan.key_run, stream);
  else if (plain)
    launch<T, ListForm::plain, false>(args, plan.query_run, stream);
  else
    launch<T, ListForm::normalised, false>(args, plan.query_run, stream);
}

template <class T>
void launch_wide_tiles_sm90a(const ListBackwardArgs<T>& args, bool keys, cudaStream_t stream) {
  launch_tiles<GroupProducts<T, 128>>(args, keys, stream);
}

#define COTERIE_INSTANTIATE(T)                                                                \
  template void launch_list_stream_sm90a(const ListBackwardArgs<T>&, const ListBackwardPlan&, \
                                         bool, cudaStream_t);                                 \
  template void launch_wide_tiles_sm90a(const ListBackwardArgs<T>&, bool, cudaStream_t)
COTERIE_INSTANTIATE(Bf16);
COTERIE_INSTANTIATE(F16);
#undef COTERIE_INSTANTIATE

}  // namespace coterie::cuda
