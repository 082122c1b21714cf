// SPDX-License-Identifier: MIT
// Writes columns of a CentroidTable (stages.h).
#pragma once

#include "cuda/cluster/stages.h"
#include "cuda/prim/row_fragments.cuh"
#include "cuda/prim/warp.cuh"

namespace coterie::cuda {

// Column c of a problem's table, and the `copies` - 1 < 32 columns after it, by a warp: m'_c, which
// is `weighed` (m_c) rounded, b_c and the norm. The lane has elements lane + 32 i of the centroid,
// of the reference and of m_c.
template <class T, int kChunks>
__device__ __forceinline__ void write_column(const CentroidTable& table, int problem, int c,
                                             int copies, const float (&mean)[kChunks],
                                             const float (&reference)[kChunks],
                                             const float (&weighed)[kChunks]) {
  constexpr int kParts = kNearestParts<T>;
  using F = Factor<T>;
  const int lane = threadIdx.x % 32;
  F* columns = static_cast<F*>(table.columns) +
               static_cast<std::int64_t>(problem) * table.padded * kChunks * 32 * kParts;
  float bias = 0.0f, norm = 0.0f;
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    F part[kParts];
    split_factor(weighed[i], part);
    float rounded = 0.0f;
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
      rounded += to_float(part[p]);
      for (int copy = 0; copy < copies; ++copy)
        columns[table_index(kChunks, kParts, c + copy, lane + 32 * i, p)] = part[p];
    }
    bias -= 0.5f * (mean[i] + reference[i]) * weighed[i] + mean[i] * (rounded - weighed[i]);
    norm += fabsf(rounded);
  }
  bias = warp_sum(bias);
  norm = warp_sum(norm);
  if (lane >= copies) return;
  table.bias[static_cast<std::int64_t>(problem) * table.padded + c + lane] = bias;
  table.norms[static_cast<std::int64_t>(problem) * table.padded + c + lane] = norm;
}

}  // namespace coterie::cuda
