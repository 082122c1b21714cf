// SPDX-License-Identifier: MIT
// Shared by the kernels that select routing's members: the lists, numbered over queries and keys,
// and the exact scores y . centroid = x . centred / sigma.
#pragma once

#include <cstdint>

#include "cuda/prim/candidates.cuh"
#include "cuda/prim/row_lanes.cuh"
#include "cuda/routing/stages.h"

namespace coterie::cuda {

template <class T>
struct TopRows {
  ClusterShape shape;
  Tensor4<const T> x;
  RowStatistics* stats;
  std::int32_t* members;  // (items, heads, C, width)
  int width;
  int lists;  // items * heads * C
  CandidateLists candidates;
};

template <class T>
TopRows<T> top_rows(const CandidateRun& run) {
  const ClusterShape& shape = run.side.shape;
  return {shape,          tensor4<const T>(run.side.rows),   run.side.stats, run.side.members,
          run.side.width, shape.problems() * shape.clusters, run.lists};
}

// Lists that candidates do not decide, and the teams of blocks that select their members, several
// lists of an item and head at a time.
struct UndecidedLists {
  ZeroedWords words;       // the count of all lists, of those of a problem, and the teams' counters
  std::int32_t* clusters;  // (problems, C): which, in any order; null: all
  Teams teams;
  std::int32_t* counts;  // (teams, 2, kTeamCounts): buffers alternate between chunks
  std::int32_t* sums;    // (teams, size, lists, 2): rows above the cut and on it
  float* scratch;        // scores of each block, if they do not fit into shared memory
  int room;              // scores per block and list
  int at_once;           // lists at a time
};

template <class T>
struct TopArgs {
  TopRows<T> sides[2];
  CentredCentroids centroids;
  UndecidedLists undecided;
};

// One list of either side.
template <class T>
struct TopList {
  const TopRows<T>& side;
  int number;  // within the side
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

  // All centroids of the list's head.
  __device__ const float* head_centroids(const TopArgs<T>& args) const {
    return args.centroids.rows + static_cast<std::int64_t>(head / side.shape.group) *
                                     side.shape.clusters * args.centroids.pitch;
  }

  // Writes lists that contain all rows, and -1 after the others; returns whether the list is done.
  __device__ bool write_ends() const {
    const bool all = span.length <= side.width;
    const int first = all ? 0 : wanted;
#pragma unroll 1
    for (int i = first + static_cast<int>(threadIdx.x); i < side.width;
         i += static_cast<int>(blockDim.x))
      members[i] = i < wanted ? i : -1;
    return all;
  }
};

// Ordered like the scores; NaN is last, and -0 is 0.
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

  // Calls put(i, row, score) for all i < count; row_of(i) is the row. Called by all kThreads
  // threads, each with kRows rows in flight.
  template <int kThreads, int kRows, class RowOf, class Put>
  __device__ void compute(int count, const RowOf& row_of, const Put& put) const {
    for_rows<kThreads, kRows>(count, row_of,
                              [&](int i, int row, const uint4& words, float inverse) {
                                const float product = Lanes::sum(lane_product(words, centroid));
                                if (row >= 0 && Lanes::column() == 0)
                                  put(i, row, plain_score(product * inverse));
                              });
  }

  // Calls take(i, row, this lane's elements, 1 / sigma); rows are negative from `count` on.
  template <int kThreads, int kRows, class RowOf, class Take>
  __device__ void for_rows(int count, const RowOf& row_of, const Take& take) const {
    constexpr int kStep = kThreads / Lanes::kLanes * kRows;
    for (int base = 0; base < count; base += kStep) {
      uint4 words[kRows];
      float inverse[kRows];
      int row[kRows];
      const int first = base + static_cast<int>(threadIdx.x) / Lanes::kLanes;
#pragma unroll
      for (int j = 0; j < kRows; ++j) {
        const int i = first + j * (kStep / kRows);
        row[j] = i < count ? row_of(i) : -1;
      }
      __syncwarp();      // put may overwrite what row_of reads
      if (rows.aligned)  // one branch around all loads keeps them in flight together
        load_rows<true>(row, words);
      else
        load_rows<false>(row, words);
#pragma unroll
      for (int j = 0; j < kRows; ++j) inverse[j] = row[j] >= 0 ? stats[row[j]].inverse : 0.0f;
#pragma unroll
      for (int j = 0; j < kRows; ++j)
        take(first + j * (kStep / kRows), row[j], words[j], inverse[j]);
    }
  }

  __device__ static __forceinline__ float lane_product(const uint4& words,
                                                       const typename Lanes::Values& centroid) {
    union {
      uint4 words;
      T elements[Lanes::kVector];
    } chunk;
    chunk.words = words;
    float product = 0.0f;
#pragma unroll
    for (int i = 0; i < Lanes::kVector; ++i)
      product = fmaf(to_float(chunk.elements[i]), centroid[i], product);
    return product;
  }

 private:
  template <bool kAligned, int kRows>
  __device__ __forceinline__ void load_rows(const int (&row)[kRows], uint4 (&words)[kRows]) const {
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      words[j] = make_uint4(0, 0, 0, 0);
      if (row[j] < 0 || Lanes::column() >= rows.width) continue;
      const T* from = rows.row(row[j]);
      if constexpr (kAligned)
        words[j] = *reinterpret_cast<const uint4*>(from + Lanes::column());
      else
        words[j] = load_chunk(from, Lanes::column(), rows.width);
    }
  }
};

// The power of two that scales a centroid whose largest absolute element is `most` to [1, 2), so
// that its elements keep their 11 bits in half precision.
__device__ __forceinline__ float centroid_scale(float most) {
  const int exponent = static_cast<int>(__float_as_uint(most) >> 23);
  return exponent == 0 ? 1.0f
                       : __uint_as_float(static_cast<unsigned>(max(254 - exponent, 1)) << 23);
}

// Writes lists that candidates decide; others go to args.undecided. bf16 rows only. choose.cu
void choose_candidates(const AttentionCall& call, const TopArgs<Bf16>& args, cudaStream_t stream);

}  // namespace coterie::cuda
