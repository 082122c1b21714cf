// SPDX-License-Identifier: MIT
// Forward pass of lists (lists.h) on Hopper: out = softmax(scale q kᵀ) v over the ranks that a
// query sees, and its log-sum-exps, with an online softmax.
//
// A stream of steps (stream.cuh) whose owned rows are queries. Grid: one or a few blocks per
// multiprocessor (StreamRun). 512 threads: three warpgroups compute 64 queries each with 144 or 152
// registers, which hold outputs and (64 elements) queries; four warps load with 80 or 56. Shared
// memory, 210 to 225 KB: a ring of 10, 9 (statistics) or 5 (128 elements) tiles of keys and values,
// 6 or 3 places of queries, the plan (64 bytes per step), row ranges and statistics. kFold: first
// and last tile of a window, in which no query sees the same column, are weighted as one.
//
// Preconditions (plan.cu): 16-bit types, aligned rows less than 2 GiB apart, no filters, softmax
// weights, ranks and slots below 2^30. Other calls: forward.cu.
#include <cmath>
#include <cstdint>

#include "cuda/launch/device.h"
#include "cuda/launch/launch.h"
#include "cuda/lists/forward.h"
#include "cuda/lists/rows.cuh"
#include "cuda/lists/stream.cuh"
#include "cuda/prim/bands.cuh"
#include "cuda/prim/dependent.cuh"
#include "cuda/prim/mma.cuh"
#include "cuda/prim/store.cuh"

namespace coterie::cuda {
namespace {

// Columns of a tile of scores or weights, 64 by 64, in the registers of a warpgroup: a thread has
// columns 8 j + 2 (l%4) + {0, 1} of two rows, 16 of each. Counts and bits below refer to these 16.

// Number of them below `column` of the tile.
__device__ __forceinline__ int columns_below(int column) {
  const int own = min(max(column - static_cast<int>(threadIdx.x) % 4 * 2, 0), kStreamRows);
  return own / 8 * 2 + min(own % 8, 2);
}
// A bit for each that is not below; bits above the 16th are ignored.
__device__ __forceinline__ std::uint32_t columns_from(int column) {
  return ~0u << columns_below(column);
}

// Sets the scores of a row whose bit is 0 to -inf.
__device__ __forceinline__ void mask_columns(float (&s)[32], int half, std::uint32_t seen) {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    float& score = s[i / 2 * 4 + 2 * half + i % 2];
    score = seen >> i & 1 ? score : -INFINITY;
  }
}
// Takes the scores of another tile where the bit is 0.
__device__ __forceinline__ void replace_columns(float (&s)[32], const float (&other)[32], int half,
                                                std::uint32_t own) {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int at = i / 2 * 4 + 2 * half + i % 2;
    s[at] = own >> i & 1 ? s[at] : other[at];
  }
}
// Packed weights of a row: the first `count` move to `other` and are zeroed here.
__device__ __forceinline__ void split_columns(std::uint32_t (&p)[4][4],
                                              std::uint32_t (&other)[4][4], int half, int count) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    std::uint32_t& word = p[j / 2][half + j % 2 * 2];
    std::uint32_t own;  // 0 if shifted by 32 bits or more
    asm("shl.b32 %0, %1, %2;" : "=r"(own) : "r"(~0u), "r"(max(16 * count - 32 * j, 0)));
    other[j / 2][half + j % 2 * 2] = word & ~own;
    word &= own;
  }
}

// A lane's address for ldmatrix and stmatrix of its warp's 16 rows in a tile of 64 (Tile<T, 64>, at
// a multiple of 1024): the first 16 columns; the others are at ^ 32 bytes.
__device__ __forceinline__ std::uint32_t matrix_lane() {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int row = static_cast<int>(threadIdx.x) % kWarpgroup / 32 * 16 + lane % 16;
  return row * 128 + ((lane / 16 ^ lane % 8) << 4);
}
// A tile of keys or values in the ring, as right factor: the low word of its descriptor. Values
// that the compiler knows to be warp-uniform stay in uniform registers.
template <class T, int kDim>
struct RingTile {
  static constexpr int kBand = kStreamRows * 128 / 16;
  std::uint32_t low;

