// SPDX-License-Identifier: MIT
// A block of the backward pass of lists (backward.h): its arguments, its shared memory, what it
// works on and how its sums leave.
#pragma once

#include <cstdint>

#include "cuda/lists/backward_rows.cuh"
#include "cuda/prim/load.cuh"
#include "cuda/prim/store.cuh"

namespace coterie::cuda {

// fp16 weights are kept in range by a power of two.
constexpr int kHalfWeightBits = 8;
constexpr float kHalfWeightScale = 1 << kHalfWeightBits;

constexpr int kListRows = 64, kListRowBits = 6;  // that a block owns
constexpr int kListThreads = 128;
constexpr int kListStages = 2;  // of tiles: one in use, one on its way

// Owned rows of two tensors, two stages of two tiles of the other side, and what is known of its
// rows.
template <class P>
struct ListBlockShape {
  static constexpr int kOwnedBytes = kListRows * P::kRowBytes;
  static constexpr int kTileBytes = P::kColumns * P::kRowBytes;
  static constexpr int kStages = 2 * kOwnedBytes;
  static constexpr int kColumnData = kStages + 2 * kListStages * kTileBytes;
  template <class Columns>
  static constexpr int kBytes = kColumnData + static_cast<int>(sizeof(Columns[kListStages]));

  __device__ static typename P::Matrix owned(std::uint32_t base, int tensor) {
    return {base + tensor * kOwnedBytes};
  }
  __device__ static typename P::Matrix tile(std::uint32_t base, int stage, int tensor) {
    return {base + kStages + (2 * stage + tensor) * kTileBytes};
  }
};

__device__ __forceinline__ int ahead(int stage) { return 1 - stage; }

// First of the 16 or 64 owned rows that this thread's products have in common.
template <class P>
__device__ __forceinline__ int unit_row() {
  return static_cast<int>(threadIdx.x) / 32 * 16 / P::kUnit * P::kUnit;
}
// The owned row that this lane holds above (side 0) or below.
__device__ __forceinline__ int lane_row(int side) {
  return static_cast<int>(threadIdx.x) / 32 * 16 + 8 * side +
         static_cast<int>(threadIdx.x) % 32 / 4;
}

// Owned rows of sums times a factor, to rows of a tensor or to slots.
template <class P, class Out>
__device__ __forceinline__ void store_sums(const typename P::Sums& sum, float factor,
                                           const Rows<Out>& rows, const SlotList& list, int first,
                                           bool by_slot) {
  std::int64_t row[2];
  bool there[2];
#pragma unroll
  for (int side = 0; side < 2; ++side) {
    const int rank = first + lane_row(side);
    there[side] = rank < list.count;
    row[side] = !there[side] ? 0 : by_slot ? list.slot_of(rank) : list.row(rank);
  }
#pragma unroll
  for (int part = 0; part < P::kWidth / 32; ++part) {
    Accumulator two[2];
#pragma unroll
    for (int i = 0; i < 16; ++i) two[i / 8][i / 4 % 2][i % 4] = sum[16 * part + i] * factor;
#pragma unroll
    for (int side = 0; side < 2; ++side)
      store_columns(rows, row[side], there[side], 32 * part, two, side);
  }
}

// Where nothing was walked over, nobody has committed the copies of owned rows or waited for them.
__device__ __forceinline__ void await_owned_rows() {
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
}

// From the gradient g of a normalised row y to that of the row x it was made of, for owned rows
// that are still in shared memory: inverse (g - mean g - y mean(g y)). Leaves g . y in `product`.
template <class P>
__device__ __forceinline__ void denormalise(typename P::Sums& sum, const typename P::Matrix& rows,
                                            const RowStatistics (&stats)[2], int width,
                                            float (&product)[2]) {
  float mean[2] = {0.0f, 0.0f}, share[2];
  product[0] = product[1] = 0.0f;
  const auto normalised = [&](int i) {  // i is even: columns i and i + 1 of those a lane holds
    const int column = i / 4 * 8 + static_cast<int>(threadIdx.x) % 4 * 2, side = i / 2 % 2;
    float2 y = P::pair(rows, lane_row(side), column);
    y.x = column < width ? (y.x - stats[side].mean) * stats[side].inverse : 0.0f;
    y.y = column + 1 < width ? (y.y - stats[side].mean) * stats[side].inverse : 0.0f;
    return y;
  };
#pragma unroll
  for (int i = 0; i < P::kWidth / 2; i += 2) {
    const float2 y = normalised(i);
    float &m = mean[i / 2 % 2], &p = product[i / 2 % 2];
    m += sum[i];
    m += sum[i + 1];
    p = fmaf(sum[i], y.x, p);
    p = fmaf(sum[i + 1], y.y, p);
  }
#pragma unroll
  for (int side = 0; side < 2; ++side) {
    mean[side] = quad_sum(mean[side]) / static_cast<float>(width);
    product[side] = quad_sum(product[side]);
    share[side] = product[side] / static_cast<float>(width);
  }
#pragma unroll
  for (int i = 0; i < P::kWidth / 2; i += 2) {
    const int side = i / 2 % 2;
    const float2 y = normalised(i);
    sum[i] = (sum[i] - mean[side] - y.x * share[side]) * stats[side].inverse;
    sum[i + 1] = (sum[i + 1] - mean[side] - y.y * share[side]) * stats[side].inverse;
  }
}

// Where gradients of a side go: rows of a tensor, slots, or nowhere.
template <class T>
struct ListSums {
  Tensor4<T> rows;
  void* slots;
  bool rounded;  // slots are of T, else floats

