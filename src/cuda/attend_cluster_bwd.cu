// SPDX-License-Identifier: MIT
// The small steps of the backward pass between its large kernels (clustered_bwd.h): a cluster's
// operands of the centroid kernels, and its share of its members' dq.
#include <cmath>

#include "cuda/clustered_bwd.h"
#include "cuda/device/early.cuh"
#include "cuda/device/element.cuh"
#include "cuda/device/row_chunk.cuh"
#include "cuda/device/row_sums.cuh"
#include "cuda/device/softmax.cuh"
#include "cuda/launch.h"

namespace coterie::cuda {
namespace {

constexpr int kWarpsPerBlock = 4;

// A cluster and its members, seen by a warp.
struct ClusterRow {
  std::int64_t row;
  int item, head, cluster;
  int begin, count;
  ItemSpan span;

  template <class T>
  __device__ ClusterRow(const BackwardArgs<T>& args, std::int64_t number) : row(number) {
    const BackwardShape& shape = args.shape;
    cluster = static_cast<int>(row % shape.clusters);
    head = static_cast<int>(row / shape.clusters % shape.H);
    item = static_cast<int>(row / shape.clusters / shape.H);
    const std::int32_t* offset =
        args.lists.offsets + row / shape.clusters * (shape.clusters + 1) + cluster;
    begin = offset[0];
    count = offset[1] - offset[0];
    span = shape.spans.q.span(item);
  }
};

template <class T>
__device__ __forceinline__ std::int64_t num_rows(const BackwardArgs<T>& args) {
  return static_cast<std::int64_t>(args.shape.items) * args.shape.H * args.shape.clusters;
}

// What the kernels read of a cluster, in a warp: this lane's chunk of its rows, every group of
// lanes alike.
template <class T>
struct ClusterOperands {
  static constexpr int kVector = ChunkLane<T>::kVector;
  float mean[kVector], dout[kVector];  // rounded to T
  float lse, delta, dmass;
};

// Rounds, and writes where `write`.
template <class T>
__device__ __forceinline__ void round_chunk(float (&values)[16 / sizeof(T)], T* to, bool write) {
  union {
    uint4 words;
    T element[16 / sizeof(T)];
  } chunk;
#pragma unroll
  for (int i = 0; i < static_cast<int>(16 / sizeof(T)); ++i) {
    chunk.element[i] = from_float<T>(values[i]);
    values[i] = to_float(chunk.element[i]);
  }
  if (write) *reinterpret_cast<uint4*>(to) = chunk.words;
}

// This lane's pieces of the keys and values in a few slots of a cluster; -1: no key.
template <class T>
struct TopRows {
  static constexpr int kBatch = 2;
  int key[kBatch];
  uint4 k[kBatch], v[kBatch];

  __device__ void load(const BackwardArgs<T>& args, const ClusterRow& c, const ItemSpan& span,
                       const ChunkLane<T>& at, int first) {
    const int groups = 32 / at.lanes, topk = args.shape.topk;
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int slot = first + b * groups + at.group;
      key[b] = slot < topk ? args.lists.top_keys[c.row * topk + slot] : -1;
    }
    const int key_head = c.head / args.shape.group;
    const Rows<const T> keys = args.k.rows(span.batch, key_head, span.begin);
    const Rows<const T> values = args.v.rows(span.batch, key_head, span.begin);
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      k[b] = at.load(keys, key[b]);
      v[b] = at.load(values, key[b]);
    }
  }
};

// What the centroid kernels get wrong for the top keys of a cluster, from the same rounded
// operands: dS should be A (dm - delta) and the weight 0, where they took A (dout . v - delta) and
// A. Groups of lanes take turns; `rows` holds the first slots.
template <class T>
__device__ __forceinline__ void correct_top_keys(const BackwardArgs<T>& args, const ClusterRow& c,
                                                 const ItemSpan& span, const ChunkLane<T>& at,
                                                 const ClusterOperands<T>& own, TopRows<T>& rows) {
  constexpr int kVector = ChunkLane<T>::kVector, kBatch = TopRows<T>::kBatch;
  const BackwardShape& shape = args.shape;
  const int groups = 32 / at.lanes, topk = shape.topk;
  const float unscale = 1.0f / (shape.weight_scale * shape.gradient_scale);
  float dmean[kVector] = {};
#pragma unroll 1
  for (int first = 0; first < topk; first += kBatch * groups) {  // all lanes: they shuffle
    const TopRows<T> now = rows;
    rows.load(args, c, span, at, first + kBatch * groups);
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const T* k_row = reinterpret_cast<const T*>(&now.k[b]);
      const T* v_row = reinterpret_cast<const T*>(&now.v[b]);
      float s = 0.0f, gv = 0.0f;
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        s = fmaf(own.mean[i], to_float(k_row[i]), s);
        gv = fmaf(own.dout[i], to_float(v_row[i]), gv);
      }
      s = at.sum(s);
      gv = at.sum(gv);
      const float a =
          now.key[b] < 0 ? 0.0f : exp2_approximate(fmaf(s, shape.scale * kLog2E, -own.lse));
      float ds = a * (own.dmass - own.delta) - to_float(from_float<T>(a * (gv - own.delta)));
      ds *= shape.scale * unscale;
#pragma unroll
      for (int i = 0; i < kVector; ++i) dmean[i] = fmaf(ds, to_float(k_row[i]), dmean[i]);
      const int slot = first + b * groups + at.group;
      if (at.lane > 0 || slot >= topk) continue;
      args.scratch.top_ds[c.row * topk + slot] = ds;
      args.scratch.top_weight[c.row * topk + slot] = -to_float(from_float<T>(a)) * unscale;
    }
  }