  __device__ std::uint64_t at(int offset) const {
    return static_cast<std::uint64_t>(0x40000040u) << 32 | (low + offset);
  }
  __device__ std::uint64_t by_columns(int d) const { return at(d / 4 * kBand + d % 4 * 2); }
  __device__ std::uint64_t by_rows(int k, int band) const { return at(k * 128 + band * kBand); }

  // The values next to a tile of keys.
  __device__ RingTile values() const { return {low + kDim / 64 * kBand}; }

  // Starts out = (kAdd 0) or += (1) p times the values of this tile.
  template <int kAdd>
  __device__ void add_products(float (&out)[kDim / 64][32], const std::uint32_t (&p)[4][4]) const {
#pragma unroll
    for (int k = 0; k < 4; ++k)
#pragma unroll
      for (int band = 0; band < kDim / 64; ++band)
        wgmma_step<T, 1>(kAdd + k, out[band], p[k], by_rows(k, band));
  }
};

// The queries of a step, as left factors: in registers if there are enough, which leaves more
// shared memory bandwidth to the keys.
template <class T, int kDim>
struct StepQueries {
  static constexpr bool kHeld = kDim == 64;
  std::uint32_t a[kHeld ? kDim / 16 : 1][4];
  Bands<T, kDim, kStreamRows> tile;

  // Loads the queries of a step; `negated` if their scores are negated and they are held.
  __device__ void load(std::uint32_t address, bool negated) {
    tile.base = address;
    if constexpr (kHeld) {
      const std::uint32_t from = address + matrix_lane();
#pragma unroll
      for (int d = 0; d < kDim / 16; ++d) ldmatrix_x4(a[d], from ^ d * 32);
      if (negated) {
#pragma unroll
        for (int i = 0; i < kDim / 4; ++i) a[i / 4][i % 4] ^= 0x80008000u;
      }
    }
  }
  // Starts the scores of a tile of keys.
  __device__ void scores(float (&s)[32], const RingTile<T, kDim>& keys) const {
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d)
      if constexpr (kHeld)
        wgmma_step<T, 0>(d, s, a[d], keys.by_columns(d));
      else
        wgmma_step<T, 0>(d, s, tile.by_columns(0, d), keys.by_columns(d));
  }
};

// Query metadata: which keys it sees, and the factors of its scores.
struct alignas(16) QueryFact {
  RankRange range;
  float exponent;  // of its scores, base 2; negative: of the negated scores
  float mean;      // times the row's width
};
struct QueryTileFacts {
  QueryFact facts[kStreamRows];
  int row[kStreamRows];  // output row; negative: none
  void* out;             // row 0
  float* lse;            // of row 0; null: not requested
};

// A lane's address for reading back rows written with matrix_lane(), eight lanes per row: rows 4 on
// are 512 bytes further, and every second group of four is at ^ 64.
__device__ __forceinline__ std::uint32_t row_lane() {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int row = static_cast<int>(threadIdx.x) % kWarpgroup / 32 * 16 + lane / 8;
  return row * 128 + ((lane % 8 ^ lane / 8) << 4);
}

// The two queries of a thread.
template <class T, int kDim, ListForm kForm>
struct GroupRows {
  RankRange shared;  // keys visible to all of the warp's queries
  RowSoftmax softmax[2];
  float exponent[2], mean[2];
  bool negative, opening;  // opening: some rows may have seen no key yet
  bool rounded;            // some rows have their scores scaled before weighting
  float out[kDim / 64][32];

