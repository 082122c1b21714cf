// SPDX-License-Identifier: MIT
// broadcast_kernel, outputs of plain clustered attention: out_i = centroid_out_c for the cluster c
// of query i, rounded to the element type; 0 in padding.
//
// Grid (16-byte chunks of rows / 128, H, B), 128 threads: a thread writes 16 bytes of one row. No
// shared memory. Rows that are not aligned to 16 bytes are written element by element. All devices
// and element types.
//
// broadcast_gradient_kernel, what a cluster's mean adds to dq of its members (backward.h):
//   dq_i += dmean_c / n_c, dmean_c = sum of mean_slices over the chunks of keys + top_dmean
// or dq_i = dmean_c / n_c where there are no top keys and no near keys.
//
// Grid (units / units of a block, H), 128 threads. Four warps take one unit of a cluster
// (ClusterUnits); where clusters have up to 48 members a warp takes one unit. 4 to 32 lanes hold a
// row, 16 bytes each, and every group of lanes adds the slices again. No shared memory. Rows that
// are not aligned are read and written element by element. All devices and element types.
//
// The next kernel may start once all kernels before this one have ended: it does not read dq.
#include <cstdint>

#include "cuda/clustered/clustered.h"
#include "cuda/launch/dispatch.h"
#include "cuda/launch/launch.h"
#include "cuda/prim/dependent.cuh"
#include "cuda/prim/element.cuh"
#include "cuda/prim/row_chunk.cuh"
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

// dmean_c / n_c in this lane's columns: slices and top keys, added in a fixed order. Groups of
// lanes take slices in turn.
template <class T>
__device__ __forceinline__ void mean_gradient(float (&mean)[16 / sizeof(T)],
                                              const BackwardArgs<T>& args, const ClusterUnit& unit,
                                              int head, const ChunkLane<T>& at) {
  constexpr int kVector = 16 / sizeof(T);
  const BackwardShape& shape = args.shape;
#pragma unroll
  for (int i = 0; i < kVector; ++i) mean[i] = 0.0f;
  const auto add = [&](const float* from) {
#pragma unroll
    for (int i = 0; i < kVector; i += 4) {
      const float4 four = *reinterpret_cast<const float4*>(from + at.column() + i);
      mean[i] += four.x;
      mean[i + 1] += four.y;
      mean[i + 2] += four.z;
      mean[i + 3] += four.w;
    }
  };
  const std::int64_t row = static_cast<std::int64_t>(head) * shape.clusters + unit.cluster;
  const std::int64_t rows = static_cast<std::int64_t>(shape.H) * shape.clusters;
  if (at.column() < shape.pitch) {
    const int count = shape.chunks.count(shape.spans.k.span(unit.item).length);
    const std::int64_t first = shape.chunks.first_slot(shape.spans.k, unit.item);
    const float* slices = args.scratch.mean_slices + (first * rows + row) * shape.pitch;
#pragma unroll 4
    for (int i = at.group; i < count; i += 32 / at.lanes) add(slices + i * rows * shape.pitch);
    const bool more = shape.near > 0 ? !args.adds(unit.item, head) : shape.topk > 0;
    if (more && at.group == 0) add(args.scratch.top_dmean + (unit.item * rows + row) * shape.pitch);
  }
  const float share = 1.0f / static_cast<float>(unit.size);
#pragma unroll
  for (int i = 0; i < kVector; ++i) mean[i] = at.sum_groups(mean[i]) * share;
}

// Adds the contribution of the cluster's mean to dq of a unit's members, or writes it if there are
// no top keys and no near keys. Called by `warps` warps.
template <class T>
__device__ __forceinline__ void add_mean(const BackwardArgs<T>& args, int head,
                                         const ClusterUnit& unit, int warps) {
  constexpr int kVector = ChunkLane<T>::kVector, kBatch = 4;
  const BackwardShape& shape = args.shape;
  const Rows<T> dq = args.dq.rows(unit.span.batch, head, unit.span.begin);
  const std::int32_t* order =
      args.lists.order + (static_cast<std::int64_t>(unit.span.batch) * shape.H + head) * shape.N +
      unit.span.begin + unit.first;
  const ChunkLane<T> at(shape.pitch);
  const int there = dq.width - at.column(), groups = 32 / at.lanes;
  const bool fast = in_vectors(dq);
  float mean[kVector];
  mean_gradient(mean, args, unit, head, at);
  if (there <= 0) return;
  const int step = warps * groups;
  for (int first = static_cast<int>(threadIdx.x) / at.lanes % step; first < unit.count;
       first += kBatch * step) {
    T* to[kBatch];
    uint4 words[kBatch] = {};
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int r = min(first + b * step, unit.count - 1);
      to[b] = fast ? row_address(dq.data, order[r], pitch_bytes(dq)) : dq.row(order[r]);
      to[b] += at.column();
    }
    if (shape.topk > 0 || shape.near > 0)
#pragma unroll
      for (int b = 0; b < kBatch; ++b)
        words[b] = fast ? *reinterpret_cast<const uint4*>(to[b]) : load_slowly(to[b], there);
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      float sum[kVector];
#pragma unroll
      for (int i = 0; i < kVector; ++i) sum[i] = mean[i];
      add_chunk<T>(sum, words[b]);
      if (first + b * step >= unit.count) break;
      if (fast)
        *reinterpret_cast<uint4*>(to[b]) = pack_chunk<T>(sum);
      else
        store_slowly(to[b], pack_chunk<T>(sum), there);
    }
  }
}

// A block takes one unit, or four with a warp each. The next kernel may start once all kernels
// before this one have ended: it does not need this one.
template <class T>
__global__ void __launch_bounds__(kThreads)
    broadcast_gradient_kernel(const __grid_constant__ BackwardArgs<T> args, int warps) {
  const BackwardShape& shape = args.shape;
  const int head = static_cast<int>(blockIdx.y);
  const int number = static_cast<int>(blockIdx.x) * (kThreads / 32 / warps) +
                     static_cast<int>(threadIdx.x) / (32 * warps);
  const ClusterUnit unit =
      shape.units.find(shape.spans.q, args.lists.offsets, args.lists.labels, args.lists.order, head,
                       min(number, shape.units.blocks() - 1));
  await_writes();
  release_next();
  if (unit.count > 0 && number < shape.units.blocks()) add_mean(args, head, unit, warps);
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

template <class T>
void broadcast_gradients(const BackwardArgs<T>& args, cudaStream_t stream) {
  const BackwardShape& shape = args.shape;
  const int warps = shape.N <= 48 * static_cast<std::int64_t>(shape.clusters) ? 1 : kThreads / 32;
  const int per_block = kThreads / 32 / warps;
  launch_early("broadcast_gradient", broadcast_gradient_kernel<T>,
               dim3(static_cast<unsigned>((shape.units.blocks() + per_block - 1) / per_block),
                    static_cast<unsigned>(shape.H)),
               kThreads, 0, stream, args, warps);
}

template void broadcast_gradients(const BackwardArgs<float>&, cudaStream_t);
template void broadcast_gradients(const BackwardArgs<Bf16>&, cudaStream_t);
template void broadcast_gradients(const BackwardArgs<F16>&, cudaStream_t);

}  // namespace coterie::cuda
