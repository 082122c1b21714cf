// SPDX-License-Identifier: MIT
// Code shared by the kernels that find the nearest centroid (nearest.cu, nearest_sm90a.cu).
//
// A score s becomes one integer key: s + K, with K = 1.5 * 2^k and 2^(k-1) above every |s| of the
// row, lies in [2^k, 2^(k+1)), so its bits are a fixed-point number. Times 512, it loses sign and
// exponent at the top and has 9 free bits for the reversed column number at the bottom. A score
// costs a multiply-add and half a three-way maximum; ties go to the lower index. The resolution is
// 2^(k-23), some 2^-17 of the bound |x|_inf |m|_1 + |b|.
#pragma once

#include "cuda/cluster/group.cuh"
#include "cuda/cluster/stages.h"
#include "cuda/prim/row_fragments.cuh"

namespace coterie::cuda {

constexpr int kMostColumns = 2048;       // that 9 bits can tell apart: 4 columns of 16 in a lane
constexpr int kTableBytes = 192 * 1024;  // of the centroids in shared memory

template <class T>
struct NearestArgs : NearestPlan {
  Tensor4<const T> x;
  CentroidTable table;
  ClusterLists out;
  int columns;  // centroids in shared memory at a time
  int shared_words;
  unsigned key_scale;  // 512, unknown to the compiler so that it stays a multiply-add
  unsigned zero;       // 0, unknown as well: see RowFragments
};

// The addend K of a row whose largest element is `largest`; not finite when the scores may not be.
__device__ __forceinline__ float key_offset(float largest, float norm, float bias) {
  const float bound = 1.02f * (largest * norm + bias);
  const std::uint32_t exponent = __float_as_uint(bound) >> 23;
  return __uint_as_float(min(exponent + 2, 255u) << 23 | 0x400000u);
}

// The larger of two numbers that are not negative; NaN is larger than all.
__device__ __forceinline__ float larger(float a, float b) {
  return __uint_as_float(max(__float_as_uint(a), __float_as_uint(b)));
}

// K of the row that four lanes share; `bounds` are those of the table.
template <class T, int kChunks>
__device__ __forceinline__ float row_offset(const RowWords<T, kChunks>& row, const float2& bounds) {
  float largest = row.largest();
#pragma unroll
  for (int step = 1; step <= 2; step *= 2)
    largest = larger(largest, __shfl_xor_sync(0xffffffffu, largest, step));
  return key_offset(largest, bounds.x, bounds.y);
}

// The larger of `best` and the keys of two neighbouring columns, whose scores already include K;
// `number` is 511 minus the first one's number.
__device__ __forceinline__ std::uint32_t best_key(std::uint32_t best, float even, float odd,
                                                  std::uint32_t scale, std::uint32_t number) {
  const auto key = [&](float score, std::uint32_t low) {
    std::uint32_t word;
    asm("mad.lo.u32 %0, %1, %2, %3;"
        : "=r"(word)
        : "r"(__float_as_uint(score)), "r"(scale), "r"(low));
    return word;
  };
  return __vimax3_u32(best, key(even, number), key(odd, number - 1));
}

constexpr int kBiasBytes = 32;  // of a centroid in a table for wgmma: hi, mid, lo, 1, and zeros

// A bias as a sum of three bf16 numbers, to shared memory in the layout of narrow_descriptor.
__device__ __forceinline__ void store_bias(std::uint32_t to, float bias) {
  Bf16 part[3];
  split_factor(bias, part);
  store_shared16(to, make_uint4(pack2<Bf16>(to_float(part[0]), to_float(part[1])),
                                pack2<Bf16>(to_float(part[2]), 1.0f), 0, 0));
  store_shared16(to + 4 * kBiasBytes, make_uint4(0, 0, 0, 0));
}

struct Point {
  std::uint32_t value;
  int label;
};

// Decodes this lane's key of a row; returns the best of the row's four lanes.
__device__ __forceinline__ Point decode_key(std::uint32_t key) {
  const int number = 511 - static_cast<int>(key & 511u);
  Point best{key >> 9, number / 2 * 8 + static_cast<int>(threadIdx.x % 4) * 2 + number % 2};
#pragma unroll
  for (int step = 1; step <= 2; step *= 2) {
    const Point other{__shfl_xor_sync(0xffffffffu, best.value, step),
                      __shfl_xor_sync(0xffffffffu, best.label, step)};
    if (other.value > best.value || (other.value == best.value && other.label < best.label))
      best = other;
  }
  return best;
}

// Largest |m_c|_1 and |b_c| of a problem.
template <int kThreads, class T>
__device__ float2 table_bounds(const NearestArgs<T>& args, int problem) {
  constexpr int kWarps = kThreads / 32;
  __shared__ float2 warps[kWarps];
  const std::int64_t start = static_cast<std::int64_t>(problem) * args.table.padded;
  float2 most = make_float2(0.0f, 0.0f);
  for (int c = threadIdx.x; c < args.shape.clusters; c += kThreads) {
    most.x = larger(most.x, args.table.norms[start + c]);
    most.y = larger(most.y, fabsf(args.table.bias[start + c]));
  }
  for (int step = 16; step > 0; step /= 2) {
    most.x = larger(most.x, __shfl_xor_sync(0xffffffffu, most.x, step));
    most.y = larger(most.y, __shfl_xor_sync(0xffffffffu, most.y, step));
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = most;
  __syncthreads();
  for (int w = 0; w < kWarps; ++w) {
    most.x = larger(most.x, warps[w].x);
    most.y = larger(most.y, warps[w].y);
  }
  return most;
}

// Labels, then order and offsets, of the problems of a block's team. assign(problem, rows, range,
// labels) labels the block's rows of a problem with more rows than clusters.
template <int kThreads, class T, class Assign>
__device__ __forceinline__ void label_problems(const NearestArgs<T>& args, std::int32_t* shared,
                                               const Assign& assign) {
  group_problems(args.shape, args.teams, args.out, args.histograms, shared, args.shared_words,
                 [&](const Team&, const TeamProblem& problem) {
                   const ItemSpan& span = problem.span;
                   const RowRange& range = problem.range;
                   std::int32_t* labels = args.out.labels + problem.start;
                   if (args.own_clusters && span.length <= args.shape.clusters) {
                     for (int i = range.begin + threadIdx.x; i < range.end; i += kThreads)
                       labels[i] = i;
                   } else {
                     assign(problem.number, args.x.rows(span.batch, problem.head, span.begin),
                            range, labels);
                   }
                 });
}

// With Hopper's warpgroup products; 16-bit types only. nearest_sm90a.cu
template <class T>
void nearest_sm90a(const NearestArgs<T>& args, cudaStream_t stream);

}  // namespace coterie::cuda