  __device__ void start(const QueryTileFacts& tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const QueryFact own = tile.facts[group_row(half)];
      negative = own.exponent < 0.0f;
      exponent[half] = fabsf(own.exponent);
      mean[half] = negative && StepQueries<T, kDim>::kHeld ? -own.mean : own.mean;
      softmax[half] = {kLowestShift, 0.0f};
    }
    opening = true;
    rounded = false;
    const int warp = static_cast<int>(threadIdx.x) % kWarpgroup / 32 * 16;
    const RankRange first = tile.facts[warp].range, last = tile.facts[warp + 15].range;
    shared = {last.low, first.high};
  }
  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) out[i / 32][i % 32] = 0.0f;
  }

  // Turns products of the raw rows into scores, up to exponents. Once per tile.
  __device__ void finish(const ListProblem& problem, float (&s)[32], const RowStatistics* keys,
                         const QueryTileFacts& tile) const {
    if constexpr (kForm == ListForm::normalised) {
      if (problem.k_stats) {
#pragma unroll
        for (int i = 0; i < 32; i += 4) {
          const float4 two =  // mean and inverse, of two keys
              *reinterpret_cast<const float4*>(keys + i * 2 + threadIdx.x % 4 * 2);
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            s[i + 2 * half] = fmaf(-mean[half], two.x, s[i + 2 * half]) * two.y;
            s[i + 2 * half + 1] = fmaf(-mean[half], two.z, s[i + 2 * half + 1]) * two.w;
          }
        }
      }
    }
    if (!StepQueries<T, kDim>::kHeld && negative) {
#pragma unroll
      for (int i = 0; i < 32; ++i) s[i] = -s[i];
    }
    if (rounded) {  // by 1 where exponents are applied later
      const float factor[2] = {fabsf(tile.facts[group_row(0)].exponent) / exponent[0],
                               fabsf(tile.facts[group_row(1)].exponent) / exponent[1]};
#pragma unroll
      for (int i = 0; i < 32; ++i) s[i] *= factor[i / 2 % 2];
    }
  }
  // A shift beyond 2^24 is rounded to a multiple of 2 or more, while weigh() does not round its
  // products: the largest weight would be, and stay, far from 1. From this tile on, scores of such
  // rows are scaled and rounded as their shift was.
  __device__ void round_far_rows(float (&s)[32]) {
    const auto far = [&](int half) {
      return fabsf(softmax[half].shift) > 0x1p24f && !fresh(half) && exponent[half] != 1.0f;
    };
    if (!__any_sync(~0u, far(0) || far(1))) return;
    rounded = true;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float factor = far(half) ? exponent[half] : 1.0f;
#pragma unroll
      for (int i = 0; i < 16; ++i) s[i / 2 * 4 + 2 * half + i % 2] *= factor;
      if (far(half)) exponent[half] = 1.0f;
    }
  }

  // Sets to -inf the hidden ones of the keys from rank `begin` on.
  __device__ static void mask(float (&s)[32], int begin, const QueryTileFacts& tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const RankRange range = tile.facts[group_row(half)].range;
      mask_columns(s, half, columns_from(range.low - begin) & ~columns_from(range.high - begin));
    }
  }

  // The largest score of this thread in a row; four independent chains.
  __device__ static float largest(const float (&s)[32], int half) {
    float top[4];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float score = s[i / 2 * 4 + 2 * half + i % 2];
      top[i % 4] = i < 4 ? score : fmaxf(top[i % 4], score);
    }
    return fmaxf(fmaxf(top[0], top[1]), fmaxf(top[2], top[3]));
  }

  // This row has seen no key yet.
  __device__ bool fresh(int half) const { return softmax[half].shift == kLowestShift; }
  // Sets the shifts of the rows that see their first keys.
  __device__ void begin_rows(const float (&s)[32]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float top = quad_max(largest(s, half)) * exponent[half];
      if (fresh(half)) softmax[half].shift = fmaxf(top, kLowestShift);
    }
  }
  // Raises the shifts of the rows that are `due` to their scores of this tile; the sums so far are
  // rescaled, for other rows by a factor of 1.
  __device__ void raise(const float (&s)[32], const bool (&due)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float top = quad_max(largest(s, half)), old = softmax[half].shift;
      if (due[half]) softmax[half].shift = fmaxf(old, top * exponent[half]);
      const float factor = exp2_approximate(old - softmax[half].shift);
      softmax[half].sum *= factor;
#pragma unroll
      for (int i = 0; i < kDim / 4; ++i) out[i / 16][i % 16 / 2 * 4 + 2 * half + i % 2] *= factor;
    }
  }

  // Weights of 64 keys, packed, and their sums.
  __device__ void weigh(const float (&s)[32], std::uint32_t (&p)[4][4], float (&sum)[2]) const {
    sum[0] = sum[1] = 0.0f;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int half = i % 2;
      const float first = exp2_approximate(fmaf(s[2 * i], exponent[half], -softmax[half].shift));
      const float second =
          exp2_approximate(fmaf(s[2 * i + 1], exponent[half], -softmax[half].shift));
      sum[half] = sum[half] + first + second;
      p[i / 4][i % 4] = pack2<T>(first, second);
    }
  }

  // Prepares scores of the 64 keys from rank `begin` on for weighting. The first keys that a row
  // sees set its shift.
  __device__ void prepare(float (&s)[32], int begin, const QueryTileFacts& tile) {
    const bool cut = begin < shared.low || begin + kStreamRows > shared.high;
    if (cut) mask(s, begin, tile);
    if (opening) {
      if (__any_sync(~0u, fresh(0) || fresh(1))) {
        begin_rows(s);
        round_far_rows(s);
      }
      opening = cut;
    }
  }
  // Turns scores into weights. True: some are large, as their sums show; shifts were raised to the
  // largest scores, and the scores must be weighted again, which leaves none large.
  __device__ bool overflows(float (&s)[32], std::uint32_t (&p)[4][4]) {
    constexpr float kLarge = 1024.0f;
    float sum[2];
    weigh(s, p, sum);
    if (__any_sync(~0u, fmaxf(sum[0], sum[1]) > kLarge)) {
      const bool due[2] = {quad_max(sum[0]) > kLarge, quad_max(sum[1]) > kLarge};
      raise(s, due);
      round_far_rows(s);
      return true;
    }
    softmax[0].sum += sum[0];
    softmax[1].sum += sum[1];
    return false;
  }

  // Merges scores of the keys from rank `begin` on and of those `distance` further, in which no row
  // sees the same column, into those of one tile, the first of the step.
  __device__ void fold(float (&s)[32], const float (&far)[32], int begin, int distance,
                       const QueryTileFacts& tile) {
    bool full = true;  // every column is visible in one or the other
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const RankRange range = tile.facts[group_row(half)].range;
      replace_columns(s, far, half, columns_from(range.low - begin));
      full = full && range.high >= begin + kStreamRows &&
             range.high - max(range.low, begin) >= distance;
    }
    opening = !__all_sync(~0u, full);
    if (opening) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const RankRange range = tile.facts[group_row(half)].range;
        const std::uint32_t near = columns_from(range.low - begin);
        mask_columns(s, half,
                     (near & ~columns_from(range.high - begin)) |
                         (~near & ~columns_from(range.high - begin - distance)));
      }
    }
    begin_rows(s);
    round_far_rows(s);
  }
  // Turns scores of the tile that set the shifts into weights: none is above 1.
  __device__ void weigh_first(const float (&s)[32], std::uint32_t (&p)[4][4]) {
    float sum[2];
    weigh(s, p, sum);
    softmax[0].sum = sum[0];
    softmax[1].sum = sum[1];
  }
  // Moves weights of a folded tile's further keys to `far`.
  __device__ static void split(std::uint32_t (&p)[4][4], std::uint32_t (&far)[4][4], int begin,
                               const QueryTileFacts& tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      split_columns(p, far, half, columns_below(tile.facts[group_row(half)].range.low - begin));
  }

  __device__ void settle() {
#pragma unroll
    for (int band = 0; band < kDim / 64; ++band) wgmma_settle(out[band]);
  }

  // Outputs are staged in `stage`, 64 rows of shared memory of which a warp uses its own 16, and
  // are written as whole rows.
  __device__ void write(const ListForwardArgs<T>& args, const QueryTileFacts& tile,
                        std::uint32_t stage) {
    const int lane = static_cast<int>(threadIdx.x) % 32, width = args.problem.width;
    int number[4];  // rows that this lane writes
#pragma unroll
    for (int i = 0; i < 4; ++i) number[i] = tile.row[(group_row(0) & ~15) + 4 * i + lane / 8];
    T* base = static_cast<T*>(tile.out) + lane % 8 * 8;
    float factor[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = tile.row[group_row(half)];
      const float sum = quad_sum(softmax[half].sum);
      if (tile.lse && threadIdx.x % 4 == 0 && row >= 0)
        store_global(tile.lse + row, (softmax[half].shift + log2_approximate(sum)) * kLn2);
      factor[half] = sum == 0.0f ? 0.0f : reciprocal_approximate(sum);
    }
    const std::uint32_t to = stage + matrix_lane();
#pragma unroll
    for (int band = 0; band < kDim / 64; ++band)
      stage_sums<T>(to + band * kStreamRows * 128, out[band], factor);
    const std::uint32_t from = stage + row_lane();
    const auto pitch = static_cast<std::uint32_t>(args.slot_rows ? width : args.out.row) * 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      T* target = row_at(base, number[i], pitch);
#pragma unroll
      for (int band = 0; band < kDim / 64; ++band) {
        const uint4 word = load_shared16((from ^ i % 2 * 64) + 512 * i + band * kStreamRows * 128);
        if (number[i] >= 0 && 64 * band + lane % 8 * 8 < width)
          store_global(target + 64 * band, word);
      }
    }
  }
};

