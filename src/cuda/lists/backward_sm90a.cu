// SPDX-License-Identifier: MIT
// Backward pass of lists (lists.h) on Hopper with warpgroup products, for 16-bit rows: dq and delta
// of queries in one kernel, dk and dv of keys in another (formulas: backward_tiles.cuh).
//
// list_stream_kernel, rows of up to 64 elements, forms plain and normalised: a stream of steps
// (stream.cuh). Grid: one or a few blocks per multiprocessor, by StreamRun of plan.h. 384 threads:
// two warpgroups compute with 224 registers and own 64 rows each, four warps load with 56. Shared
// memory, 190 to 215 KB: 8 or 9 streamed and 4 owned tiles of two tensors (16 KB each), the plan
// (64 bytes per step), and row metadata, so computing warps read nothing from global memory. Per
// tile: weights and derivatives, then in one batch the sums of this tile and the scores of the
// next.
//
// Wider rows: list_tile_kernel of backward_tiles.cuh with GroupProducts, 255 registers, 104 KB.
//
// Preconditions: aligned rows less than 2 GiB apart, no filters, softmax weights; query heads that
// share keys share lists. Other calls: backward.cu.
#include <cstdint>
#include <type_traits>

#include "cuda/lists/backward.h"
#include "cuda/lists/backward_tiles.cuh"
#include "cuda/lists/rows.cuh"
#include "cuda/lists/stream.cuh"
#include "cuda/prim/bands.cuh"
#include "cuda/prim/mma.cuh"
#include "cuda/prim/row_chunk.cuh"
#include "cuda/prim/store.cuh"
#include "cuda/prim/warp.cuh"

namespace coterie::cuda {
namespace {

// 64 queries as stored in global memory. Rows beyond the list have the range of its last row, and
// zeros.
struct QueryValuesRecord {
  alignas(16) float lse[kStreamRows];
  float delta[kStreamRows];
  int2 range[kStreamRows];  // key ranks; ListRule::ends: only .y, as given
};
struct WeightedQueriesRecord : QueryValuesRecord {
  RowStatistics stats[kStreamRows];
  float weight[kStreamRows];
};
template <ListForm kForm>
using QueryRecord =
    std::conditional_t<kForm == ListForm::plain, QueryValuesRecord, WeightedQueriesRecord>;

// The same for 64 keys; unused in the plain form.
struct KeyRecord {
  alignas(16) RowStatistics stats[kStreamRows];
};
template <ListForm kForm>
constexpr int kKeyBytes = kForm == ListForm::plain ? 0 : sizeof(KeyRecord) / kStreamRows;
template <ListForm kForm>
constexpr int kQueryBytes = sizeof(QueryRecord<kForm>) / kStreamRows;

// kKeys: keys are owned.
// The code is kept short: the code that all warps run in turn exceeds the instruction caches.
template <ListForm kForm>
constexpr int kCopyUnroll = kForm == ListForm::plain ? 2 : 1;
template <ListForm kForm, bool kKeys>
using BackwardStream = StreamShape<kBackwardGroups, 64, 2, backward_ring(kForm, kKeys), 4,
                                   kKeys ? kKeyBytes<kForm> : kQueryBytes<kForm>,
                                   kKeys ? kQueryBytes<kForm> : kKeyBytes<kForm>>;

template <ListForm kForm, bool kKeys>
struct StreamBackwardShape : BackwardStream<kForm, kKeys> {
  using Base = BackwardStream<kForm, kKeys>;
  using Base::Base;
  using Owned = std::conditional_t<kKeys, KeyRecord, QueryRecord<kForm>>;
  using Streamed = std::conditional_t<kKeys, QueryRecord<kForm>, KeyRecord>;
  // Row numbers are needed until results are stored, longer than the rows themselves.
  static constexpr int kRowPlaces = Base::kSlots + Base::kGroups;
  static constexpr int kBytes = Base::kBytes + kRowPlaces * kStreamRows * 4;
  static_assert(kBytes <= 227 * 1024, "more than the shared memory of a block");

