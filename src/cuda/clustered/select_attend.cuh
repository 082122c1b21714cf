// SPDX-License-Identifier: MIT
// Last step of select_attend_sm90a.cu: partial outputs of the blocks of a team added up, top keys
// taken out of them again, and results written. A warp has two rows side by side, 16 lanes each;
// their memory is MergeMemory (merge.cuh), 4.5 KiB a row.
#pragma once

#include <cstdint>

#include "cuda/clustered/centroid_attend.cuh"
#include "cuda/clustered/merge.cuh"
#include "cuda/clustered/select.cuh"

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

// The partial results of a row: `parts` of them, the first one at place `first`.
struct RowParts {
  int parts;
  std::int64_t first, step;
};

// Weighted sums of listed rows, 64 columns of them: a lane has those of kColumns from column() on.
template <class T>
struct ListedValues {
  static constexpr int kVector = 16 / sizeof(T), kColumns = 4;
  static_assert(kVector == 8, "eight lanes for 64 columns");
  float sums[kVector] = {};

  __device__ static int column() { return row_lane() % 8 * kVector + row_lane() / 8 * kColumns; }

  // Adds weights times rows of `count` keys, columns [first, first + 64). index: complements; the
  // first one is valid at any rate. `most`: the larger count of both rows of the warp.
  __device__ __forceinline__ void add(const Rows<const T>& rows, const std::uint32_t* index,
                                      const float* weight, int count, int most, int first) {
    constexpr int kTogether = 16;  // rows of a lane, whose loads are in flight together
    const int lane = row_lane(), column = first + lane % 8 * kVector;
    if (!rows.aligned) return add_slowly(rows, index, weight, count, column);
    const int place = column < rows.width ? column : 0;
#pragma unroll 1
    for (int begin = lane / 8; begin < most; begin += 2 * kTogether) {
      uint4 words[kTogether];
      float factors[kTogether];
#pragma unroll
      for (int u = 0; u < kTogether; ++u) {
        const int at = max(min(begin + 2 * u, count - 1), 0);
        words[u] = *reinterpret_cast<const uint4*>(rows.row(static_cast<int>(~index[at])) + place);
        factors[u] = begin + 2 * u < count ? weight[at] : 0.0f;
      }
#pragma unroll
      for (int u = 0; u < kTogether; ++u)
#pragma unroll
        for (int i = 0; i < kVector; ++i)
          sums[i] = fmaf(factors[u], to_float(reinterpret_cast<const T*>(&words[u])[i]), sums[i]);
    }
  }
  __device__ __forceinline__ void add_slowly(const Rows<const T>& rows, const std::uint32_t* index,
                                             const float* weight, int count, int column) {
#pragma unroll 1
    for (int key = row_lane() / 8; key < count; key += 2) {
      const T* row = rows.row(static_cast<int>(~index[key]));
#pragma unroll
      for (int i = 0; i < kVector; ++i)
        if (column + i < rows.width)
          sums[i] = fmaf(weight[key], to_float(row[column + i]), sums[i]);
    }
    __syncwarp();
  }
  // The lane's sums over all keys.
  __device__ void total(float (&to)[kColumns]) const {
    const bool upper = row_lane() >= 8;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) to[i] = exchange(upper, sums[i], sums[i + kColumns], 8);
  }
};