#pragma unroll
  for (int i = 0; i < kVector; ++i) dmean[i] = at.sum_groups(dmean[i]);
  if (at.group > 0 || at.column() >= shape.pitch) return;
  float4* to =
      reinterpret_cast<float4*>(args.scratch.top_dmean + c.row * shape.pitch + at.column());
#pragma unroll
  for (int i = 0; i < kVector / 4; ++i)
    to[i] = make_float4(dmean[4 * i], dmean[4 * i + 1], dmean[4 * i + 2], dmean[4 * i + 3]);
}

// Adds up the units of a cluster: dout, dmass and delta, and what else the centroid kernels read of
// it; then what they get wrong for its top keys. A warp per cluster. What waits for nothing is
// loaded first: the kernel is a chain of such waits.
template <class T>
__global__ void __launch_bounds__(32 * kWarpsPerBlock, 6)
    cluster_gradient_kernel(const __grid_constant__ BackwardArgs<T> args) {
  release_next();
  constexpr int kVector = ChunkLane<T>::kVector;
  const std::int64_t number =
      blockIdx.x * static_cast<std::int64_t>(kWarpsPerBlock) + threadIdx.x / 32;
  if (number >= num_rows(args)) return;
  const BackwardShape& shape = args.shape;
  const BackwardScratch<T>& scratch = args.scratch;
  const ClusterRow c(args, number);
  const ItemSpan span = shape.spans.k.span(c.item);
  const ChunkLane<T> at(shape.pitch);
  const bool inside = at.column() < shape.pitch, first_group = at.group == 0 && inside;
  TopRows<T> rows;
  if (shape.topk > 0) rows.load(args, c, span, at, 0);
  ClusterOperands<T> own{};
  float out[kVector];
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    const int column = at.column() + i;
    own.mean[i] =
        column < args.k.width ? args.lists.centroids[c.row * args.k.width + column] : 0.0f;
    out[i] = column < args.v.width ? args.lists.out[c.row * args.v.width + column] : 0.0f;
  }
  const float lse = args.lists.centroid_lse[c.row];
  const float mass = shape.topk > 0 ? args.lists.mass[c.row] : 0.0f;
  await_writes();
  const std::int64_t first = static_cast<std::int64_t>(c.head) * shape.units.total +
                             shape.units.first_tile(c.item, c.cluster, c.span, c.begin);
  for (std::int64_t unit = first; unit < first + (c.count + kUnitRows - 1) / kUnitRows; ++unit) {
    own.dmass += scratch.unit_dmass[unit];
#pragma unroll
    for (int i = 0; i < kVector; ++i)
      if (inside) own.dout[i] += scratch.unit_dout[unit * shape.pitch + at.column() + i];
  }
#pragma unroll
  for (int i = 0; i < kVector; ++i) own.dout[i] *= shape.gradient_scale;
  const std::int64_t place = c.row * shape.pitch + at.column();
  round_chunk<T>(own.dout, scratch.dout + place, first_group);
  round_chunk<T>(own.mean, scratch.mean + place, first_group);
  // delta is taken of the rounded sum: dout . v - delta then cancels as in exact arithmetic.
  float delta = 0.0f;
#pragma unroll
  for (int i = 0; i < kVector; ++i) delta = fmaf(own.dout[i], out[i], delta);
  own.dmass *= shape.gradient_scale;
  delta = at.sum(delta) + mass * own.dmass;
  const bool empty = c.count == 0 || lse == -INFINITY;
  own.lse = empty ? INFINITY : lse * kLog2E - log2f(shape.weight_scale);
  own.delta = empty ? 0.0f : delta;
  if (threadIdx.x % 32 == 0) {
    scratch.row_lse[c.row] = own.lse;
    scratch.row_delta[c.row] = own.delta;
  }
  if (shape.topk > 0 && c.count > 0) correct_top_keys(args, c, span, at, own, rows);
}

