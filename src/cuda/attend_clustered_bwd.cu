// SPDX-License-Identifier: MIT
// Backward pass of clustered and improved clustered attention (clustered_bwd.h): memory, order of
// the stages, and the small steps between them, which handle one cluster per warp.
#include <algorithm>
#include <cmath>

#include "cuda/clustered_bwd.h"
#include "cuda/device/element.cuh"
#include "cuda/device/load.cuh"
#include "cuda/device/softmax.cuh"
#include "cuda/hopper.h"
#include "cuda/launch.h"
#include "cuda/tuning.h"

namespace coterie::cuda {
namespace {

constexpr int kWarpsPerBlock = 4;
constexpr int kMeanThreads = 256;
static_assert(kMeanThreads >= kMaxHeadDim, "a thread per column");
constexpr int kColumns = kMaxHeadDim / 32;  // of a row that a lane holds: lane, lane + 32, ...

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

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
  return value;
}

// The units of every cluster; numbers that belong to none get an empty unit.
template <class T>
__global__ void plan_units_kernel(const __grid_constant__ BackwardArgs<T> args) {
  const std::int64_t number = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x;
  if (number >= num_rows(args)) return;
  const BackwardShape& shape = args.shape;
  const ClusterRow c(args, number);
  const int first = shape.first_unit(c.item, c.cluster, c.span, c.begin);
  int next = shape.units;
  if (c.cluster + 1 < shape.clusters)
    next = shape.first_unit(c.item, c.cluster + 1, c.span, c.begin + c.count);
  else if (c.item + 1 < shape.items)
    next = shape.first_unit(c.item + 1, 0, shape.spans.q.span(c.item + 1), 0);
  Unit* units = args.scratch.units + static_cast<std::int64_t>(c.head) * shape.units;
  for (int u = first; u < min(next, shape.units); ++u) {
    const int done = (u - first) * kUnitRows;
    units[u] = {c.item, c.cluster, c.begin + done, min(max(c.count - done, 0), kUnitRows)};
  }
}

// Adds up the units: dout, dmass and delta, and what else the centroid kernels read of a cluster.
template <class T>
__global__ void cluster_gradient_kernel(const __grid_constant__ BackwardArgs<T> args) {
  const std::int64_t number =
      blockIdx.x * static_cast<std::int64_t>(kWarpsPerBlock) + threadIdx.x / 32;
  if (number >= num_rows(args)) return;
  const BackwardShape& shape = args.shape;
  const BackwardScratch<T>& scratch = args.scratch;
  const ClusterRow c(args, number);
  const int lane = threadIdx.x % 32;
  const std::int64_t first = static_cast<std::int64_t>(c.head) * shape.units +
                             shape.first_unit(c.item, c.cluster, c.span, c.begin);
  float dout[kColumns] = {}, dmass = 0.0f;
  for (std::int64_t unit = first; unit < first + (c.count + kUnitRows - 1) / kUnitRows; ++unit) {
    dmass += scratch.unit_dmass[unit];
#pragma unroll
    for (int i = 0; i < kColumns; ++i)
      if (lane + 32 * i < shape.pitch)
        dout[i] += scratch.unit_dout[unit * shape.pitch + lane + 32 * i];
  }
  float delta = 0.0f;
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    const int column = lane + 32 * i;
    if (column >= shape.pitch) continue;
    // delta is taken of the rounded sum: dout . v - delta then cancels as in exact arithmetic.
    const T rounded = from_float<T>(dout[i] * shape.gradient_scale);
    scratch.dout[c.row * shape.pitch + column] = rounded;
    if (column < args.v.width)
      delta += to_float(rounded) * args.lists.out[c.row * args.v.width + column];
    const float mean =
        column < args.k.width ? args.lists.centroids[c.row * args.k.width + column] : 0.0f;
    scratch.mean[c.row * shape.pitch + column] = from_float<T>(mean);
  }
  delta = warp_sum(delta);
  if (lane > 0) return;
  dmass *= shape.gradient_scale;
  if (shape.topk > 0) delta += args.lists.mass[c.row] * dmass;
  const float lse = args.lists.centroid_lse[c.row];
  const bool empty = c.count == 0 || lse == -INFINITY;
  scratch.row_lse[c.row] = empty ? INFINITY : lse * kLog2E - log2f(shape.weight_scale);
  scratch.row_delta[c.row] = empty ? 0.0f : delta;
  scratch.row_dmass[c.row] = dmass;
}

