// SPDX-License-Identifier: MIT
// Backward pass of clustered and improved clustered attention (backward.h): memory, and the
// order of the stages.
#include <cstddef>

#include "cuda/api/entry.h"
#include "cuda/api/padding.h"
#include "cuda/clustered/clustered.h"
#include "cuda/launch/dispatch.h"
#include "cuda/launch/launch.h"

namespace coterie::cuda {
namespace {

// Zeros in all of a gradient, or in the rows that belong to no item.
void clear(const TensorView& view, const Sequences& sequences, std::int64_t items, bool all,
           cudaStream_t stream) {
  if (!all || view.count() == 0) return zero_padding(view, sequences, items, stream);
  std::int64_t last = 0;
  for (int dim = 0; dim < view.rank; ++dim) last += (view.size(dim) - 1) * view.stride(dim);
  if (last + 1 != view.count()) return fill(view, 0.0, {nullptr, 0, stream});
  const auto bytes = static_cast<std::size_t>(view.count() * dtype_bytes(view.dtype));
  COTERIE_CUDA(cudaMemsetAsync(view.data, 0, bytes, stream));
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
BackwardArgs<T> backward_args(const ClusteredBackward& pass, const BackwardScratch<T>& scratch) {
  const auto gradient = [](const TensorView& view) {
    return view.present() ? tensor4<T>(view) : Tensor4<T>{};
  };
  const ClusteredTensors& t = pass.tensors;
  const AttentionCall& call = pass.plan.call;
  BackwardArgs<T> args;
  args.shape = pass.plan.backward;
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

}  // namespace

void clustered_backward(const ClusteredBackward& pass, Arena& arena) {
  const ClusteredPlan& plan = pass.plan;
  const AttentionCall& call = plan.call;
  const bool nothing = call.causal && plan.topk == 0;  // to attend to
  const bool means = !call.causal, broadcast = means && pass.gradients.dq.present();
  const bool keys = pass.gradients.dk.present() || pass.gradients.dv.present();
  dispatch_element(call.op, call.inputs.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const BackwardScratch<T> scratch = take_scratch<T>(arena, plan.backward);
    if (arena.counting()) return;
    const std::int64_t items = call.num_items();
    const Sequences &q = call.inputs.q_sequences, &k = call.inputs.k_sequences;
    clear(pass.gradients.dq, q, items, nothing, pass.stream);
    clear(pass.gradients.dk, k, items, call.causal, pass.stream);
    clear(pass.gradients.dv, k, items, call.causal, pass.stream);
    if (plan.num_means() == 0 || nothing) return;
    const BackwardArgs<T> args = backward_args(pass, scratch);
    member_gradients(args, pass.stream);
    if constexpr (sizeof(T) == 2)
      if (means && plan.sm90a) centroid_gradients_sm90a(args, pass.stream);
    if (means && !plan.sm90a) centroid_gradients(args, pass.stream);
    if (broadcast) broadcast_gradients(args, pass.stream);
    if (keys && plan.topk > 0) sum_top_key_gradients(args, broadcast, pass.stream);
  });
}

}  // namespace coterie::cuda
