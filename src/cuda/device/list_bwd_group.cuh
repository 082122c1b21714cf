// SPDX-License-Identifier: MIT
// The computing warpgroups of the backward pass of lists on Hopper: 64 owned rows of up to 64
// elements over the tiles of a step (list_bwd_stream.cuh).
#pragma once

#include "cuda/device/list_bwd_stream.cuh"
#include "cuda/device/row_chunk.cuh"
#include "cuda/device/warp.cuh"

namespace coterie::cuda {

// Calls start with 0 .. 3. Products of different accumulators take turns, as those of one wait for
// each other.
template <class Start>
__device__ __forceinline__ void for_depths(const Start& start) {
#pragma unroll
  for (int k = 0; k < 4; ++k) start(k);
}

// Owned rows of two tensors as left factors, in registers.
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
  // A use behind the loop that multiplies: without one ptxas 13.0 gives the registers away in it.
  __device__ void keep(float& value) const {
    std::uint32_t all = 0;
#pragma unroll
    for (int i = 0; i < 32; ++i) all ^= a[i / 16][i / 4 % 4][i % 4];
    asm volatile("{.reg .pred p; setp.eq.u32 p, %1, 0x7f123457; @p add.f32 %0, %0, 0f00000000;}"
                 : "+f"(value)
                 : "r"(all));
  }
};
// Starts depth k of sums: 16 of the rows of a tile, with their factors.
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

// A lane has elements of two owned rows. What becomes of sums at the end of a step is done for one
// row after the other: those of the row at work are i with i % 4 < 2. The same instructions do both
// where they are many, in the way back through the normalisation: what runs once a step takes as
// long as its code.
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

// Sums of owned row `own` times a factor, to a row of a tensor or to a slot, both aligned.
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

// As denormalise of list_bwd_block.cuh, with y = inverse (x - mean) multiplied out, of owned row
// `own`, whose mean is given: the upper one of a lane's rows, or with kSide = 1 the lower. Rows and
// sums are 0 beyond their width. Returns g . y.
template <int kSide, class T>
__device__ __forceinline__ float denormalise(float (&sum)[32], const Tile<T, 64>& rows, int own,
                                             const RowStatistics& stats, int width) {
  float total = 0.0f, along = 0.0f;
  float2 x[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const int column = j * 8 + static_cast<int>(threadIdx.x) % 4 * 2, i = 4 * j + 2 * kSide;
    x[j] = unpack2<T>(load_shared32(rows.address(own, column)));
    total += sum[i] + sum[i + 1];
    along = fmaf(sum[i + 1], x[j].y, fmaf(sum[i], x[j].x, along));
  }
  const float share = 1.0f / static_cast<float>(width), mean = stats.mean, inverse = stats.inverse;
  total = quad_sum(total);
  const float product = fmaf(-mean, total, quad_sum(along)) * inverse;
  const float slope = product * share * inverse * inverse;
  const float shift = fmaf(slope, mean, -total * share * inverse);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const int i = 4 * j + 2 * kSide;
    sum[i] = fmaf(-slope, x[j].x, fmaf(sum[i], inverse, shift));
    sum[i + 1] = fmaf(-slope, x[j].y, fmaf(sum[i + 1], inverse, shift));
  }
  return product;
}
// The same of both rows of a lane.
template <class T>
__device__ __forceinline__ void denormalise(float (&sum)[32], const Tile<T, 64>& rows,
                                            const RowStatistics (&stats)[2], int width,
                                            float (&product)[2]) {
  product[0] = denormalise<0>(sum, rows, group_row(0), stats[0], width);
  product[1] = denormalise<1>(sum, rows, group_row(1), stats[1], width);
}

// A warp's way along the tiles of the ring, as StreamReader, one tile after the other: so that all
// of it stays in uniform registers.
template <class Shape>
struct TileWalk {
  const Shape& shape;
  int ready = 0, place = 0, phase = 0;  // tiles that it waited for; where the next will be
  int released = 0;

  __device__ explicit TileWalk(const Shape& stream) : shape(stream) {}

  // Waits for tile `number` and, as far as they come by themselves, some that follow below `end`.
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

// Of 8 sums each lane keeps one, over all keys of its warp: of column 8 (l/8) + 2 (l%4) + l/4%2.
__device__ __forceinline__ float reduce_columns(const float (&sum)[8], unsigned lane) {
  float four[4], two[2];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float kept = lane & 16 ? sum[i + 4] : sum[i], sent = lane & 16 ? sum[i] : sum[i + 4];
    four[i] = kept + __shfl_xor_sync(~0u, sent, 16);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float kept = lane & 8 ? four[i + 2] : four[i], sent = lane & 8 ? four[i] : four[i + 2];
    two[i] = kept + __shfl_xor_sync(~0u, sent, 8);
  }
  const float kept = lane & 4 ? two[1] : two[0], sent = lane & 4 ? two[0] : two[1];
  return kept + __shfl_xor_sync(~0u, sent, 4);
}

}  // namespace coterie::cuda