// Unroll factor of the loops that copy rows: the longer code with statistics must fit into the
// instruction caches.
template <int kDim, ListForm kForm>
constexpr int kLoadUnroll = kDim == 64 && kForm == ListForm::normalised ? 8 : kStreamRows / 4;

template <int kDim, ListForm kForm>
using ForwardStream =
    StreamShape<kForwardGroups, kDim, 1, forward_ring(kDim, kForm), kDim == 64 ? 6 : 3,
                (sizeof(QueryTileFacts) + kStreamRows - 1) / kStreamRows,
                kForm == ListForm::plain ? 0 : sizeof(RowStatistics)>;

// Next to the tiles is all row metadata that computing warps need.
template <int kDim, ListForm kForm>
struct ForwardShape : ForwardStream<kDim, kForm> {
  using ForwardStream<kDim, kForm>::StreamShape;

  __device__ QueryTileFacts& queries(int step) const {
    return *reinterpret_cast<QueryTileFacts*>(this->own_facts(step));
  }
  __device__ RowStatistics* keys(int place) const {
    return reinterpret_cast<RowStatistics*>(this->facts_at(place));
  }
};

template <class T>
__device__ void make_query_step(const ListForwardArgs<T>& args, const StepPlace& at,
                                StreamStep& step) {
  make_step<false>(args.problem, at, step);
  // Members of a list end before its last slot: writes the log-sum-exps of the empty slots.
  const SlotSide& side = args.problem.q;
  if (side.layout != ListLayout::members || !args.slot_rows || !args.lse) return;
  const std::int64_t slot =
      ((static_cast<std::int64_t>(at.tile.item) * side.heads + at.head) * side.lists +
       at.tile.list) *
      side.width;
  const int first = at.tile.first, last = min(first + kStreamRows, side.width);
  for (int rank = first + max(step.rows, 0); rank < last; ++rank) args.lse[slot + rank] = -INFINITY;
}

