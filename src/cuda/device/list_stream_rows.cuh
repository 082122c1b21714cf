// SPDX-License-Identifier: MIT
// The 64 queries of a step (list_stream.cuh) in the registers of a warpgroup: their scores become
// weights, and their outputs rows or slots.
#pragma once

#include <cstdint>

#include "cuda/device/bands.cuh"
#include "cuda/device/list_forward.cuh"
#include "cuda/device/list_rows.cuh"
#include "cuda/device/list_stream.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/device/store.cuh"

namespace coterie::cuda {

// Of a query: which keys it sees, and what its scores are made of.
struct alignas(16) QueryFact {
  RankRange range;
  float exponent;  // of its scores, base 2; below 0: of the negated ones
  float mean;      // times the row's width
};
struct QueryTileFacts {
  QueryFact facts[kStreamRows];
  int row[kStreamRows];
};

// The two queries of a thread.
template <class T, int kDim, ListForm kForm>
struct GroupRows {
  RankRange range[2];
  RankRange seen, shared;  // by any, and by all of the warp's queries
  RowSoftmax softmax[2];
  float exponent[2], mean[2];
  bool negative;
  float out[kDim / 64][32];

  __device__ void start(const QueryTileFacts& tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const QueryFact own = tile.facts[group_row(half)];
      range[half] = own.range;
      negative = own.exponent < 0.0f;
      exponent[half] = fabsf(own.exponent);
      mean[half] = own.mean;
      softmax[half] = {kLowestShift, 0.0f};
    }
    seen = {__shfl_sync(~0u, range[0].low, 0), __shfl_sync(~0u, range[1].high, 31)};
    shared = {__shfl_sync(~0u, range[1].low, 31), __shfl_sync(~0u, range[0].high, 0)};
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) out[i / 32][i % 32] = 0.0f;
  }

  // Products of the rows as they are become scores, up to exponents.
  __device__ void finish(const ListProblem& problem, float (&s)[32],
                         const RowStatistics* keys) const {
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
    if (negative) {
#pragma unroll
      for (int i = 0; i < 32; ++i) s[i] = -s[i];
    }
  }

  // -inf for what is out of sight of the keys from rank `begin` on.
  __device__ void mask(float (&s)[32], int begin) const {
    const int first = begin + static_cast<int>(threadIdx.x) % 4 * 2;
    if (begin < shared.low) {
      const int low[2] = {range[0].low - first, range[1].low - first};
#pragma unroll
      for (int i = 0; i < 32; ++i)
        if (i / 4 * 8 + i % 2 < low[i / 2 % 2]) s[i] = -INFINITY;
    }
    if (begin + kStreamRows > shared.high) {
      const int high[2] = {range[0].high - first, range[1].high - first};
#pragma unroll
      for (int i = 0; i < 32; ++i)
        if (i / 4 * 8 + i % 2 >= high[i / 2 % 2]) s[i] = -INFINITY;
    }
  }

  // The largest score of this thread in a row; four chains, which do not wait for each other.
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
  // The shift of a row follows its scores, of this tile on; it looks at its own only. By the lanes
  // of a row.
  __device__ float raise(const float (&s)[32], int half) {
    const unsigned row = 0xfu << (threadIdx.x % 32 / 4 * 4);
    float top = largest(s, half);
    top = fmaxf(top, __shfl_xor_sync(row, top, 1));
    top = fmaxf(top, __shfl_xor_sync(row, top, 2));
    return softmax[half].raise(top, exponent[half]);
  }
  __device__ void scale_row(int half, float factor) {
#pragma unroll
    for (int i = 0; i < kDim / 4; ++i) out[i / 16][i % 16 / 2 * 4 + 2 * half + i % 2] *= factor;
  }

  // Weights of the 16 keys of a block, packed, and their sums.
  __device__ void weigh16(const float (&s)[32], int block, std::uint32_t (&p)[4][4],
                          float (&sum)[2]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int half = i % 2, at = 8 * block + 2 * i;
      const float first = exp2_approximate(fmaf(s[at], exponent[half], -softmax[half].shift));
      const float second = exp2_approximate(fmaf(s[at + 1], exponent[half], -softmax[half].shift));
      sum[half] = sum[half] + first + second;
      p[block][i] = pack2<T>(first, second);
    }
  }
  // Of the 64 keys from rank `begin` on. Where not all queries see all keys, 16 keys that none of
  // the warp's sees cost nothing.
  __device__ void weigh(const float (&s)[32], int begin, bool cut, std::uint32_t (&p)[4][4],
                        float (&sum)[2]) const {
    sum[0] = sum[1] = 0.0f;
    if (!cut) {
#pragma unroll
      for (int block = 0; block < 4; ++block) weigh16(s, block, p, sum);
      return;
    }
#pragma unroll
    for (int block = 0; block < 4; ++block) {
      const int first = begin + 16 * block;
      p[block][0] = p[block][1] = p[block][2] = p[block][3] = 0;
      if (first + 16 > seen.low && first < seen.high) weigh16(s, block, p, sum);
    }
  }

  // Scores of the 64 keys from rank `begin` on become weights. The first keys that a row sees set
  // its shift; later ones raise it only where weights become large, which their sums tell.
  __device__ void attend(float (&s)[32], int begin, std::uint32_t (&p)[4][4]) {
    constexpr float kLarge = 1024.0f;
    const bool cut = begin < shared.low || begin + kStreamRows > shared.high;
    if (cut) mask(s, begin);
    if (__any_sync(~0u, fresh(0) || fresh(1))) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        if (fresh(half)) raise(s, half);
    }
    float sum[2];
    weigh(s, begin, cut, p, sum);
    if (__any_sync(~0u, sum[0] > kLarge || sum[1] > kLarge)) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        if (quad_max(sum[half]) > kLarge) scale_row(half, raise(s, half));
      weigh(s, begin, cut, p, sum);
    }
    softmax[0].sum += sum[0];
    softmax[1].sum += sum[1];
  }

  // Row `half` of the outputs, times a factor.
  __device__ void store(T* to, int width, bool there, int half, float factor) const {
    const int lane = threadIdx.x % 4;
#pragma unroll
    for (int d = 0; d < kDim / 32; ++d) {
      std::uint32_t word[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int i = d % 2 * 16 + 4 * n + 2 * half;
        word[n] = pack2<T>(out[d / 2][i] * factor, out[d / 2][i + 1] * factor);
      }
      transpose_quad(word);
      const int column = 32 * d + 8 * lane;
      if (there && column < width)
        *reinterpret_cast<uint4*>(to + column) = make_uint4(word[0], word[1], word[2], word[3]);
    }
  }
  __device__ void store(float* to, int width, bool there, int half, float factor) const {
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      const int column = 8 * n + static_cast<int>(threadIdx.x) % 4 * 2, i = n % 8 * 4 + 2 * half;
      if (there && column < width)
        *reinterpret_cast<float2*>(to + column) =
            make_float2(out[n / 8][i] * factor, out[n / 8][i + 1] * factor);
    }
  }

  __device__ void write(const ListForwardArgs<T>& args, const StreamStep& step,
                        const int (&row)[2]) {
    const ListProblem& problem = args.problem;
    const Rows<T> rows = args.out.rows(step.batch, step.head, step.own_begin);
    const std::int64_t base =
        ListProblem::row_base(problem.q, {step.batch, step.own_begin, 0}, step.head);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int place = group_row(half);
      const bool there = place < step.rows;
      const std::int64_t to = args.slot_out ? step.own_slot + place : row[half];
      const float sum = quad_sum(softmax[half].sum);
      if (there && args.lse && threadIdx.x % 4 == 0)
        args.lse[args.slot_out ? to : base + to] = row_lse(softmax[half], sum);
      const float factor = sum == 0.0f ? 0.0f : __fdividef(1.0f, sum);
      if (args.slot_out)
        store(args.slot_out + to * problem.width, problem.width, there, half, factor);
      else
        store(rows.row(to), problem.width, there, half, factor);
    }
  }
};

