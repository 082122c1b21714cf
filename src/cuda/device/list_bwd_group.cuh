// SPDX-License-Identifier: MIT
// The computing warpgroups of the backward pass of lists on Hopper: 64 owned rows of up to 64
// elements, as left factors in registers, over the tiles of a round (list_bwd_stream.cuh).
#pragma once

#include "cuda/device/list_bwd_stream.cuh"

namespace coterie::cuda {

// A value that all lanes hold, in a way that the compiler knows it.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(~0u, value, 0); }

template <class T>
__device__ __forceinline__ void start_products(float (&s)[32], const void* rows, const void* tile) {
  row_products(s, Bands<T, 64, 64>{shared_address(rows)}, 0, Bands<T, 64, 64>{shared_address(tile)},
               0);
  wgmma_commit();
}
template <class T>
__device__ __forceinline__ void start_sums(float (&sum)[32], const FragmentA<T> (&p)[4],
                                           const void* tile) {
  const Bands<T, 64, 64> b{shared_address(tile)};
#pragma unroll
  for (int k = 0; k < 4; ++k) wgmma<T, 1, 1>(sum, p[k].r, b.by_rows(16 * k, 0));
  wgmma_commit();
}
template <class T>
__device__ __forceinline__ void round_factor(FragmentA<T> (&factor)[4], float (&s)[32]) {
#pragma unroll
  for (int k = 0; k < 4; ++k) to_fragment(factor[k], *reinterpret_cast<Accumulator*>(s + 8 * k));
}

// Two neighbouring columns of a record: columns 8 j + 2 (l%4) and the next.
template <class Both, class One>
__device__ __forceinline__ Both column_pair(const One* record, int j) {
  return *reinterpret_cast<const Both*>(record + 8 * j + threadIdx.x % 4 * 2);
}

// What the queries of a record see of `keys` keys.
template <ListForm kForm>
__device__ __forceinline__ RankRange range_of(const QueryRecord<kForm>& record, int row,
                                              const ListProblem& problem, int keys) {
  const int2 range = record.range[row];
  if (problem.rule != ListRule::ends) return {range.x, range.y};
  const int high = min(range.y, keys);
  return {max(high - problem.window, 0), max(high, 0)};
}

// Where owned rows of a lane go.
struct OwnedPlace {
  int rank[2], row[2];
  bool there[2];

  __device__ OwnedPlace(const ListStep& step, const int (&rows)[64]) {
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      rank[side] = step.first + group_row(side);
      there[side] = group_row(side) < step.count;
      row[side] = there[side] ? rows[group_row(side)] : 0;
    }
  }
  __device__ std::int64_t slot(const ListStep& step, int side) const {
    return step.slot + static_cast<std::int64_t>(rank[side]) * step.slot_step;
  }

  // Sums times a factor, to rows of a tensor or to slots, both aligned.
  template <class T>
  __device__ void store(const float (&sum)[32], float factor, const ListSums<T>& to,
                        const ListStep& step, int width) const {
    const int lane = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      if (to.rows.data) {
        T* row_of =
            to.rows.rows(step.span.batch, step.head, step.span.begin).row(row[side]) + 8 * lane;
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          std::uint32_t word[4];
#pragma unroll
          for (int n = 0; n < 4; ++n) {
            const int i = 16 * part + 4 * n + 2 * side;
            word[n] = pack2<T>(sum[i] * factor, sum[i + 1] * factor);
          }
          transpose_quad(word);
          if (there[side] && 32 * part + 8 * lane < width)
            *reinterpret_cast<uint4*>(row_of + 32 * part) =
                make_uint4(word[0], word[1], word[2], word[3]);
        }
      } else if (to.slots && there[side]) {
        float* slot_of = to.slots + slot(step, side) * width + 2 * lane;
#pragma unroll
        for (int j = 0; j < 8; ++j)
          if (8 * j + 2 * lane < width)
            store2(slot_of + 8 * j, sum[4 * j + 2 * side] * factor,
                   sum[4 * j + 2 * side + 1] * factor);
      }
    }
  }
};

// As denormalise of list_bwd.cuh; the means are those of the rows.
template <class T>
__device__ __forceinline__ void denormalise(float (&sum)[32], const Tile<T, 64>& rows,
                                            const RowStatistics (&stats)[2], int width,
                                            float (&product)[2]) {
  float y[32], mean[2] = {0.0f, 0.0f};
  product[0] = product[1] = 0.0f;
#pragma unroll
  for (int i = 0; i < 32; i += 2) {
    const int column = i / 4 * 8 + static_cast<int>(threadIdx.x) % 4 * 2, side = i / 2 % 2;
    union {
      std::uint32_t word;
      T elements[2];
    } two;
    two.word = load_shared32(rows.address(group_row(side), column));
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float x = (to_float(two.elements[e]) - stats[side].mean) * stats[side].inverse;
      y[i + e] = column + e < width ? x : 0.0f;
      mean[side] += sum[i + e];
      product[side] = fmaf(sum[i + e], y[i + e], product[side]);
    }
  }
  const float share = 1.0f / static_cast<float>(width);
#pragma unroll
  for (int side = 0; side < 2; ++side) {
    mean[side] = quad_sum(mean[side]) * share;
    product[side] = quad_sum(product[side]);
  }
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const int side = i / 2 % 2;
    sum[i] = (sum[i] - mean[side] - y[i] * (product[side] * share)) * stats[side].inverse;
  }
}

// Walks over the tiles of a round that a warpgroup meets. The products of a tile begin and end in
// one step together with the sums of the tile before it: the assembler does them one by one
// otherwise.
//   meets(number)   whether it meets a tile, which is there
//   scores(number)  starts s and d
//   weigh(number)   turns them into factors
//   add(number)     starts the sums
//   settle()        after all products
template <class Memory, class Meets, class Scores, class Weigh, class Add, class Settle>
__device__ __forceinline__ void walk_tiles(Memory& memory, const ListStep& step, const Meets& meets,
                                           const Scores& scores, const Weigh& weigh, const Add& add,
                                           const Settle& settle) {
  int number = uniform(step.number);
  const int end = number + uniform(step.tiles);
#pragma unroll 1
  while (number < end) {
    memory.await_tile(number);
    if (!meets(number)) {
      memory.release(number++);
      continue;
    }
    wgmma_fence();
    scores(number);
    wgmma_wait<0>();
    settle();
    bool more = true;
#pragma unroll 1
    while (more) {
      weigh(number);
      more = number + 1 < end;
      if (more) {
        memory.await_tile(number + 1);
        more = meets(number + 1);
      }
      if (more) {
        wgmma_fence();
        add(number);
        scores(number + 1);
        wgmma_wait<0>();
        settle();
      } else {
        wgmma_fence();
        add(number);
        wgmma_wait<0>();
        settle();
      }
      memory.release(number++);
    }
  }
}

}  // namespace coterie::cuda
