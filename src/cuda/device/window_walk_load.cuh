// SPDX-License-Identifier: MIT
// How tiles come into shared memory in the backward pass of windows (window_walk.cuh): each of the
// four warpgroups loads one of the four tensors.
#pragma once

#include "cuda/device/row_chunk.cuh"
#include "cuda/device/window_walk.cuh"

namespace coterie::cuda {

// A warpgroup's tensor: keys, values, queries or output gradients of an item and head.
template <class T>
struct alignas(16) WalkSource {
  const T* data;  // of rank 0
  std::int64_t pitch;
  int origin, count;
  int width;

  __device__ WalkSource(const ListBackwardArgs<T>& args, const WalkPart& part, int group) {
    const Tensor4<const T>& keys = group == 0 ? args.k : args.v;
    const Tensor4<const T>& queries = group == 2 ? args.q : args.g;
    const Rows<const T> rows = group < 2 ? keys.rows(part.batch, part.head, part.k_begin)
                                         : queries.rows(part.batch, part.head, part.q_begin);
    data = rows.data;
    pitch = rows.pitch;
    width = rows.width;
    origin = group < 2 ? part.k_origin : part.q_origin;
    count = group < 2 ? part.keys : part.queries;
  }
  // Starts to copy a tile; ranks outside [0, count) become zeros.
  __device__ void load(std::uint32_t to, int tile) const {
    const unsigned thread = thread_again();
    const unsigned row = thread % kWarpgroup / 8, chunk = thread % 8;
    const std::uint32_t at = to + row * 128 + ((chunk ^ row % 8) << 4);
    const int first = origin + tile * kStreamRows, rank = first + static_cast<int>(row);
    const int step = static_cast<int>(pitch) * static_cast<int>(sizeof(T)), all = count;
    const bool inside = static_cast<int>(chunk * 8) < width;
    const T* from = data + (inside ? chunk * 8 : 0);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool there =
          static_cast<unsigned>(rank + 16 * i) < static_cast<unsigned>(all) && inside;
      cp_async16(at + 2048 * i, row_address(from, there ? rank + 16 * i : 0, step), there ? 16 : 0);
    }
  }
};

template <class T>
__device__ __forceinline__ WalkSource<T>& walk_source(const WalkShape& shape, int group) {
  static_assert(sizeof(WalkSource<T>) <= 48, "its place");
  return *reinterpret_cast<WalkSource<T>*>(shape.memory + WalkShape::kSourcesAt + group * 48);
}

}  // namespace coterie::cuda