  __device__ Owned& owned(int step) const {
    return *reinterpret_cast<Owned*>(this->own_facts(step));
  }
  __device__ int* owned_rows(int step) const {
    return reinterpret_cast<int*>(this->memory + Base::kBytes) + step % kRowPlaces * kStreamRows;
  }
  __device__ Streamed& streamed(int place) const {
    return *reinterpret_cast<Streamed*>(this->facts_at(place));
  }
};

// Owned keys are not limited to those that exist: extra ones are harmless, as they are not stored.
constexpr int kAnyKeys = 0x3fffffff;

// The loading warps.
template <class T, ListForm kForm, bool kKeys>
struct ListLoader {
  const ListBackwardArgs<T>& args;
  const StreamBackwardShape<kForm, kKeys>& shape;

  // 64 ranks from `first` on, whose rows are `row`; `slot` of rank 0 of the list.
  __device__ void load_queries(const std::uint32_t (&to)[2], QueryRecord<kForm>& record,
                               const StreamStep& step, int head, const int (&row)[2], int begin,
                               int first, int count, std::int64_t slot, int keys) const {
    const ListProblem& problem = args.problem;
    const Rows<const T> rows[2] = {args.q.rows(step.batch, head, begin),
                                   args.g.rows(step.batch, head, begin)};
    load_list_rows<64, kCopyUnroll<kForm>>(to, rows, row);
    const std::int64_t base = ListProblem::row_base(problem.q, {step.batch, begin, 0}, head);
    const int slot_step = problem.q.index ? 1 : problem.q.lists;
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      const int place = static_cast<int>(threadIdx.x) % 32 + 32 * half;
      const int own_row = half == 0 ? row[0] : row[1], rank = min(first + place, count - 1);
      const bool there = own_row >= 0;
      const std::int64_t by_row = base + max(own_row, 0);
      const std::int64_t by_slot = slot + static_cast<std::int64_t>(rank) * slot_step;
      const auto value = [&](float& to_place, const ListValues& values, float otherwise) {
        if (values.data)
          cp_async_value(&to_place, values.data + (values.by_slot ? by_slot : by_row), there);
        else
          to_place = otherwise;
      };
      value(record.lse[place], args.lse, 0.0f);
      value(record.delta[place], args.delta, 0.0f);
      if (problem.rule == ListRule::ends) {
        cp_async_value(&record.range[place].y, problem.ends + by_slot, true);
      } else {
        const RankRange range = problem.range_at(keys, rank + step.shift);
        record.range[place] = make_int2(range.low, range.high);
      }
      if constexpr (kForm != ListForm::plain) {
        value(record.weight[place], args.weight, 1.0f);
        copy_statistics(record.stats[place], problem.q_stats, by_row, there);
      }
    }
  }
  __device__ void load_keys(const std::uint32_t (&to)[2], KeyRecord& record, const StreamStep& step,
                            int head, const int (&row)[2], int begin) const {
    const ListProblem& problem = args.problem;
    const int key_head = head / problem.group;
    const Rows<const T> rows[2] = {args.k.rows(step.batch, key_head, begin),
                                   args.v.rows(step.batch, head / problem.value_group, begin)};
    load_list_rows<64, kCopyUnroll<kForm>>(to, rows, row);
    if constexpr (kForm != ListForm::plain) {
      const std::int64_t base = ListProblem::row_base(problem.k, {step.batch, begin, 0}, key_head);
#pragma unroll
      for (int half = 0; half < 2; ++half)
        copy_statistics(record.stats[threadIdx.x % 32 + 32 * half], problem.k_stats,
                        base + max(row[half], 0), row[half] >= 0);
    }
  }

