// SPDX-License-Identifier: MIT
// Cluster means against keys: code shared by the centroid kernels. Means are f32 in memory and
// rounded to the element type for the products (load_centroids). The attention of centroid.cu and
// centroid_sm90a.cu shares the walk through a list of top keys and the sum over chunks of keys.
#pragma once

#include <climits>
#include <cstdint>

#include "cuda/clustered/clustered.h"
#include "cuda/launch/dispatch.h"
#include "cuda/prim/fragments.cuh"
#include "cuda/prim/load.cuh"
#include "cuda/prim/softmax.cuh"
#include "cuda/prim/team.cuh"
#include "cuda/prim/warp.cuh"

namespace coterie::cuda {

// Block number = (slot * H + head) * row_tiles + tile: blocks that read the same keys are
// neighbours.
struct CentroidBlock {
  int slot, head, first;

  __device__ CentroidBlock(const CentroidQueries& queries, unsigned number)
      : slot(static_cast<int>(number / queries.row_tiles) / queries.H),
        head(static_cast<int>(number / queries.row_tiles) % queries.H),
        first(static_cast<int>(number % queries.row_tiles) * queries.block_rows) {}
};

// Fills kRows rows of the tile with columns from `column0` on of the means of clusters first, first
// + 1, ... times the sign of the scale; elements beyond the last cluster or column are zero.
template <int kRows, int kThreads, class T, int kDim>
__device__ __forceinline__ void load_centroids(const Tile<T, kDim>& tile,
                                               const CentroidQueries& queries, int item, int head,
                                               int first, int column0 = 0) {
  using Shape = Tile<T, kDim>;
  const float* means = queries.centroids + queries.row(item, head, 0) * queries.width;
  const bool whole = queries.width % 4 == 0;  // a float4 is aligned, and inside or outside
  constexpr int kVector = Shape::kVector;
  const auto store = [&](int number, const float(&values)[kVector]) {
    union {
      T elements[kVector];
      uint4 words;
    } rounded;
#pragma unroll
    for (int i = 0; i < kVector; ++i) rounded.elements[i] = from_float<T>(values[i] * queries.sign);
    store_shared16(tile.chunk(number / Shape::kChunks, number % Shape::kChunks), rounded.words);
  };
  // The address of a chunk, and how many of its elements exist.
  const auto left_of = [&](int number, const float*& from) {
    const int column = column0 + number % Shape::kChunks * kVector;
    const int cluster = first + number / Shape::kChunks;
    const int left = cluster < queries.clusters ? queries.width - column : 0;
    from = means + (left > 0 ? static_cast<std::int64_t>(cluster) * queries.width + column : 0);
    return left;
  };
  if (!whole) {  // rare
#pragma unroll 1
    for (int number = threadIdx.x; number < kRows * Shape::kChunks; number += kThreads) {
      const float* from;
      const int left = left_of(number, from);
      float values[kVector];
#pragma unroll
      for (int i = 0; i < kVector; ++i) values[i] = i < left ? from[i] : 0.0f;
      store(number, values);
    }
    return;
  }
  constexpr int kTotal = kRows * Shape::kChunks / kThreads, kBatch = kTotal % 4 == 0 ? 4 : 1;
  static_assert(kRows * Shape::kChunks % kThreads == 0, "every thread has as many");
#pragma unroll 1
  for (int step = 0; step < kTotal; step += kBatch) {  // loads of a batch are in flight together
    float values[kBatch][kVector];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const float* from;
      const int left = left_of(threadIdx.x + (step + j) * kThreads, from);
#pragma unroll
      for (int i = 0; i < kVector; i += 4) {
        const float4 four = *reinterpret_cast<const float4*>(from + (i < left ? i : 0));
#pragma unroll
        for (int e = 0; e < 4; ++e) values[j][i + e] = i < left ? (&four.x)[e] : 0.0f;
      }
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) store(threadIdx.x + (step + j) * kThreads, values[j]);
  }
}

constexpr int kAttendKeys = 64;  // of a tile, at most: one bit each in a row's mask of top keys

struct PartialRow {
  float shift, sum, mass, unused;  // in units of 2^shift
};

// Outputs of the attention in select_attend_sm90a.cu. Partial results are those of the blocks of a
// team: (teams, kSelectParts, block rows, ...), reused from problem to problem.
template <class T>
struct MeanOutputs {
  Tensor4<const T> v;
  PartialRow* rows;
  float* outs;
  int pitch;
  float *lse, *mass, *out;  // results (items, H, C, ...)
  int width;                // of a row of out
};

template <class T>
struct AttendArgs {
  CentroidQueries queries;
  Tensor4<const T> k, v;
  // (items, H, C, topk), or null. With mass they have a part in lse; otherwise in nothing.
  const std::int32_t* top_keys;
  int topk;
  PartialRow* rows;  // (slots, H, C)
  float* outs;       // (slots, H, C, pitch), not normalised
  int pitch;
  float *lse, *mass, *out;  // results (items, H, C, ...); mass may be null
  int width;                // of a row of out
  // Blocks that share the keys of their means and combine their chunks themselves; size 0: none do.
  Teams teams;

  __device__ bool hides_top_keys() const { return top_keys && !mass; }
};

