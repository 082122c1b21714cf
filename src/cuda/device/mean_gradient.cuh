// SPDX-License-Identifier: MIT
// The gradient of a query by the mean of its cluster.
#pragma once

#include <cstdint>

#include "cuda/clustered_bwd.h"

namespace coterie::cuda {

// dmean_c / n_c in one column: slices and top keys, added in a fixed order.
template <class T>
__device__ __forceinline__ float mean_gradient(const BackwardArgs<T>& args, int item, int head,
                                               int cluster, int column) {
  const BackwardShape& shape = args.shape;
  const std::int64_t problem = static_cast<std::int64_t>(item) * shape.H + head;
  const std::int32_t* offset = args.lists.offsets + problem * (shape.clusters + 1) + cluster;
  const int count = shape.chunks.count(shape.spans.k.span(item).length);
  const std::int64_t first = shape.chunks.first_slot(shape.spans.k, item);
  const std::int64_t step = static_cast<std::int64_t>(shape.H) * shape.clusters * shape.pitch;
  const float* slice = args.scratch.mean_slices + first * step +
                       (static_cast<std::int64_t>(head) * shape.clusters + cluster) * shape.pitch +
                       column;
  float sum =
      shape.topk > 0
          ? args.scratch.top_dmean[(problem * shape.clusters + cluster) * shape.pitch + column]
          : 0.0f;
#pragma unroll 8
  for (int i = 0; i < count; ++i) sum += slice[i * step];
  return sum / static_cast<float>(offset[1] - offset[0]);
}

}  // namespace coterie::cuda