  template <class Ready>
  __device__ void own(int number, const StreamStep& step, const Ready& ready) const {
    const ListProblem& problem = args.problem;
    const std::uint32_t to[2] = {shape.own(number, 0), shape.own(number, 1)};
    int row[2];
    list_rows(row, kKeys ? problem.k : problem.q, step.own_at, step.rows);
    ready();
#pragma unroll
    for (int half = 0; half < 2; ++half)
      shape.owned_rows(number)[threadIdx.x % 32 + 32 * half] = row[half];
    if constexpr (kKeys) {
      load_keys(to, shape.owned(number), step, step.head * problem.group, row, step.own_begin);
    } else {
      const int slot_step = problem.q.index ? 1 : problem.q.lists;
      load_queries(to, shape.owned(number), step, step.head, row, step.own_begin, step.first,
                   step.first + step.rows,
                   step.own_slot - static_cast<std::int64_t>(step.first) * slot_step, step.count);
    }
  }
  template <class Ready>
  __device__ void tile(int number, const StreamStep& step, int place, const Ready& ready) const {
    const ListProblem& problem = args.problem;
    const SlotSide& side = kKeys ? problem.q : problem.k;
    int head = step.head;
    if constexpr (kKeys) {
      const int turn = problem.group > 1 ? place / step.span : 0;
      head = head * problem.group + turn;
      place -= turn * step.span;
    }
    const int rank = step.low + place * kStreamRows, slot = number % shape.kRing;
    const std::uint32_t to[2] = {shape.tile_at(slot, 0), shape.tile_at(slot, 1)};
    int row[2];
    list_rows(row, side, step.other_at + (side.index ? rank : rank * side.lists),
              step.count - rank);
    ready();
    if constexpr (kKeys) {
      // Heads that share keys share lists: their slots are head_slots apart.
      const std::int64_t heads_before = head - static_cast<std::int64_t>(step.head) * problem.group;
      load_queries(to, shape.streamed(slot), step, head, row, step.other_begin, rank, step.count,
                   step.other_slot + heads_before * problem.q.head_slots, kAnyKeys);
    } else {
      load_keys(to, shape.streamed(slot), step, head, row, step.other_begin);
    }
  }
};

// Calls start with 0 .. 3. Products of different accumulators alternate, as those of one
// accumulator wait for each other.
template <class Start>
__device__ __forceinline__ void for_depths(const Start& start) {
#pragma unroll
  for (int k = 0; k < 4; ++k) start(k);
}

// Owned rows of two tensors as left factors, held in registers.
template <class T>
struct OwnedFactors {
  std::uint32_t a[2][4][4];

  __device__ OwnedFactors(std::uint32_t first, std::uint32_t second) {
    const std::uint32_t tiles[2] = {first, second};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      FragmentA<T> fragment;
      load_a(fragment, Tile<T, 64>{tiles[i / 4]},
             static_cast<int>(threadIdx.x) % kWarpgroup / 32 * 16, i % 4 * 16);
#pragma unroll
      for (int word = 0; word < 4; ++word) a[i / 4][i % 4][word] = fragment.r[word];
    }
  }
  // Starts depth k of the products with both tensors' tiles.
  __device__ void start(int k, float (&s)[32], float (&d)[32], std::uint32_t first,
                        std::uint32_t second) const {
    const std::uint64_t b[2] = {Bands<T, 64, 64>{first}.by_columns(0, k),
                                Bands<T, 64, 64>{second}.by_columns(0, k)};
    if (k == 0) {
      wgmma<T, 0, 0>(s, a[0][k], b[0]);
      wgmma<T, 0, 0>(d, a[1][k], b[1]);
    } else {
      wgmma<T, 1, 0>(s, a[0][k], b[0]);
      wgmma<T, 1, 0>(d, a[1][k], b[1]);
    }
  }
  // The products with a step's first tile.
  __device__ void multiply(float (&s)[32], float (&d)[32], std::uint32_t first,
                           std::uint32_t second) const {
    wgmma_fence();
    for_depths([&](int k) { start(k, s, d, first, second); });
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_settle(s);
    wgmma_settle(d);
  }
  // A use after the product loop: without it ptxas 13.0 reuses the registers within the loop.
  __device__ void keep(float& value) const {
    std::uint32_t all = 0;
#pragma unroll
    for (int i = 0; i < 32; ++i) all ^= a[i / 16][i / 4 % 4][i % 4];
    asm volatile("{.reg .pred p; setp.eq.u32 p, %1, 0x7f123457; @p add.f32 %0, %0, 0f00000000;}"
                 : "+f"(value)
                 : "r"(all));
  }
};
// Starts depth k of the sums: 16 of the rows of a tile, with their factors.
template <class T>
__device__ __forceinline__ void start_sum(int k, float (&sum)[32],
                                          const std::uint32_t (&factor)[4][4], std::uint32_t tile) {
  wgmma<T, 1, 1>(sum, factor[k], Bands<T, 64, 64>{tile}.by_rows(16 * k, 0));
}
// Two neighbouring columns of a record: columns 8 j + 2 (l%4) and the next.
template <class Both, class One>
__device__ __forceinline__ Both column_pair(const One* record, int j) {
  return *reinterpret_cast<const Both*>(record + 8 * j + threadIdx.x % 4 * 2);
}