// The queries of a step, as left factors: in registers where there are enough, which leaves more of
// shared memory's time to the keys.
template <class T, int kDim>
struct StepQueries {
  static constexpr bool kHeld = kDim == 64;
  std::uint32_t a[kHeld ? kDim / 16 : 1][4];
  Bands<T, kDim, kStreamRows> tile;

  __device__ void load(std::uint32_t address) {
    tile.base = address;
    if constexpr (kHeld) {
#pragma unroll
      for (int d = 0; d < kDim / 16; ++d) {
        FragmentA<T> fragment;
        load_a(fragment, Tile<T, 64>{address}, static_cast<int>(threadIdx.x) % kWarpgroup / 32 * 16,
               d * 16);
#pragma unroll
        for (int i = 0; i < 4; ++i) a[d][i] = fragment.r[i];
      }
    }
  }
  // Starts the scores of a tile of keys.
  __device__ void scores(float (&s)[32], const Bands<T, kDim, kStreamRows>& keys) const {
    if constexpr (kHeld) {
      wgmma<T, 0, 0>(s, a[0], keys.by_columns(0, 0));
#pragma unroll
      for (int d = 1; d < kDim / 16; ++d) wgmma<T, 1, 0>(s, a[d], keys.by_columns(0, d));
    } else {
      row_products(s, tile, 0, keys, 0);
    }
  }
};

}  // namespace coterie::cuda
