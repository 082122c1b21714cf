// SPDX-License-Identifier: MIT
// Selection of the top keys and attention of the means in one kernel: what its files share
// (attend_improved_sm90a.cu).
#pragma once

#include <cstdint>

#include "cuda/device/attend.cuh"
#include "cuda/device/merge.cuh"
#include "cuda/device/select.cuh"

namespace coterie::cuda {

// What the attention writes. Partial results are those of the blocks of a team:
// (teams, kSelectParts, block rows, ...), reused from problem to problem.
template <class T>
struct MeanOutputs {
  Tensor4<const T> v;
  PartialRow* rows;
  float* outs;
  int pitch;
  float *lse, *mass, *out;  // results (items, H, C, ...)
  int width;                // of a row of out
};

// What rows that are not aligned take, out of the way of the others.
template <class T>
__device__ __noinline__ uint4 load_slowly(const T* row, int column, int width) {
  return load_chunk(row, column, width);
}

// Columns lane % 8 * 8 + ... of 32 rows of values on their way, added up: columns() and the next.
template <class T>
struct ListedValues {
  static constexpr int kVector = 16 / sizeof(T);
  static_assert(kVector == 8, "eight lanes for 64 columns");
  float sums[8] = {};

  // Adds weights times rows of `count` keys (up to 128), columns [first, first + 64).
  __device__ void add(const Rows<const T>& rows, const int* index, const float* weight, int count,
                      int first) {
    const int lane = threadIdx.x % 32, column = first + lane % 8 * kVector;
    const bool inside = column < rows.width;
#pragma unroll 1
    for (int begin = 0; begin < count; begin += 32) {
      uint4 words[8];
      const auto place = [&](int u) {
        return rows.row(index[min(begin + 4 * u + lane / 8, count - 1)]);
      };
      if (rows.aligned) {
#pragma unroll
        for (int u = 0; u < 8; ++u)
          words[u] = *reinterpret_cast<const uint4*>(place(u) + (inside ? column : 0));
      } else {
#pragma unroll
        for (int u = 0; u < 8; ++u) words[u] = load_slowly(place(u), column, rows.width);
      }
#pragma unroll
      for (int u = 0; u < 8; ++u) {
        const int key = begin + 4 * u + lane / 8;
        const float factor = inside && key < count ? weight[key] : 0.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i)
          sums[i] = fmaf(factor, to_float(reinterpret_cast<const T*>(&words[u])[i]), sums[i]);
      }
    }
  }
  // The lane's two columns of the 64, and their sums over all keys.
  __device__ static int column() {
    const int lane = threadIdx.x % 32;
    return lane % 8 * 8 + lane / 16 * 4 + lane / 8 % 2 * 2;
  }
  __device__ float2 total() const {
    const int lane = threadIdx.x % 32;
    float four[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float other = __shfl_xor_sync(~0u, lane & 16 ? sums[i] : sums[i + 4], 16);
      four[i] = (lane & 16 ? sums[i + 4] : sums[i]) + other;
    }
    float two[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float other = __shfl_xor_sync(~0u, lane & 8 ? four[i] : four[i + 2], 8);
      two[i] = (lane & 8 ? four[i + 2] : four[i]) + other;
    }
    return make_float2(two[0], two[1]);
  }
};

// Adds the `parts` partial results of a row in order, those of part p at place first + p * step,
// takes the top keys out again and writes the results. By a warp; overwrites the scores of the
// keys.
//
// The products had every key's weight rounded to T. What is taken out is rounded in the same way,
// and shifts are whole numbers, so that nothing but the rounding of sums is left of a top key.
template <class T>
__device__ __forceinline__ void write_outputs(const SelectArgs<T>& args, const MeanOutputs<T>& to,
                                              int item, int head, int cluster, const TopKeys& keys,
                                              float* weights, int parts, std::int64_t first,
                                              std::int64_t step) {
  const CentroidQueries& queries = args.queries;
  const int lane = threadIdx.x % 32;
  const std::int64_t row = queries.row(item, head, cluster);
  const ItemSpan span = queries.spans.k.span(item);
  const PartialRow own =
      lane < parts ? to.rows[first + lane * step] : PartialRow{-INFINITY, 0.0f, 0.0f, 0.0f};
  float shift = own.shift;
#pragma unroll
  for (int i = 16; i > 0; i /= 2) shift = fmaxf(shift, __shfl_xor_sync(~0u, shift, i));
  if (shift == -INFINITY) shift = 0.0f;  // no keys at all
  const float factor = lane < parts ? exp2_approximate(own.shift - shift) : 0.0f;
  float sum = factor * own.sum, listed = 0.0f;
  for (int i = lane; i < keys.count; i += 32) {
    const float weight = exp2_approximate(fmaf(keys.score[i], queries.exponent, -shift));
    listed += weight;
    weights[i] = to_float(from_float<T>(weight));
  }
  __syncwarp();
#pragma unroll
  for (int i = 16; i > 0; i /= 2) {
    sum += __shfl_xor_sync(~0u, sum, i);
    listed += __shfl_xor_sync(~0u, listed, i);
  }
  const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
  if (lane == 0) {
    to.lse[row] = sum == 0.0f ? -INFINITY : (shift + log2f(sum)) * 0.693147180559945f;
    to.mass[row] = listed * inverse;
  }
  const bool nothing = keys.count == span.length;  // all keys are top keys
  const Rows<const T> v = to.v.rows(span.batch, head / queries.group, span.begin);
#pragma unroll 1
  for (int begin = 0; begin < to.width; begin += 64) {
    const int column = begin + ListedValues<T>::column();
    float2 total = make_float2(0.0f, 0.0f);
    float2 values[kSelectParts];
#pragma unroll
    for (int p = 0; p < kSelectParts; ++p)
      values[p] = *reinterpret_cast<const float2*>(
          to.outs + (first + min(p, max(parts - 1, 0)) * step) * to.pitch + column);
    ListedValues<T> listed_values;
    listed_values.add(v, keys.index, weights, keys.count, begin);
#pragma unroll
    for (int p = 0; p < kSelectParts; ++p) {
      const float weight = __shfl_sync(~0u, factor, p);
      if (p >= parts) continue;
      total.x = fmaf(weight, values[p].x, total.x);
      total.y = fmaf(weight, values[p].y, total.y);
    }
    const float2 out = listed_values.total();
    if (column < to.width)
      to.out[row * to.width + column] = nothing ? 0.0f : (total.x - out.x) * inverse;
    if (column + 1 < to.width)
      to.out[row * to.width + column + 1] = nothing ? 0.0f : (total.y - out.y) * inverse;
  }
  __syncwarp();
}

// A row of the last step: top keys, and with kAttend the outputs. `first`, `step`: of its partial
// results.
template <bool kAttend, class T>
__device__ __forceinline__ void finish_row(const SelectArgs<T>& args, const MeanOutputs<T>& to,
                                           int item, int head, int cluster, const RowLists& lists,
                                           std::int64_t first, std::int64_t step,
                                           MergeMemory& memory) {
  const TopKeys keys = merge_lists(args, item, head, cluster, lists, memory);
  if constexpr (kAttend)
    write_outputs(args, to, item, head, cluster, keys, memory.score, lists.total / kLaneLists,
                  first, step);
  __syncwarp();
}

// Top keys, and with outputs the attention too, by Hopper's warpgroup products; 16-bit types only.
template <class T>
void improved_sm90a(const SelectArgs<T>& args, const SelectTeams& teams, const MeanOutputs<T>* to,
                    cudaStream_t stream);

}  // namespace coterie::cuda