// What a query of a record sees of `keys` keys.
__device__ __forceinline__ RankRange range_of(int2 range, const ListProblem& problem, int keys) {
  if (problem.rule != ListRule::ends) return {range.x, range.y};
  const int high = min(range.y, keys);
  return {max(high - problem.window, 0), max(high, 0)};
}

// A lane has elements of two owned rows. At the end of a step, sums are processed one row after the
// other: those of the current row are i with i % 4 < 2. The normalised form runs the same
// instructions for both rows (no unrolling), because code that runs once per step costs as much
// time as its length.
template <ListForm kForm, class Finish>
__device__ __forceinline__ void for_sides(const Finish& finish) {
  constexpr int kTurns = kForm == ListForm::plain ? 2 : 1;
#pragma unroll kTurns
  for (int side = 0; side < 2; ++side) finish(side);
}
__device__ __forceinline__ void next_side(float (&sum)[32]) {
#pragma unroll
  for (int i = 0; i < 32; i += 4) {
    sum[i] = sum[i + 2];
    sum[i + 1] = sum[i + 3];
  }
}

// Stores sums of owned row `own` times a factor to a row of a tensor or to a slot, both aligned.
template <class T>
__device__ __forceinline__ void store_owned(const float (&sum)[32], float factor,
                                            const ListSums<T>& to, const StreamStep& step, int own,
                                            const int* rows, int slot_step, int width) {
  if (!to.wanted()) return;
  const int lane = static_cast<int>(threadIdx.x) % 4;
  const bool there = own < step.rows;
  const std::int64_t row =
      to.rows.data ? rows[own] : step.own_slot + static_cast<std::int64_t>(own) * slot_step;
  if (to.rows.data || to.rounded) {
    const Rows<T> out = to.rows_of({step.batch, step.own_begin, 0}, step.head, width);
    T* row_of = out.row(there ? row : 0) + 8 * lane;
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      std::uint32_t word[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int i = 16 * part + 4 * n;
        word[n] = pack2<T>(sum[i] * factor, sum[i + 1] * factor);
      }
      transpose_quad(word);
      if (there && 32 * part + 8 * lane < width) store_global(row_of + 32 * part, word);
    }
  } else if (there) {
    float* slot_of = static_cast<float*>(to.slots) + row * width + 2 * lane;
#pragma unroll
    for (int j = 0; j < 8; ++j)
      if (8 * j + 2 * lane < width)
        store2(slot_of + 8 * j, sum[4 * j] * factor, sum[4 * j + 1] * factor);
  }
}

// A warp's walk along the tiles of the ring, like StreamReader, but one tile after the other, which
// keeps all state in uniform registers.
template <class Shape>
struct TileWalk {
  const Shape& shape;
  int ready = 0, place = 0, phase = 0;  // tiles waited for; place of the next
  int released = 0;

  __device__ explicit TileWalk(const Shape& stream) : shape(stream) {}

  // Waits for tile `number` and for following tiles below `end` that arrive without a release.
  __device__ void await(int number, int end) {
    if (number < ready) return;
    wait_below(min(min(end, number + Shape::kRing / 2), released + Shape::kRing));
    fence_async_proxy();
  }
  // This warp is done with all tiles below `number`, used or not.
  __device__ void release_below(int number) {
#pragma unroll 1
    while (released < number) {
      const int end = min(number, released + Shape::kRing);
      wait_below(end);
      mbarrier_arrive_warp(released, end, [&](int tile) { return shape.empty(tile); });
      released = end;
    }
  }

 private:
  __device__ void wait_below(int number) {
#pragma unroll 1
    for (; ready < number; ++ready) {
      mbarrier_wait(shape.full(place), phase);
      phase ^= place + 1 == Shape::kRing;
      place = Shape::ring_place(place + 1);
    }
  }
};