// The loading warps.
template <class T, int kDim, ListForm kForm>
__device__ void load_query_steps(const ListForwardArgs<T>& args,
                                 const ForwardShape<kDim, kForm>& shape, const StreamPlan& plan,
                                 bool rounds) {
  using Shape = ForwardShape<kDim, kForm>;
  const ListProblem& problem = args.problem;
  const int lane = threadIdx.x % 32;
  const auto load_queries = [&](int number, const StreamStep& step, const auto& ready) {
    int row[2];
    list_rows(row, problem.q, step.own_at, step.rows);
    const float scale = problem.score_scale(step.head) * kLog2e;
    const std::int64_t base =
        ListProblem::row_base(problem.q, {step.batch, step.own_begin, 0}, step.head);
    RowStatistics stats[2] = {kNoStatistics, kNoStatistics};
    if (kForm == ListForm::normalised && problem.q_stats) {
      stats[0] = problem.q_stats[base + max(row[0], 0)];
      stats[1] = problem.q_stats[base + max(row[1], 0)];
    }
    ready();
    load_list_rows<kDim, kLoadUnroll<kDim, kForm>>(
        shape.own(number, 0), args.q.rows(step.batch, step.head, step.own_begin), row);
    QueryTileFacts& tile = shape.queries(number);
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      const int own_row = half == 0 ? row[0] : row[1];
      const int place = lane + 32 * half, last = min(place, step.rows - 1);
      QueryFact fact{{0, 0}, scale, 0.0f};
      if (problem.rule == ListRule::ends) {
        const int high = min(problem.ends[step.own_slot + last], step.count);
        fact.range = {max(high - problem.window, 0), max(high, 0)};
      } else {
        fact.range = problem.range_at(step.count, step.first + last + step.shift);
      }
      if constexpr (kForm == ListForm::normalised) {
        const RowStatistics own = half == 0 ? stats[0] : stats[1];
        fact.exponent *= own.inverse;
        fact.mean = own.mean * static_cast<float>(problem.width);
      }
      tile.facts[place] = fact;
      tile.row[place] = own_row < 0 ? -1 : args.slot_rows ? step.own_slot + place : own_row;
    }
    tile.out =
        args.slot_rows ? args.slot_rows : args.out.rows(step.batch, step.head, step.own_begin).data;
    tile.lse = args.lse && !args.slot_rows ? args.lse + base : args.lse;
  };
  int head = -1, key_head = 0, value_head = 0;  // of the previous tile: divisions are slow
  const auto load_keys = [&](int number, const StreamStep& step, int place, const auto& ready) {
    if (step.head != head) {
      head = step.head;
      key_head = head / problem.group;
      value_head = head / problem.value_group;
    }
    int row[2];
    const int rank = step.low + place * kStreamRows;
    list_rows(row, problem.k, step.other_at + (problem.k.index ? rank : rank * problem.k.lists),
              step.count - rank);
    ready();
    const std::uint32_t tiles[2] = {shape.tile(number, 0), shape.tile(number, 1)};
    const Rows<const T> rows[2] = {args.k.rows(step.batch, key_head, step.other_begin),
                                   args.v.rows(step.batch, value_head, step.other_begin)};
    load_list_rows<kDim, kLoadUnroll<kDim, kForm>>(tiles, rows, row);
    if constexpr (kForm == ListForm::normalised) {
      if (!problem.k_stats) return;
      const RowStatistics* stats =
          problem.k_stats +
          (static_cast<std::int64_t>(step.batch) * problem.k.heads + key_head) *
              problem.k.spans.rows +
          step.other_begin;
#pragma unroll
      for (int half = 0; half < 2; ++half)
        cp_async_value(shape.keys(number % Shape::kRing) + lane + 32 * half,
                       stats + max(row[half], 0), row[half] >= 0);
    }
  };
  load_steps(shape, plan, rounds, load_queries, load_keys);
}