// A row in 16-byte chunks, one per lane of a group of 4 to 32 lanes; kVector numbers a lane.
template <class T>
struct ChunkLane {
  static constexpr int kVector = 16 / static_cast<int>(sizeof(T));
  int lanes, group, lane;  // lanes of a group, number of the group in the block, lane in the group

  __device__ explicit ChunkLane(int pitch) : lanes(4) {
    while (lanes * kVector < pitch) lanes *= 2;
    group = threadIdx.x / lanes;
    lane = threadIdx.x % lanes;
  }
  __device__ int column() const { return lane * kVector; }
  __device__ void load(const Rows<const T>& rows, std::int64_t row, bool there,
                       float (&to)[kVector]) const {
    union {
      uint4 words;
      T element[kVector];
    } chunk;
    chunk.words = make_uint4(0, 0, 0, 0);
    if (there && column() < rows.width)
      chunk.words = rows.aligned ? *reinterpret_cast<const uint4*>(rows.row(row) + column())
                                 : load_chunk(rows.row(row), column(), rows.width);
#pragma unroll
    for (int i = 0; i < kVector; ++i) to[i] = to_float(chunk.element[i]);
  }
  __device__ float sum(float value) const {
    for (int step = lanes / 2; step > 0; step /= 2)
      value += __shfl_xor_sync(0xffffffffu, value, step);
    return value;
  }
};

// What the centroid kernels get wrong for the top keys of a cluster, from the same rounded
// operands: dS should be A (dm - delta) and the weight 0, where they took A (dout . v - delta) and
// A. Groups of lanes take turns; adds this thread's columns of sum_T ds k over its turns.
template <class T>
__device__ __forceinline__ void correct_top_keys(const BackwardArgs<T>& args, std::int64_t row,
                                                 int item, int key_head, const ChunkLane<T>& at,
                                                 float (&dmean)[ChunkLane<T>::kVector]) {
  constexpr int kVector = ChunkLane<T>::kVector;
  const BackwardShape& shape = args.shape;
  const int groups = kMeanThreads / at.lanes;
  const auto key_at = [&](int slot) {
    return slot < shape.topk ? args.lists.top_keys[row * shape.topk + slot] : -1;
  };
  int key = key_at(at.group);
  const ItemSpan span = shape.spans.k.span(item);
  const Rows<const T> k = args.k.rows(span.batch, key_head, span.begin);
  const Rows<const T> v = args.v.rows(span.batch, key_head, span.begin);
  const float lse = args.scratch.row_lse[row], delta = args.scratch.row_delta[row];
  const float dmass = args.scratch.row_dmass[row];
  const float unscale = 1.0f / (shape.weight_scale * shape.gradient_scale);
  float mean[kVector], dout[kVector];
  at.load({args.scratch.mean, shape.pitch, shape.pitch, true}, row, true, mean);
  at.load({args.scratch.dout, shape.pitch, shape.pitch, true}, row, true, dout);
  for (int first = 0; first < shape.topk; first += groups) {  // all threads: they shuffle
    const int slot = first + at.group, next = key_at(slot + groups);
    float k_row[kVector], v_row[kVector], s = 0.0f, gv = 0.0f;
    at.load(k, key, key >= 0, k_row);
    at.load(v, key, key >= 0, v_row);
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      s = fmaf(mean[i], k_row[i], s);
      gv = fmaf(dout[i], v_row[i], gv);
    }
    s = at.sum(s);
    gv = at.sum(gv);
    const float a = key < 0 ? 0.0f : exp2_approximate(fmaf(s, shape.scale * kLog2E, -lse));
    float ds = a * (dmass - delta) - to_float(from_float<T>(a * (gv - delta)));
    ds *= shape.scale * unscale;
#pragma unroll
    for (int i = 0; i < kVector; ++i) dmean[i] = fmaf(ds, k_row[i], dmean[i]);
    key = next;
    if (at.lane > 0 || slot >= shape.topk) continue;
    args.scratch.top_ds[row * shape.topk + slot] = ds;
    args.scratch.top_weight[row * shape.topk + slot] = -to_float(from_float<T>(a)) * unscale;
  }
}

