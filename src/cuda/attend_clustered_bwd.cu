// SPDX-License-Identifier: MIT
// Backward pass of clustered and improved clustered attention (clustered_bwd.h): memory, order of
// the stages, and the small steps between them, which handle one cluster per warp.
#include <algorithm>
#include <cmath>

#include "cuda/clustered_bwd.h"
#include "cuda/device/await.cuh"
#include "cuda/device/element.cuh"
#include "cuda/device/load.cuh"
#include "cuda/device/mean_gradient.cuh"
#include "cuda/device/softmax.cuh"
#include "cuda/hopper.h"
#include "cuda/launch.h"
#include "cuda/tuning.h"

namespace coterie::cuda {
namespace {

constexpr int kWarpsPerBlock = 4;
constexpr int kColumns = kMaxHeadDim / 64;  // pairs of columns that a lane holds

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

// A row in 16-byte chunks, one per lane of a group of 4 to 32 lanes; kVector numbers a lane.
template <class T>
struct ChunkLane {
  static constexpr int kVector = 16 / static_cast<int>(sizeof(T));
  int lanes, group, lane;  // lanes of a group, number of the group in the warp, lane in the group

  __device__ explicit ChunkLane(int pitch) : lanes(4) {
    while (lanes * kVector < pitch) lanes *= 2;
    group = threadIdx.x % 32 / lanes;
    lane = threadIdx.x % lanes;
  }
  __device__ int column() const { return lane * kVector; }
  __device__ uint4 load(const Rows<const T>& rows, int row) const {
    if (row < 0 || column() >= rows.width) return make_uint4(0, 0, 0, 0);
    return rows.aligned ? *reinterpret_cast<const uint4*>(rows.row(row) + column())
                        : load_chunk(rows.row(row), column(), rows.width);
  }
  __device__ float sum(float value) const {
    for (int step = lanes / 2; step > 0; step /= 2)
      value += __shfl_xor_sync(0xffffffffu, value, step);
    return value;
  }
  // Over the groups of the warp.
  __device__ float sum_groups(float value) const {
    for (int step = lanes; step < 32; step *= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
    return value;
  }
};

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

// What the centroid kernels get wrong for the top keys of a cluster, from the same rounded
// operands: dS should be A (dm - delta) and the weight 0, where they took A (dout . v - delta) and
// A. Groups of lanes take turns.
template <class T>
__device__ __forceinline__ void correct_top_keys(const BackwardArgs<T>& args, const ClusterRow& c,
                                                 const ChunkLane<T>& at,
                                                 const ClusterOperands<T>& own) {
  constexpr int kVector = ChunkLane<T>::kVector, kBatch = 4;
  const BackwardShape& shape = args.shape;
  const int groups = 32 / at.lanes, topk = shape.topk;
  const ItemSpan span = shape.spans.k.span(c.item);
  const Rows<const T> k = args.k.rows(span.batch, c.head / shape.group, span.begin);
  const Rows<const T> v = args.v.rows(span.batch, c.head / shape.group, span.begin);
  const float unscale = 1.0f / (shape.weight_scale * shape.gradient_scale);
  float dmean[kVector] = {};
  for (int first = 0; first < topk; first += kBatch * groups) {  // all lanes: they shuffle
    int key[kBatch];
    uint4 k_words[kBatch], v_words[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int slot = first + b * groups + at.group;
      key[b] = slot < topk ? args.lists.top_keys[c.row * topk + slot] : -1;
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      k_words[b] = at.load(k, key[b]);
      v_words[b] = at.load(v, key[b]);
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const T* k_row = reinterpret_cast<const T*>(&k_words[b]);
      const T* v_row = reinterpret_cast<const T*>(&v_words[b]);
      float s = 0.0f, gv = 0.0f;
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        s = fmaf(own.mean[i], to_float(k_row[i]), s);
        gv = fmaf(own.dout[i], to_float(v_row[i]), gv);
      }
      s = at.sum(s);
      gv = at.sum(gv);
      const float a = key[b] < 0 ? 0.0f : exp2_approximate(fmaf(s, shape.scale * kLog2E, -own.lse));
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
#pragma unroll
  for (int i = 0; i < kVector; ++i)
    args.scratch.top_dmean[c.row * shape.pitch + at.column() + i] = dmean[i];
}

// Adds up the units of a cluster: dout, dmass and delta, and what else the centroid kernels read of
// it; then what they get wrong for its top keys. A warp per cluster.
template <class T>
__global__ void __launch_bounds__(32 * kWarpsPerBlock)
    cluster_gradient_kernel(const __grid_constant__ BackwardArgs<T> args) {
  await_previous();
  constexpr int kVector = ChunkLane<T>::kVector;
  const std::int64_t number =
      blockIdx.x * static_cast<std::int64_t>(kWarpsPerBlock) + threadIdx.x / 32;
  if (number >= num_rows(args)) return;
  const BackwardShape& shape = args.shape;
  const BackwardScratch<T>& scratch = args.scratch;
  const ClusterRow c(args, number);
  const ChunkLane<T> at(shape.pitch);
  const bool inside = at.column() < shape.pitch, first_group = at.group == 0 && inside;
  const std::int64_t first = static_cast<std::int64_t>(c.head) * shape.units.total +
                             shape.units.first_tile(c.item, c.cluster, c.span, c.begin);
  ClusterOperands<T> own{};
  for (std::int64_t unit = first; unit < first + (c.count + kUnitRows - 1) / kUnitRows; ++unit) {
    own.dmass += scratch.unit_dmass[unit];
#pragma unroll
    for (int i = 0; i < kVector; ++i)
      if (inside) own.dout[i] += scratch.unit_dout[unit * shape.pitch + at.column() + i];
  }
  float out[kVector];
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    const int column = at.column() + i;
    own.dout[i] *= shape.gradient_scale;
    own.mean[i] =
        column < args.k.width ? args.lists.centroids[c.row * args.k.width + column] : 0.0f;
    out[i] = column < args.v.width ? args.lists.out[c.row * args.v.width + column] : 0.0f;
  }
  const std::int64_t place = c.row * shape.pitch + at.column();
  round_chunk<T>(own.dout, scratch.dout + place, first_group);
  round_chunk<T>(own.mean, scratch.mean + place, first_group);
  // delta is taken of the rounded sum: dout . v - delta then cancels as in exact arithmetic.
  float delta = 0.0f;
#pragma unroll
  for (int i = 0; i < kVector; ++i) delta = fmaf(own.dout[i], out[i], delta);
  delta = at.sum(delta);
  own.dmass *= shape.gradient_scale;
  if (shape.topk > 0) delta += args.lists.mass[c.row] * own.dmass;
  const float lse = args.lists.centroid_lse[c.row];
  const bool empty = c.count == 0 || lse == -INFINITY;
  own.lse = empty ? INFINITY : lse * kLog2E - log2f(shape.weight_scale);
  own.delta = empty ? 0.0f : delta;
  if (threadIdx.x % 32 == 0) {
    scratch.row_lse[c.row] = own.lse;
    scratch.row_delta[c.row] = own.delta;
  }
  if (shape.topk > 0 && c.count > 0) correct_top_keys(args, c, at, own);
}

// dq of plain clustered attention: the row of the query's cluster. One warp per query.
template <class T>
__global__ void broadcast_gradient_kernel(const __grid_constant__ BackwardArgs<T> args) {
  const BackwardShape& shape = args.shape;
  const int head = blockIdx.x / shape.units.total, lane = threadIdx.x % 32;
  const QueryTile unit = shape.units.find(shape.spans.q, args.lists.offsets, shape.H, head,
                                          static_cast<int>(blockIdx.x) % shape.units.total);
  if (unit.count == 0) return;
  const Rows<T> dq = args.dq.rows(unit.span.batch, head, unit.span.begin);
  const std::int32_t* order =
      args.lists.order + (static_cast<std::int64_t>(unit.span.batch) * shape.H + head) * shape.N +
      unit.span.begin + unit.first;
  float values[kColumns][2];
#pragma unroll
  for (int i = 0; i < kColumns; ++i)
    for (int j = 0; j < 2; ++j) {
      const int column = 64 * i + 2 * lane + j;
      values[i][j] =
          column < dq.width ? mean_gradient(args, unit.item, head, unit.cluster, column) : 0.0f;
    }
  for (int r = threadIdx.x / 32; r < unit.count; r += static_cast<int>(blockDim.x) / 32) {
    T* to = dq.row(order[r]);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const int column = 64 * i + 2 * lane;
      if (dq.aligned && column < dq.width) {
        store2(to + column, values[i][0], values[i][1]);
      } else {
        for (int j = 0; j < 2; ++j)
          if (column + j < dq.width) to[column + j] = from_float<T>(values[i][j]);
      }
    }
  }
}

// Zeros in all rows of batch entry y, or in those that belong to no item.
template <class T>
__global__ void zero_rows_kernel(Tensor4<T> tensor, SequenceSpans spans, int items, int heads,
                                 bool all) {
  const int b = blockIdx.y;
  const ItemSpan last =
      items > 0 ? spans.span(spans.cu_seqlens ? items - 1 : b) : ItemSpan{b, 0, 0};
  const int begin = all ? 0 : last.begin + last.length;
  const std::int64_t total = static_cast<std::int64_t>(spans.rows - begin) * tensor.width * heads;
  for (std::int64_t i = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x; i < total;
       i += static_cast<std::int64_t>(gridDim.x) * blockDim.x) {
    const int column = static_cast<int>(i % tensor.width);
    const std::int64_t r = i / tensor.width;
    tensor.rows(b, static_cast<int>(r % heads), begin).row(r / heads)[column] = from_float<T>(0.0f);
  }
}

// The rows that no later stage writes: the padding, or all.
template <class T>
void zero_rows(const Tensor4<T>& tensor, const BackwardShape& shape, const SequenceSpans& spans,
               int heads, bool all, cudaStream_t stream) {
  const bool padded = spans.lengths || spans.cu_seqlens || shape.items == 0;
  if (!tensor.data || !(padded || all) || shape.B == 0) return;
  const unsigned blocks = all ? 1024 : 64;  // of a batch entry
  zero_rows_kernel<T><<<dim3(blocks, static_cast<unsigned>(shape.B)), 256, 0, stream>>>(
      tensor, spans, shape.items, heads, all);
  COTERIE_LAUNCH("zero_rows_kernel");
}

BackwardShape backward_shape(const AttentionCall& call, const ClusteredSizes& sizes,
                             bool mass_grad) {
  BackwardShape shape;
  shape.items = static_cast<int>(call.num_items());
  shape.B = static_cast<int>(call.B);
  shape.H = static_cast<int>(call.H);
  shape.group = static_cast<int>(call.H / call.value_heads);
  shape.N = static_cast<int>(call.N);
  shape.S = static_cast<int>(call.S);
  shape.clusters = static_cast<int>(sizes.clusters);
  shape.topk = static_cast<int>(sizes.topk);
  shape.units = query_tiles(call, sizes.clusters, kUnitBits);
  shape.pitch = dispatch_head_dim(call.op, std::max(call.Dk, call.Dv),
                                  [](auto width) { return static_cast<int>(width); });
  shape.sm90a =
      on_hopper() && call.inputs.q.dtype != DType::f32 && (shape.pitch == 64 || shape.pitch == 128);
  // Centroids of a block and blocks at a time of the kernels that sum over keys.
  const std::int64_t owned = shape.sm90a ? 256 : 128, resident = shape.sm90a ? 132 : 264;
  const std::int64_t stacked = shape.group * sizes.clusters;
  shape.chunks = key_chunks(call, call.value_heads * ((stacked + owned - 1) / owned), resident);
  shape.key_ranges = key_chunks(call, call.value_heads, resident);
  shape.mass_grad = mass_grad;
  shape.causal = call.causal;
  shape.scale = static_cast<float>(call.scale);
  shape.gradient_scale = shape.weight_scale = 1.0f;
  if (call.inputs.q.dtype == DType::f16) {
    // Sums over a cluster grow with its size; weights shrink with the number of keys.
    const double members = static_cast<double>(call.N) /
                           static_cast<double>(std::max<std::int64_t>(sizes.clusters, 1));
    shape.gradient_scale = std::exp2(-std::ceil(std::log2(std::max(members, 1.0))));
    shape.weight_scale = 256.0f;
  }
  shape.spans = item_spans(call.inputs);
  return shape;
}

template <class T>
BackwardScratch<T> take_scratch(Arena& arena, const BackwardShape& shape) {
  // Of the tail, and of what it corrects, which the causal form does not have.
  const std::int64_t tail = shape.causal ? 0 : 1;
  const std::int64_t rows = tail * shape.items * shape.H * shape.clusters;
  const std::int64_t units = static_cast<std::int64_t>(shape.H) * shape.units.total,
                     pitch = shape.pitch;
  const std::int64_t slices = tail * shape.chunks.slots * shape.H * shape.clusters;
  BackwardScratch<T> scratch;
  scratch.unit_dout = arena.take<float>(tail * units * pitch);
  scratch.unit_dmass = arena.take<float>(tail * units);
  scratch.mean = arena.take<T>(rows * pitch);
  scratch.dout = arena.take<T>(rows * pitch);
  scratch.row_lse = arena.take<float>(rows);
  scratch.row_delta = arena.take<float>(rows);
  scratch.mean_slices = arena.take<float>(slices * pitch);
  const bool top = shape.topk > 0;
  scratch.top_dmean = arena.take<float>(top ? rows * pitch : 0);
  scratch.top_ds = arena.take<float>(rows * shape.topk);
  scratch.top_weight = arena.take<float>(rows * shape.topk);
  scratch.inner =
      arena.take<float>(top ? static_cast<std::int64_t>(shape.B) * shape.H * shape.N : 0);
  scratch.slots = arena.take<T>(units * shape.topk * 2 * pitch);
  return scratch;
}

template <class T>
BackwardArgs<T> backward_args(const AttentionCall& call, const BackwardShape& shape,
                              const ClusteredBackward& pass, const BackwardScratch<T>& scratch) {
  const auto ints = [](const TensorView& view) {
    return static_cast<const std::int32_t*>(view.data);
  };
  const auto floats = [](const TensorView& view) { return static_cast<const float*>(view.data); };
  const auto gradient = [](const TensorView& view) {
    return view.present() ? tensor4<T>(view) : Tensor4<T>{};
  };
  const ClusteredTensors& t = pass.tensors;
  BackwardArgs<T> args;
  args.shape = shape;
  args.lists = {ints(t.order),    ints(t.labels),      ints(t.offsets),
                ints(t.top_keys), floats(t.centroids), floats(t.centroid_lse),
                floats(t.mass),   floats(t.out),       floats(t.lse)};
  args.scratch = scratch;
  args.q = tensor4<const T>(call.inputs.q);
  args.k = tensor4<const T>(call.k);
  args.v = tensor4<const T>(call.inputs.v);
  args.g = tensor4<const T>(pass.grad_out);
  args.dq = gradient(pass.gradients.dq);
  args.dk = gradient(pass.gradients.dk);
  args.dv = gradient(pass.gradients.dv);
  return args;
}

template <class T>
void centroid_gradients(const BackwardArgs<T>& args, bool keys, cudaStream_t stream) {
  if constexpr (sizeof(T) == 2)
    if (args.shape.sm90a)
      return keys ? centroid_key_gradients_sm90a(args, stream)
                  : centroid_mean_gradients_sm90a(args, stream);
  keys ? centroid_key_gradients(args, stream) : centroid_mean_gradients(args, stream);
}

template <class T>
void run_backward(const BackwardArgs<T>& args, cudaStream_t stream) {
  const BackwardShape& shape = args.shape;
  const int key_heads = shape.H / shape.group;
  const bool nothing = shape.causal && shape.topk == 0;  // to attend to
  zero_rows(args.dq, shape, shape.spans.q, shape.H, nothing, stream);
  zero_rows(args.dk, shape, shape.spans.k, key_heads, shape.causal, stream);
  zero_rows(args.dv, shape, shape.spans.k, key_heads, shape.causal, stream);
  const std::int64_t rows = static_cast<std::int64_t>(shape.items) * shape.H * shape.clusters;
  if (rows == 0 || nothing) return;
  const auto blocks = [&](int each) { return static_cast<unsigned>((rows + each - 1) / each); };
  const bool queries = args.dq.data, keys = args.dk.data || args.dv.data;
  segment_gradients(args, stream);
  if (!shape.causal) {
    launch_early("cluster_gradient", cluster_gradient_kernel<T>, blocks(kWarpsPerBlock),
                 32 * kWarpsPerBlock, 0, stream, args);
    if (queries) centroid_gradients(args, false, stream);
    if (keys) centroid_gradients(args, true, stream);
  }
  if (shape.topk > 0) {
    topk_gradients(args, stream);
    if (keys) fold_slots(args, stream);
  } else if (queries) {
    broadcast_gradient_kernel<T>
        <<<static_cast<unsigned>(shape.H * shape.units.total), 256, 0, stream>>>(args);
    COTERIE_LAUNCH("broadcast_gradient_kernel");
  }
}

}  // namespace

void clustered_backward(const AttentionCall& call, const ClusteredSizes& sizes,
                        const ClusteredBackward& pass, Arena& arena, cudaStream_t stream) {
  const BackwardShape shape = backward_shape(call, sizes, pass.mass_grad);
  dispatch_element(call.op, call.inputs.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const BackwardScratch<T> scratch = take_scratch<T>(arena, shape);
    if (scratch.unit_dout) run_backward(backward_args(call, shape, pass, scratch), stream);
  });
}

}  // namespace coterie::cuda