constexpr int kTile = kStreamRows, kGroups = kForwardGroups;
template <int kDim, bool kFold>
constexpr int kProducerRegisters = kDim == 64 && !kFold ? 80 : 56;
template <int kDim, bool kFold>
constexpr int kConsumerRegisters = kDim == 64 && !kFold ? 144 : 152;

// The first and last tile of a step, in which no query sees the same column: they are weighted as
// one. s: scores of the first, and afterwards of the second tile.
template <class T, class Rows>
__device__ void attend_ends(Rows& rows, const StepQueries<T, 64>& queries,
                            const QueryTileFacts& facts, float (&s)[32], int begin, int distance,
                            const RingTile<T, 64>& first, const RingTile<T, 64>& second,
                            const RingTile<T, 64>& last) {
  float far[32];
  wgmma_fence();
  queries.scores(far, last);
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_settle(far);
  rows.fold(s, far, begin, distance, facts);
  std::uint32_t p[4][4], p_far[4][4];
  rows.weigh_first(s, p);
  rows.split(p, p_far, begin, facts);
  wgmma_fence();
  last.values().template add_products<0>(rows.out, p_far);
  first.values().template add_products<1>(rows.out, p);
  queries.scores(s, second);
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_settle(s);
  rows.settle();
}

// With kFold, steps of more than `fold` tiles weight their first and last tile as one.
template <class T, int kDim, ListForm kForm, bool kFold>
__device__ void consume(const ListForwardArgs<T>& args, const ForwardShape<kDim, kForm>& shape,
                        const StreamPlan& plan, int fold) {
  using Shape = ForwardShape<kDim, kForm>;
  constexpr int kChunk = Shape::kRing / 2;  // tiles waited for at a time
  const ListProblem& problem = args.problem;
  StreamReader reader;
  // Waits for the step's tiles [tile, end) as far as they arrive without a release.
  const auto await = [&](int tile, int end) {
    shape.wait_below(min(min(end, tile + kChunk), Shape::reach(reader)), reader);
    fence_async_proxy();
  };
  using Ring = RingTile<T, kDim>;
  constexpr int kTensor = Shape::kTensorBytes / 16;
  const std::uint32_t ring = uniform(shape.base / 16 | 1 << 16);
  const std::uint32_t wrap = ring + Shape::kRing * 2 * kTensor;
  bool started = false;  // the first scores of a step are available
  StepQueries<T, kDim> queries;
  float s[32];
#pragma unroll 1
  for (int number = uniform(threadIdx.x / kWarpgroup); number < plan.steps; number += kGroups) {
    const StreamStep& step = shape.plan()[number];
    const int first = uniform(step.ring), end = first + uniform(step.tiles);
    const int after = number + kGroups;
    int keep = plan.tiles, after_tiles = 0, after_fresh = 0;  // of the next step
    if (after < plan.steps) {
      keep = uniform(shape.plan()[after].ring);
      after_tiles = uniform(shape.plan()[after].tiles);
      after_fresh = uniform(shape.plan()[after].fresh);
    }
    std::uint32_t keys = ring + first % Shape::kRing * (2 * kTensor);
    if (!started) {
      shape.release_below(first, reader);
      shape.wait_own(number);
      await(first, end);
      if (first < end) {
        queries.load(shape.own(number, 0), shape.queries(number).facts[0].exponent < 0.0f);
        wgmma_fence();
        queries.scores(s, Ring{keys});
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_settle(s);
      }
    }
    GroupRows<T, kDim, kForm> rows;
    rows.start(shape.queries(number));
    if (!kFold || first == end) rows.clear();
    started = false;
    if (first < end) {
      std::uint32_t p[4][4];
      int tile = first, stop = end, begin = uniform(step.low);
      if constexpr (kFold) {
        const QueryTileFacts& facts = shape.queries(number);
        // Later queries must not affect the order in which an earlier query's weights are summed.
        if (end - first > fold && facts.facts[0].range.high <= begin + fold * kTile + 1) {
          shape.release_below(first, reader);
          await(end - kChunk, end);
          const std::uint32_t second = keys + 2 * kTensor == wrap ? ring : keys + 2 * kTensor;
          const std::uint32_t last = uniform(ring + (end - 1) % Shape::kRing * (2 * kTensor));
          attend_ends<T>(rows, queries, facts, s, begin, fold * kTile, Ring{keys}, Ring{second},
                         Ring{last});
          ++tile;
          --stop;
          begin += kTile;
          keys = second;
        } else {
          rows.clear();
        }
      }
#pragma unroll 1
      for (;;) {
        if constexpr (kFold) keys = uniform_trips(keys);
        rows.finish(problem, s, shape.keys(tile % Shape::kRing), shape.queries(number));
        rows.prepare(s, begin, shape.queries(number));
        while (rows.overflows(s, p)) continue;
        if (++tile == stop) break;
        begin += kTile;
        if (tile >= reader.ready) {
          shape.release_below(min(tile - 1, keep), reader);
          await(tile, end);
        }
        const Ring values = Ring{keys}.values();
        keys += 2 * kTensor;
        if (keys == wrap) keys = ring;
        // Products start and end in one step: otherwise the assembler serialises them.
        wgmma_fence();
        values.template add_products<1>(rows.out, p);
        queries.scores(s, Ring{keys});
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_settle(s);
        rows.settle();
      }
      if constexpr (kFold) keys = uniform_trips(keys);
      const Ring values = Ring{keys}.values();
      // The first scores of the next step, if its first tile, and those that are loaded before its
      // queries, arrive without a release.
      if (Shape::kSlots > kGroups && after_tiles > 0 &&
          keep + max(after_tiles - after_fresh, 1) <= Shape::reach(reader)) {
        started = true;
        shape.wait_own(after);
        queries.load(shape.own(after, 0), shape.queries(after).facts[0].exponent < 0.0f);
        await(keep, keep + after_tiles);
        wgmma_fence();
        values.template add_products<1>(rows.out, p);
        queries.scores(s, Ring{ring + keep % Shape::kRing * (2 * kTensor)});
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_settle(s);
        rows.settle();
      } else {
        wgmma_fence();
        values.template add_products<1>(rows.out, p);
        wgmma_commit();
        wgmma_wait<0>();
        rows.settle();
      }
    }
    shape.release_below(min(end, keep), reader);
    if (!StepQueries<T, kDim>::kHeld) sync_group();  // all have read the queries
    rows.write(args, shape.queries(number), shape.own(number, 0));
    shape.release_own(number);
  }
  shape.release_below(plan.tiles, reader);
}