  __host__ __device__ bool wanted() const { return rows.data || slots; }
  // Of T: where rows or slots are counted from.
  __device__ Rows<T> rows_of(const ItemSpan& span, int head, int width) const {
    if (rows.data) return rows.rows(span.batch, head, span.begin);
    return {static_cast<T*>(slots), width, width, width * sizeof(T) % 16 == 0};
  }
  template <class P>
  __device__ void store(const typename P::Sums& sum, float factor, const SlotList& list, int first,
                        const ItemSpan& span, int head, int width) const {
    if (!wanted()) return;
    if (rows.data || rounded) {
      store_sums<P>(sum, factor, rows_of(span, head, width), list, first, !rows.data);
    } else {
      const Rows<float> out{static_cast<float*>(slots), width, width, width % 4 == 0};
      store_sums<P>(sum, factor, out, list, first, true);
    }
  }
};

template <class T>
struct ListBackwardArgs {
  ListProblem problem;
  ListTiles q_tiles, k_tiles;
  Tensor4<const T> q, k, v, g;
  ListValues weight, lse, delta;
  float* delta_out;  // computed here where delta is not given
  bool delta_out_by_slot;
  ListSums<T> dq, dk, dv;
  bool normalise;      // dq and dk are those of the rows before their normalisation
  float* dq_products;  // then optional, by query row: dq . normalised row
  float weight_scale;  // kHalfWeightScale for fp16; 1 for other types

  __device__ QuerySource source() const { return {problem, weight, lse, delta, weight_scale}; }
};

// What a block works on. It stands in shared memory, for want of registers beside the sums.
template <class T>
struct ListBlock {
  ListPair pair;
  int first;                 // rank of the first owned row
  Rows<const T> queries[2];  // q and output gradients, by rank where the list has no index
  Rows<const T> keys[2];     // k and v

  // By one warp: list `list` of an item and query head.
  __device__ void set(const ListBackwardArgs<T>& args, const ListTile& at, int head) {
    const ListPair found = args.problem.pair(at.item, head, at.list);
    if (threadIdx.x % 32 != 0) return;
    const int key_head = head / args.problem.group, value_head = head / args.problem.value_group;
    pair = found;
    first = at.first;
    queries[0] = found.q.rows(args.q.rows(found.q_span.batch, head, found.q_span.begin));
    queries[1] = found.q.rows(args.g.rows(found.q_span.batch, head, found.q_span.begin));
    keys[0] = found.k.rows(args.k.rows(found.k_span.batch, key_head, found.k_span.begin));
    keys[1] = found.k.rows(args.v.rows(found.k_span.batch, value_head, found.k_span.begin));
  }
};

}  // namespace coterie::cuda
