// SPDX-License-Identifier: MIT
// Backward pass of clustered and improved clustered attention (backward.h): memory, and the
// order of the stages.
#include <cmath>

#include "cuda/clustered/backward.h"
#include "cuda/launch/device.h"
#include "cuda/launch/dispatch.h"
#include "cuda/launch/launch.h"
#include "cuda/prim/element.cuh"

namespace coterie::cuda {
namespace {

// Zeros in all rows of batch entry y, or in those that belong to no item.
template <class T>
__global__ void zero_rows_kernel(Tensor4<T> tensor, SequenceSpans spans, int items, int heads,
                                 bool all) {
  const int b = blockIdx.y;
  const ItemSpan last = spans.span(spans.cu_seqlens ? items - 1 : b);
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
  const bool padded = spans.lengths || spans.cu_seqlens;
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
  shape.units = {shape.items, shape.H, shape.clusters, shape.N,
                 static_cast<int>(max(call.B * call.N - 1, std::int64_t{0}) >> kUnitBits)};
  shape.pitch = dispatch_head_dim(call.op, max(call.Dk, call.Dv),
                                  [](auto width) { return static_cast<int>(width); });
  shape.sm90a = on_hopper() && call.inputs.q.dtype != DType::f32;
  // Centroids of a block and blocks at a time of the kernels that sum over keys.
  shape.fused = shape.sm90a && shape.pitch == 64 && shape.group * sizes.clusters <= kFusedCentroids;
  const std::int64_t owned = shape.fused ? kFusedCentroids : kMeanRows,
                     resident = shape.sm90a ? 132 : 264;
  const std::int64_t stacked = shape.group * sizes.clusters;
  shape.chunks = key_chunks(call, call.value_heads * ((stacked + owned - 1) / owned), resident);
  shape.key_ranges = key_chunks(call, call.value_heads, resident);
  shape.mass_grad = mass_grad;
  shape.causal = call.causal;
  shape.scale = static_cast<float>(call.scale);
  shape.gradient_scale = shape.weight_scale = 1.0f;
  if (call.inputs.q.dtype == DType::f16) {
    // Sums over a cluster grow with its size; weights shrink with the number of keys.
    const double members =
        static_cast<double>(call.N) / static_cast<double>(max(sizes.clusters, std::int64_t{1}));
    shape.gradient_scale = std::exp2(-std::ceil(std::log2(max(members, 1.0))));
    shape.weight_scale = 256.0f;
  }
  shape.weight_bits = std::log2(shape.weight_scale);
  shape.unscale = 1.0f / (shape.weight_scale * shape.gradient_scale);
  shape.spans = item_spans(call.inputs);
  return shape;
}

template <class T>
BackwardScratch<T> take_scratch(Arena& arena, const BackwardShape& shape) {
  // Of the tail, and of what it corrects, which the causal form does not have.
  const std::int64_t tail = shape.causal ? 0 : 1;
  const std::int64_t rows = tail * shape.items * shape.H * shape.clusters;
  const std::int64_t units = shape.units.places(), pitch = shape.pitch;
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
void centroid_gradients(const BackwardArgs<T>& args, bool queries, bool keys, cudaStream_t stream) {
  if constexpr (sizeof(T) == 2) {
    if (args.shape.fused) return centroid_gradients_sm90a(args, stream);
    if (args.shape.sm90a) {
      if (queries) centroid_mean_gradients_sm90a(args, stream);
      if (keys) centroid_key_gradients_sm90a(args, stream);
      return;
    }
  }
  if (queries) centroid_mean_gradients(args, stream);
  if (keys) centroid_key_gradients(args, stream);
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
  const bool queries = args.dq.data, keys = args.dk.data || args.dv.data;
  member_gradients(args, stream);
  if (!shape.causal) centroid_gradients(args, queries, keys, stream);
  const bool broadcast = queries && !shape.causal;
  if (broadcast) broadcast_gradients(args, stream);
  if (keys && shape.topk > 0) fold_slots(args, broadcast, stream);
}

}  // namespace

void clustered_backward(const AttentionCall& call, const ClusteredSizes& sizes,
                        const ClusteredBackward& pass, Arena& arena, cudaStream_t stream) {
  const BackwardShape shape = backward_shape(call, sizes, pass.mass_grad);
  dispatch_element(call.op, call.inputs.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const BackwardScratch<T> scratch = take_scratch<T>(arena, shape);
    if (!arena.counting()) run_backward(backward_args(call, shape, pass, scratch), stream);
  });
}

}  // namespace coterie::cuda