template <class T, int kDim, ListForm kForm, bool kFold>
__global__ void __launch_bounds__((kGroups + 1) * kWarpgroup, 1)
    list_forward_sm90a_kernel(const __grid_constant__ ListForwardArgs<T> args, const StreamRun run,
                              int fold) {
  await_writes();  // first: sums after this kernel read the slots of tokens early
  release_next();
  extern __shared__ __align__(1024) unsigned char memory[];
  const ForwardShape<kDim, kForm> shape(memory);
  shape.init();
  static_assert(kCutBytes <= ForwardShape<kDim, kForm>::kPlanAt, "room to measure lists");
  const bool by_work = kForm != ListForm::plain && run.by_work;
  WorkCut<false> cut(args.problem, memory);
  const int count = by_work ? cut.take() : run.count;
  const StreamPlan plan = plan_steps(shape, count, run.rounds, 1, [&](int place, StreamStep& step) {
    const StepPlace at =
        by_work ? cut.find(place) : numbered_step(args.problem.q, args.tiles, run.in_order(place));
    make_query_step(args, at, step);
  });
  if (threadIdx.x >= kGroups * kWarpgroup) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kProducerRegisters<kDim, kFold>));
    load_query_steps<T, kDim, kForm>(args, shape, plan, run.rounds);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kConsumerRegisters<kDim, kFold>));
    consume<T, kDim, kForm, kFold>(args, shape, plan, fold);
  }
}