// dmean: slices and top keys in a fixed order, over the size of the cluster. One block per cluster.
template <class T>
__global__ void __launch_bounds__(kMeanThreads, 4)
    mean_sum_kernel(const __grid_constant__ BackwardArgs<T> args) {
  constexpr int kVector = ChunkLane<T>::kVector;
  __shared__ float corrections[kMeanThreads * kVector], slices[kMeanThreads];
  const BackwardShape& shape = args.shape;
  const std::int64_t row = blockIdx.x, problem = row / shape.clusters;
  const int item = static_cast<int>(problem / shape.H), head = static_cast<int>(problem % shape.H);
  const int cluster = static_cast<int>(row % shape.clusters), pitch = shape.pitch;
  const std::int32_t* offset = args.lists.offsets + problem * (shape.clusters + 1) + cluster;
  const int members = offset[1] - offset[0];
  if (members == 0) return;
  const int column = static_cast<int>(threadIdx.x) % pitch, share = threadIdx.x / pitch;
  const int shares = kMeanThreads / pitch;
  if (args.dq.data) {
    const int count = shape.chunks.count(shape.spans.k.span(item).length);
    const std::int64_t first = shape.chunks.first_slot(shape.spans.k, item);
    float sum = 0.0f;
#pragma unroll 4
    for (int slice = share; share < shares && slice < count; slice += shares) {
      const std::int64_t at = ((first + slice) * shape.H + head) * shape.clusters + cluster;
      sum += args.scratch.mean_slices[at * pitch + column];
    }
    slices[threadIdx.x] = sum;
  }
  const ChunkLane<T> at(pitch);
  if (shape.topk > 0) {
    float dmean[kVector] = {};
    correct_top_keys(args, row, item, head / shape.group, at, dmean);
#pragma unroll
    for (int i = 0; i < kVector; ++i) corrections[threadIdx.x * kVector + i] = dmean[i];
  }
  __syncthreads();
  if (!args.dq.data || threadIdx.x >= pitch) return;
  float sum = 0.0f;
  for (int i = 0; i < shares; ++i) sum += slices[i * pitch + column];
  for (int group = 0; shape.topk > 0 && group < kMeanThreads / at.lanes; ++group)
    sum += corrections[group * at.lanes * kVector + column];
  args.scratch.dmean[row * pitch + column] = sum / static_cast<float>(members);
}