// Turns scores of 64 by 64 into weights, 16 columns at a time by weigh(masked, block). Columns that
// no row of the warp sees are skipped.
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
  int rank;                   // of the upper key; the lower has rank + 8
  int first;                  // of the warp's sixteen keys
  float inverse[2], mean[2];  // mean: times the width and the inverse
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

  // Turns scores of 16 queries into weights.
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
        int last;  // last visible rank, and their number
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

  // Turns d into factors of the queries' rows and s into those of output gradients, rounded to T.
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

// A lane's two owned queries, and the ranges of the warp's sixteen.
template <class T, ListForm kForm>
struct OwnedQueries {
  int low[2], span[2];     // of the visible ranks
  RankRange seen, shared;  // visible to any, and to all of the warp
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

  // Turns scores of 16 keys into weights; `first` is the rank of the tile's first key.
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
  // Turns d into dS and sums it by row; s and d become factors of the keys' rows, rounded to T.
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

// The steps of a computing warpgroup, 64 owned rows each: dk and dv of keys, over all query heads
// of their key head; or dq and delta of queries (see list_tile_kernel for the guess of delta).
template <class T, ListForm kForm, bool kKeys>
__device__ void compute_steps(const ListBackwardArgs<T>& args,
                              const StreamBackwardShape<kForm, kKeys>& shape,
                              const StreamPlan& plan) {
  using Shape = StreamBackwardShape<kForm, kKeys>;
  using Owned = std::conditional_t<kKeys, OwnedKeys<T, kForm>, OwnedQueries<T, kForm>>;
  const ListProblem& problem = args.problem;
  const SlotSide& own_side = kKeys ? problem.k : problem.q;
  const int heads = kKeys ? problem.group : 1, slot_step = own_side.index ? 1 : own_side.lists;
  // Which sums are needed: of dS times rows, and of weights times rows.
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
    // Owned rows are released once they are in registers, unless they are needed after the loop.
    const bool early = kForm == ListForm::plain || !args.normalise;
    const OwnedFactors<T> factors(shape.own(number, 0), shape.own(number, 1));
    if (early) shape.release_own(number);
    float slopes[32], weighted[32];  // dk or dq; dv, or the correction of dq
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
        // The sums of this tile and the scores of the next start and end together: otherwise the
        // assembler serialises them.
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
    float factor = unscaled;  // per-head scales are already in dS of keys
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
// rows of 64 or 128 elements, only for sm_90a. Like WarpProducts of backward.cu, but the functions
// only start the work: each commits one group, for wait.

template <class Type, int kRowWidth>
struct GroupProducts {
  using T = Type;
  static constexpr bool kDropout = false;
  static constexpr int kWidth = kRowWidth;
  static constexpr bool kFilters = false;
  static constexpr int kColumns = 64;
  static constexpr int kUnit = 64;
  static constexpr int kRowBytes = kWidth * 2;
  static constexpr int kBlocks = 2;  // per multiprocessor
  using Scores = float[32];
  using Sums = float[kWidth / 2];
  using Factor = FragmentA<T>[4];
  using Matrix = Bands<T, kWidth, 64>;

  __device__ static float (&band(Sums& sums, int number))[32] {
    return *reinterpret_cast<float(*)[32]>(sums + 32 * number);
  }

  // Loads rows of two tensors with the 128 threads of a block: `count` ranks from `first` on, then
  // zeros.
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

  // An element of a matrix in an even column, and the next element.
  __device__ static float2 pair(const Matrix& matrix, int row, int column) {
    const Tile<T, 64> tile{matrix.base + column / 64 * Matrix::kBandBytes};
    return load_pair<T>(tile.address(row, column % 64));
  }

  // Before products of data in registers or of this thread's copies.
  __device__ static void fence() { wgmma_fence(); }
  // Before the barrier after which products read copied rows.
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

// Number `place` of a block's steps, -1 if there is none. In rounds, blocks take two at a time in
// alternating order, longest ranges first if ranges grow or shrink along a list.
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
  await_writes();  // first: sums after this kernel read the slots of tokens early
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