// Walks a row's ascending list of top keys; one thread per row. The key after the next one is
// fetched ahead, so that the walk does not wait for memory at every tile.
struct TopWalk {
  const std::int32_t* list = nullptr;
  int left = 0;  // of the list
  int next = INT_MAX, after = INT_MAX;

  __device__ int fetch() {
    if (left == 0) return INT_MAX;
    --left;
    const int key = *list++;
    return key < 0 ? INT_MAX : key;
  }
  __device__ void advance() {
    next = after;
    after = fetch();
  }
  __device__ void start(const std::int32_t* keys, int count, int first) {
    int before = 0;  // keys below the first; many loads in flight
    for (int i = 0; i < count; i += 16) {
      int key[16];
#pragma unroll
      for (int j = 0; j < 16; ++j) key[j] = keys[min(i + j, count - 1)];
#pragma unroll
      for (int j = 0; j < 16; ++j) before += i + j < count && key[j] >= 0 && key[j] < first;
    }
    list = keys + before;
    left = count - before;
    next = fetch();
    after = fetch();
  }
  // Bit b: key begin + b is a top key, of `keys` keys.
  __device__ unsigned long long mask(int begin, int keys = kAttendKeys) {
    unsigned long long bits = 0;
    while (next < begin + keys) {
      bits |= 1ull << (next - begin);
      advance();
    }
    return bits;
  }
};

// How many keys of an ascending list that ends with -1 there are.
__device__ __forceinline__ int listed_keys(const std::int32_t* list, int most) {
  int low = 0;
  while (low < most) {
    const int middle = (low + most) / 2;
    if (list[middle] >= 0)
      low = middle + 1;
    else
      most = middle;
  }
  return low;
}
// Bit b: key begin + b is among the `count` listed ones.
__device__ __forceinline__ unsigned long long listed_mask(const std::int32_t* list, int count,
                                                          int begin) {
  unsigned long long bits = 0;
  for (int at = count_up_to(list, count, begin - 1); at < count && list[at] < begin + kAttendKeys;
       ++at)
    bits |= 1ull << (list[at] - begin);
  return bits;
}

// Adds the chunks of one mean, in order; by a warp.
template <class T>
__device__ __forceinline__ void combine_row(const AttendArgs<T>& args, int item, int head,
                                            int cluster) {
  const CentroidQueries& queries = args.queries;
  const int lane = threadIdx.x % 32, width = args.width;
  const std::int64_t row = queries.row(item, head, cluster);
  const bool empty = queries.empty(item, head, cluster);
  const int parts = empty ? 0 : queries.chunks.count(queries.spans.k.span(item).length);
  const std::int64_t first =
      queries.row(queries.chunks.first_slot(queries.spans.k, item), head, cluster);
  const std::int64_t step = static_cast<std::int64_t>(queries.H) * queries.clusters;

  // Lane p of a warp reads chunk p of 32.
  const PartialRow none{-INFINITY, 0.0f, 0.0f, 0.0f};
  const auto row_of = [&](int part) {
    return part < parts ? args.rows[first + part * step] : none;
  };
  const PartialRow own = row_of(lane);
  float shift = own.shift;
  for (int part = lane + 32; part < parts; part += 32) shift = fmaxf(shift, row_of(part).shift);
  shift = warp_max(shift);
  float sum = 0.0f, listed = 0.0f, total[kMaxHeadDim / 32] = {};
  for (int base = 0; base < parts; base += 32) {
    const PartialRow partial = base == 0 ? own : row_of(base + lane);
    const float factor = base + lane < parts ? exp2_approximate(partial.shift - shift) : 0.0f;
    sum += factor * partial.sum;
    listed += factor * partial.mass;
    const float* values = args.outs + (first + base * step) * args.pitch;
    const int count = min(parts - base, 32);
    constexpr int kBatch = 8;  // parts whose loads are in flight together
    for (int begin = 0; begin < count; begin += kBatch)
#pragma unroll
      for (int i = 0; i < kMaxHeadDim / 32; ++i) {
        if (32 * i >= width) continue;
        const float* column = values + min(lane + 32 * i, width - 1);
        float part[kBatch];
#pragma unroll
        for (int j = 0; j < kBatch; ++j)
          part[j] = column[min(begin + j, count - 1) * step * args.pitch];
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
          const float weight = __shfl_sync(~0u, factor, (begin + j) % 32);
          if (begin + j < count) total[i] += weight * part[j];
        }
      }
  }
  sum = warp_sum(sum);
  listed = warp_sum(listed);
  const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
  if (lane == 0) {
    args.lse[row] = row_lse(shift, sum);
    if (args.mass) args.mass[row] = listed * inverse;
  }
#pragma unroll
  for (int i = 0; i < kMaxHeadDim / 32; ++i)
    if (lane + 32 * i < width) args.out[row * width + lane + 32 * i] = total[i] * inverse;
}

// Partial results of every chunk by Hopper's warpgroup products, and with teams the final results;
// 16-bit types only. centroid_sm90a.cu
template <class T>
void attend_chunks_sm90a(const AttendArgs<T>& args, cudaStream_t stream);

}  // namespace coterie::cuda