// dq of plain clustered attention: the row of the query's cluster. One warp per query.
template <class T>
__global__ void broadcast_gradient_kernel(const __grid_constant__ BackwardArgs<T> args) {
  const BackwardShape& shape = args.shape;
  const Unit unit = args.scratch.units[blockIdx.x];
  const int head = blockIdx.x / shape.units, lane = threadIdx.x % 32;
  if (unit.count == 0) return;
  const ItemSpan span = shape.spans.q.span(unit.item);
  const Rows<T> dq = args.dq.rows(span.batch, head, span.begin);
  const std::int64_t problem = static_cast<std::int64_t>(unit.item) * shape.H + head;
  const float* dmean = args.scratch.dmean + (problem * shape.clusters + unit.cluster) * shape.pitch;
  const std::int32_t* order = args.lists.order +
                              (static_cast<std::int64_t>(span.batch) * shape.H + head) * shape.N +
                              span.begin + unit.first;
  float values[kColumns][2];
#pragma unroll
  for (int i = 0; i < kColumns; ++i)
    for (int j = 0; j < 2; ++j) {
      const int column = 64 * i + 2 * lane + j;
      values[i][j] = column < dq.width ? dmean[column] : 0.0f;
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

// Zeros in the rows of batch entry y that belong to no item.
template <class T>
__global__ void zero_padding_kernel(Tensor4<T> tensor, SequenceSpans spans, int items, int heads) {
  const int b = blockIdx.y;
  const ItemSpan last =
      items > 0 ? spans.span(spans.cu_seqlens ? items - 1 : b) : ItemSpan{b, 0, 0};
  const int begin = last.begin + last.length;
  const std::int64_t total = static_cast<std::int64_t>(spans.rows - begin) * tensor.width * heads;
  for (std::int64_t i = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x; i < total;
       i += static_cast<std::int64_t>(gridDim.x) * blockDim.x) {
    const int column = static_cast<int>(i % tensor.width);
    const std::int64_t r = i / tensor.width;
    tensor.rows(b, static_cast<int>(r % heads), begin).row(r / heads)[column] = from_float<T>(0.0f);
  }
}

template <class T>
void zero_padding(const Tensor4<T>& tensor, const BackwardShape& shape, const SequenceSpans& spans,
                  int heads, cudaStream_t stream) {
  const bool padded = spans.lengths || spans.cu_seqlens || shape.items == 0;
  if (!tensor.data || !padded || shape.B == 0) return;
  zero_padding_kernel<T><<<dim3(64, static_cast<unsigned>(shape.B)), 256, 0, stream>>>(
      tensor, spans, shape.items, heads);
  COTERIE_LAUNCH("zero_padding_kernel");
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
  shape.units = shape.items * shape.clusters + shape.B * (shape.N / kUnitRows + 1);
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
  const std::int64_t rows = static_cast<std::int64_t>(shape.items) * shape.H * shape.clusters;
  const std::int64_t units = static_cast<std::int64_t>(shape.H) * shape.units, pitch = shape.pitch;
  const std::int64_t slices =
      static_cast<std::int64_t>(shape.chunks.slots) * shape.H * shape.clusters;
  BackwardScratch<T> scratch;
  scratch.units = arena.take<Unit>(units);
  scratch.unit_dout = arena.take<float>(units * pitch);
  scratch.unit_dmass = arena.take<float>(units);
  scratch.mean = arena.take<T>(rows * pitch);
  scratch.dout = arena.take<T>(rows * pitch);
  scratch.row_lse = arena.take<float>(rows);
  scratch.row_delta = arena.take<float>(rows);
  scratch.row_dmass = arena.take<float>(rows);
  scratch.mean_slices = arena.take<float>(slices * pitch);
  scratch.dmean = arena.take<float>(rows * pitch);
  const bool top = shape.topk > 0;
  scratch.top_ds = arena.take<float>(rows * shape.topk);
  scratch.top_weight = arena.take<float>(rows * shape.topk);
  scratch.inner =
      arena.take<float>(top ? static_cast<std::int64_t>(shape.B) * shape.H * shape.N : 0);
  scratch.slots = arena.take<float>(units * shape.topk * 2 * pitch);
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
  zero_padding(args.dq, shape, shape.spans.q, shape.H, stream);
  zero_padding(args.dk, shape, shape.spans.k, key_heads, stream);
  zero_padding(args.dv, shape, shape.spans.k, key_heads, stream);
  const std::int64_t rows = static_cast<std::int64_t>(shape.items) * shape.H * shape.clusters;
  if (rows == 0) return;
  const auto blocks = [&](int each) { return static_cast<unsigned>((rows + each - 1) / each); };
  const bool queries = args.dq.data, keys = args.dk.data || args.dv.data;
  plan_units_kernel<T><<<blocks(256), 256, 0, stream>>>(args);
  COTERIE_LAUNCH("plan_units_kernel");
  segment_gradients(args, stream);
  cluster_gradient_kernel<T><<<blocks(kWarpsPerBlock), 32 * kWarpsPerBlock, 0, stream>>>(args);
  COTERIE_LAUNCH("cluster_gradient_kernel");
  if (queries) centroid_gradients(args, false, stream);
  if (keys) centroid_gradients(args, true, stream);
  mean_sum_kernel<T><<<blocks(1), kMeanThreads, 0, stream>>>(args);
  COTERIE_LAUNCH("mean_sum_kernel");
  if (shape.topk > 0) {
    topk_gradients(args, stream);
    if (keys) fold_slots(args, stream);
  } else if (queries) {
    broadcast_gradient_kernel<T>
        <<<static_cast<unsigned>(shape.H * shape.units), 256, 0, stream>>>(args);
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
    if (scratch.units) run_backward(backward_args(call, shape, pass, scratch), stream);
  });
}

}  // namespace coterie::cuda