// Adds the partial results of a row in order, two rows of a warp side by side. First of all: no
// step before it has loads in flight that these could join.
template <class T>
__device__ __forceinline__ void add_parts(const MeanOutputs<T>& to, const SelectRow& row,
                                          const RowParts& parts, MergeMemory& memory) {
  const int lane = row_lane();
  PartialRow own{-INFINITY, 0.0f, 0.0f, 0.0f};
  if (row.members && lane < parts.parts) own = to.rows[parts.first + lane * parts.step];
#pragma unroll 1
  for (int column = 4 * lane; column < to.pitch; column += 4 * kRowLanes) {
    const float* outs = to.outs + parts.first * to.pitch + column;
    float4 values[kSelectParts], total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int p = 0; p < kSelectParts; ++p)  // all in flight together
      values[p] =
          *reinterpret_cast<const float4*>(outs + min(p, parts.parts - 1) * parts.step * to.pitch);
    float shift = row_max(own.shift);
    if (shift == -INFINITY) shift = 0.0f;  // no keys at all
    const float factor = exp2_approximate(own.shift - shift), sum = row_sum(factor * own.sum);
#pragma unroll
    for (int p = 0; p < kSelectParts; ++p) {
      const float weight = __shfl_sync(~0u, factor, p, kRowLanes);
      if (p >= parts.parts) continue;
      total.x = fmaf(weight, values[p].x, total.x);
      total.y = fmaf(weight, values[p].y, total.y);
      total.z = fmaf(weight, values[p].z, total.z);
      total.w = fmaf(weight, values[p].w, total.w);
    }
    *reinterpret_cast<float4*>(memory.total + column) = total;
    if (lane == 0) memory.shift = shift, memory.sum = sum;
  }
  __syncwarp();
}

// Takes a row's `count` top keys out of the sums again and writes the results. Two rows of a warp
// side by side; overwrites the scores of the keys.
//
// The products had every key's weight rounded to T. What is taken out is rounded in the same way,
// and shifts are whole numbers, so that nothing but the rounding of sums is left of a top key.
template <class T>
__device__ __forceinline__ void write_outputs(const SelectArgs<T>& args, const MeanOutputs<T>& to,
                                              const SelectRow& row, int count,
                                              MergeMemory& memory) {
  constexpr int kColumns = ListedValues<T>::kColumns;
  const CentroidQueries& queries = args.queries;
  const int lane = row_lane(), most = pair_max(count);
  const std::int64_t number = row.number(queries);
  const ItemSpan span = queries.spans.k.span(row.item);
  const float shift = memory.shift, sum = memory.sum, inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
  float listed = 0.0f;
  for (int i = lane; i < count; i += kRowLanes) {
    const float weight = shifted_weight(memory.score[i], queries.exponent, shift);
    listed += weight;
    memory.score[i] = to_float(from_float<T>(weight));
  }
  if (count == 0 && lane == 0) memory.index[0] = ~0u;
  __syncwarp();
  listed = row_sum(listed);
  if (lane == 0 && row.there) {
    to.lse[number] = row_lse(shift, sum);
    to.mass[number] = listed * inverse;
  }
  // Without members, or all keys are top keys.
  const bool nothing = !row.members || count == span.length;
  const Rows<const T> v = to.v.rows(span.batch, row.head / queries.group, span.begin);
#pragma unroll 1
  for (int begin = 0; begin < to.width; begin += 64) {
    const int column = begin + ListedValues<T>::column();
    float top[kColumns];
    ListedValues<T> values;
    values.add(v, memory.index, memory.score, count, most, begin);
    values.total(top);
    const float* total = memory.total + column;
    float* out = to.out + number * to.width + column;
#pragma unroll
    for (int e = 0; e < kColumns; ++e)
      if (row.there && column + e < to.width)
        out[e] = nothing ? 0.0f : (count == 0 ? total[e] : total[e] - top[e]) * inverse;
  }
  __syncwarp();
}

// Two rows of the last step: top keys, and with kAttend the outputs.
template <bool kAttend, class T>
__device__ __forceinline__ void finish_rows(const SelectArgs<T>& args, const MeanOutputs<T>& to,
                                            const SelectRow& row, const RowLists& lists,
                                            const RowParts& parts, MergeMemory* pair) {
  MergeMemory& memory = pair[threadIdx.x / kRowLanes % 2];
  if constexpr (kAttend) add_parts(to, row, parts, memory);
  const int count = merge_lists(args, row, lists, pair);
  if constexpr (kAttend) write_outputs(args, to, row, count, memory);
  __syncwarp();
}

// Top keys, and with outputs the attention too, by Hopper's warpgroup products; 16-bit types only.
template <class T>
void select_sm90a(const SelectArgs<T>& args, const SelectTeams& teams, const MeanOutputs<T>* to,
                  cudaStream_t stream);

}  // namespace coterie::cuda
