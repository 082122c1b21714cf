// SPDX-License-Identifier: MIT
// What the kernels that select routing's members share: the lists, numbered over queries and keys,
// and the exact scores y . centroid = x . centred / sigma.
#pragma once

#include <cstdint>

#include "cuda/device/candidates.cuh"
#include "cuda/device/row_lanes.cuh"
#include "cuda/routing.h"

namespace coterie::cuda {

template <class T>
struct TopRows {
  ClusterShape shape;
  Tensor4<const T> x;
  const RowStatistics* stats;
  std::int32_t* members;  // (items, heads, C, width)
  int width;
  int lists;  // items * heads * C
  CandidateLists candidates;
};

template <class T>
struct TopArgs {
  TopRows<T> sides[2];
  CentredCentroids centroids;
  // Lists that candidates do not decide, in any order; null: all lists.
  std::int32_t *open_count, *open;
  float* scratch;  // scores of a block each, where they do not fit into shared memory
  int room;        // for scores of a block
};

// One list of either side.
template <class T>
struct TopList {
  const TopRows<T>& side;
  int number;  // of the side
  int head, item, wanted;
  ItemSpan span;
  std::int32_t* members;
  const float* centroid;

  __device__ TopList(const TopArgs<T>& args, int of_both)
      : side(args.sides[of_both >= args.sides[0].lists]),
        number(of_both >= args.sides[0].lists ? of_both - args.sides[0].lists : of_both) {
    const int clusters = side.shape.clusters, cluster = number % clusters;
    head = number / clusters % side.shape.heads;
    item = number / clusters / side.shape.heads;
    span = side.shape.q.span(item);
    wanted = min(side.width, span.length);
    members = side.members + static_cast<std::int64_t>(number) * side.width;
    centroid = args.centroids.rows +
               (static_cast<std::int64_t>(head / side.shape.group) * clusters + cluster) *
                   args.centroids.pitch;
  }

  // Writes lists that hold all rows, and -1 behind the others; whether the list is done with that.
  __device__ bool write_ends() const {
    const bool all = span.length <= side.width;
    const int first = all ? 0 : wanted;
    for (int i = first + static_cast<int>(threadIdx.x); i < side.width;
         i += static_cast<int>(blockDim.x))
      members[i] = i < wanted ? i : -1;
    return all;
  }
};

// In the order of the scores; NaN is the last, and -0 is 0.
__device__ __forceinline__ float plain_score(float score) {
  return isnan(score) ? -INFINITY : score + 0.0f;
}

// Rows of a list and its centroid. The same bits for a row and a centroid in all kernels.
template <class T, int kWidth>
struct ExactScores {
  using Lanes = RowLanes<T, kWidth>;
  Rows<const T> rows;
  const RowStatistics* stats;
  typename Lanes::Values centroid;

  __device__ ExactScores(const TopList<T>& list, int pitch)
      : rows(list.side.x.rows(list.span.batch, list.head, list.span.begin)),
        stats(list.side.stats + list.side.shape.start(list.span, list.head)) {
    Lanes::load_floats(list.centroid, pitch, centroid);
  }

  // put(i, row, score) for all i < count; row_of(i) is the row. By all kThreads threads.
  template <int kThreads, class RowOf, class Put>
  __device__ void compute(int count, const RowOf& row_of, const Put& put) const {
    constexpr int kGroups = kThreads / Lanes::kLanes, kRows = 4;  // rows on their way at a time
    for (int base = 0; base < count; base += kGroups * kRows) {
      typename Lanes::Values x[kRows];
      float inverse[kRows];
      int row[kRows];
#pragma unroll
      for (int j = 0; j < kRows; ++j) {
        const int i = base + j * kGroups + static_cast<int>(threadIdx.x) / Lanes::kLanes;
        row[j] = i < count ? row_of(i) : -1;
        Lanes::load(rows, row[j], row[j] >= 0, x[j]);
        inverse[j] = row[j] >= 0 ? stats[row[j]].inverse : 0.0f;
      }
#pragma unroll
      for (int j = 0; j < kRows; ++j) {
        const float product = Lanes::dot(x[j], centroid);
        const int i = base + j * kGroups + static_cast<int>(threadIdx.x) / Lanes::kLanes;
        if (row[j] >= 0 && Lanes::column() == 0) put(i, row[j], plain_score(product * inverse[j]));
      }
    }
  }
};

// The power of two that brings a centroid whose largest absolute element is `most` to [1, 2), so
// that its elements keep their 11 bits as half-precision numbers.
__device__ __forceinline__ float centroid_scale(float most) {
  const int exponent = static_cast<int>(__float_as_uint(most) >> 23);
  return exponent == 0 ? 1.0f
                       : __uint_as_float(static_cast<unsigned>(max(254 - exponent, 1)) << 23);
}

// Lists that candidates decide; the others go to args.open. bf16 rows only. routing_choose.cu
void choose_candidates(const AttentionCall& call, const TopArgs<__nv_bfloat16>& args,
                       cudaStream_t stream);

}  // namespace coterie::cuda
