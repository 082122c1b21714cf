// SPDX-License-Identifier: MIT
// Outputs of plain clustered attention: out_i = centroid_out_c for the cluster c of query i,
// rounded to the element type; 0 in padding.
//
// Grid (16-byte chunks of rows / 128, H, B), 128 threads: a thread writes 16 bytes of one row. No
// shared memory. Rows that are not aligned to 16 bytes are written element by element. All devices
// and element types.
#include "cuda/clustered/clustered.h"
#include "cuda/launch/dispatch.h"
#include "cuda/launch/launch.h"
#include "cuda/prim/element.cuh"
#include "cuda/prim/tensor.cuh"

namespace coterie::cuda {
namespace {

constexpr int kThreads = 128;

// Row i becomes row labels[i] of `from` (items, H, C, width), or 0 in the padding. One thread per
// 16 bytes of output.
template <class T>
__global__ void __launch_bounds__(kThreads)
    broadcast_kernel(const __grid_constant__ Tensor4<T> out, const float* from,
                     const std::int32_t* labels, int clusters, SequenceSpans queries, int items) {
  constexpr int kVector = 16 / sizeof(T);
  const int chunks = (out.width + kVector - 1) / kVector;
  const int number = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  const int row = number / chunks, column = number % chunks * kVector;
  const int head = blockIdx.y, batch = blockIdx.z, H = gridDim.y;
  if (row >= queries.rows) return;
  const int item = queries.item_of(batch, row, items);
  const int label =
      item < 0 ? -1 : labels[(static_cast<std::int64_t>(batch) * H + head) * queries.rows + row];
  union {
    uint4 words;
    T elements[kVector];
  } chunk;
  chunk.words = make_uint4(0, 0, 0, 0);
  if (label >= 0 && label < clusters) {
    const float* source =
        from + ((static_cast<std::int64_t>(item) * H + head) * clusters + label) * out.width;
#pragma unroll
    for (int i = 0; i < kVector; ++i)
      if (column + i < out.width) chunk.elements[i] = from_float<T>(source[column + i]);
  }
  T* to = out.rows(batch, head, row).data + column;
  if (out.aligned) {
    *reinterpret_cast<uint4*>(to) = chunk.words;
  } else {
#pragma unroll
    for (int i = 0; i < kVector; ++i)
      if (column + i < out.width) to[i] = chunk.elements[i];
  }
}

}  // namespace

void broadcast_means(const ClusteredForward& pass) {
  const AttentionCall& call = pass.plan.call;
  if (pass.out.count() == 0) return;
  dispatch_element(call.op, call.inputs.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr std::int64_t kVector = 16 / sizeof(T);
    const std::int64_t chunks = call.N * ((call.Dv + kVector - 1) / kVector);
    const dim3 grid(static_cast<unsigned>((chunks + kThreads - 1) / kThreads),
                    static_cast<unsigned>(call.H), static_cast<unsigned>(call.B));
    broadcast_kernel<T><<<grid, kThreads, 0, pass.stream>>>(
        tensor4<T>(pass.out), floats(pass.tensors.out), ints(pass.tensors.labels),
        pass.plan.clusters, pass.plan.means.spans.q, static_cast<int>(call.num_items()));
    COTERIE_LAUNCH("broadcast");
  });
}

}  // namespace coterie::cuda