template <class T, int kDim, ListForm kForm, bool kFold = false>
void launch(const ListForwardArgs<T>& args, const ListForwardPlan& plan, cudaStream_t stream) {
  using Shape = ForwardShape<kDim, kForm>;
  launch_early("list_forward_sm90a", list_forward_sm90a_kernel<T, kDim, kForm, kFold>,
               dim3(static_cast<unsigned>(plan.run.blocks)), Shape::kThreads, Shape::kBytes, stream,
               args, plan.run, plan.fold);
}

}  // namespace

template <class T>
void launch_list_forward_sm90a(const ListForwardArgs<T>& args, const ListForwardPlan& plan,
                               cudaStream_t stream) {
  const bool plain = plan.form == ListForm::plain, narrow = plan.problem.width <= 64;
  if (plan.fold > 0)
    launch<T, 64, ListForm::plain, true>(args, plan, stream);
  else if (narrow && plain)
    launch<T, 64, ListForm::plain>(args, plan, stream);
  else if (narrow)
    launch<T, 64, ListForm::normalised>(args, plan, stream);
  else if (plain)
    launch<T, 128, ListForm::plain>(args, plan, stream);
  else
    launch<T, 128, ListForm::normalised>(args, plan, stream);
}

template void launch_list_forward_sm90a(const ListForwardArgs<Bf16>&, const ListForwardPlan&,
                                        cudaStream_t);
template void launch_list_forward_sm90a(const ListForwardArgs<F16>&, const ListForwardPlan&,
                                        cudaStream_t);

}  // namespace coterie::cuda