// dmean_c / n_c in this lane's columns: slices and top keys, added in a fixed order. Groups of
// lanes take turns.
template <class T>
__device__ __forceinline__ void mean_gradient(float (&mean)[16 / sizeof(T)],
                                              const BackwardArgs<T>& args, int item, int head,
                                              int cluster, const ChunkLane<T>& at) {
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
  const std::int64_t row = static_cast<std::int64_t>(head) * shape.clusters + cluster;
  const std::int64_t rows = static_cast<std::int64_t>(shape.H) * shape.clusters;
  if (at.column() < shape.pitch) {
    const int count = shape.chunks.count(shape.spans.k.span(item).length);
    const std::int64_t first = shape.chunks.first_slot(shape.spans.k, item);
    const float* slices = args.scratch.mean_slices + (first * rows + row) * shape.pitch;
#pragma unroll 4
    for (int i = at.group; i < count; i += 32 / at.lanes) add(slices + i * rows * shape.pitch);
    if (shape.topk > 0 && at.group == 0)
      add(args.scratch.top_dmean + (item * rows + row) * shape.pitch);
  }
  const std::int32_t* offset =
      args.lists.offsets +
      (item * static_cast<std::int64_t>(shape.H) + head) * (shape.clusters + 1) + cluster;
  const float share = 1.0f / static_cast<float>(offset[1] - offset[0]);
#pragma unroll
  for (int i = 0; i < kVector; ++i) mean[i] = at.sum_groups(mean[i]) * share;
}

// Adds to dq of a cluster's members what its mean contributes, or writes it where there are no top
// keys. A block takes a unit.
template <class T>
__global__ void __launch_bounds__(128)
    broadcast_gradient_kernel(const __grid_constant__ BackwardArgs<T> args) {
  release_next();
  constexpr int kVector = ChunkLane<T>::kVector, kBatch = 4;
  const BackwardShape& shape = args.shape;
  const int head = static_cast<int>(blockIdx.x) / shape.units.total;
  const QueryTile unit = shape.units.find(shape.spans.q, args.lists.offsets, shape.H, head,
                                          static_cast<int>(blockIdx.x) % shape.units.total);
  if (unit.count == 0) return;
  const Rows<T> dq = args.dq.rows(unit.span.batch, head, unit.span.begin);
  const std::int32_t* order =
      args.lists.order + (static_cast<std::int64_t>(unit.span.batch) * shape.H + head) * shape.N +
      unit.span.begin + unit.first;
  const ChunkLane<T> at(shape.pitch);
  const int there = min(max(dq.width - at.column(), 0), kVector), groups = 32 / at.lanes;
  float mean[kVector];
  await_writes();
  mean_gradient(mean, args, unit.item, head, unit.cluster, at);
  const int step = static_cast<int>(blockDim.x) / 32 * groups;
  for (int first = static_cast<int>(threadIdx.x) / at.lanes; first < unit.count;
       first += kBatch * step) {
    T* to[kBatch];
    uint4 words[kBatch] = {};
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int r = first + b * step;
      to[b] = r < unit.count && there > 0 ? dq.row(order[r]) + at.column() : nullptr;
    }
    if (shape.topk > 0)
#pragma unroll
      for (int b = 0; b < kBatch; ++b)
        if (to[b]) words[b] = load_elements(to[b], there, dq.aligned);
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      VectorSum<T> sum;
      sum.add(words[b]);
#pragma unroll
      for (int i = 0; i < kVector; ++i) sum.sum[i] += mean[i];
      if (to[b]) store_elements(to[b], sum.sum, there, dq.aligned);
    }
  }
}

}  // namespace

template <class T>
void cluster_gradients(const BackwardArgs<T>& args, cudaStream_t stream) {
  const std::int64_t rows =
      static_cast<std::int64_t>(args.shape.items) * args.shape.H * args.shape.clusters;
  launch_early("cluster_gradient", cluster_gradient_kernel<T>,
               static_cast<unsigned>((rows + kWarpsPerBlock - 1) / kWarpsPerBlock),
               32 * kWarpsPerBlock, 0, stream, args);
}

template <class T>
void broadcast_gradients(const BackwardArgs<T>& args, cudaStream_t stream) {
  const BackwardShape& shape = args.shape;
  const int threads = shape.N <= 48 * static_cast<std::int64_t>(shape.clusters) ? 32 : 128;
  launch_early("broadcast_gradient", broadcast_gradient_kernel<T>,
               static_cast<unsigned>(shape.H * shape.units.total), threads, 0, stream, args);
}

#define COTERIE_INSTANTIATE(T)                                           \
  template void cluster_gradients(const BackwardArgs<T>&, cudaStream_t); \
  template void broadcast_gradients(const BackwardArgs<T>&, cudaStream_t);
COTERIE_INSTANTIATE(float)
COTERIE_INSTANTIATE(__nv_bfloat16)
COTERIE_INSTANTIATE(__half)
#undef COTERIE_INSTANTIATE

}  // namespace coterie::cuda
