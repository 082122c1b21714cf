// SPDX-License-Identifier: MIT
// Attention of lists: the host-side stages of a pass. plan.cu chooses the kernels; backward.h and
// forward.h declare them.
#include "cuda/lists/lists.h"

#include <type_traits>

#include "cuda/api/padding.h"
#include "cuda/launch/dispatch.h"
#include "cuda/lists/backward.h"
#include "cuda/lists/forward.h"
#include "cuda/lists/plan.h"

namespace coterie::cuda {
namespace {

void write_padding(const AttentionCall& call, const ListCall& lists, const ListOutputs& outputs,
                   cudaStream_t stream) {
  const Sequences& sequences = call.inputs.q_sequences;
  const bool by_row = !outputs.slot_rows;
  if (by_row) zero_padding(outputs.out, sequences, call.num_items(), stream);
  if (outputs.lse && (by_row || lists.queries.layout == ListLayout::rounds))
    fill_padding(outputs.lse, call.B, by_row ? call.H : call.H * lists.lists, call.N, sequences,
                 call.num_items(), -INFINITY, stream);
}

void zero_gradient_padding(const AttentionCall& call, const ListGradients& gradients,
                           cudaStream_t stream) {
  const auto zero = [&](const TensorView& rows, const Sequences& sequences) {
    if (rows.present()) zero_padding(rows, sequences, call.num_items(), stream);
  };
  zero(gradients.dq, call.inputs.q_sequences);
  zero(gradients.dk, call.inputs.k_sequences);
  zero(gradients.dv, call.inputs.k_sequences);
}

template <class T>
ListBackwardArgs<T> backward_args(const AttentionCall& call, const ListBackwardPlan& plan,
                                  const ListGradients& gradients) {
  const auto sums = [&](const TensorView& rows, void* slots) {
    return ListSums<T>{rows.present() ? tensor4<T>(rows) : Tensor4<T>{}, slots,
                       gradients.slots_rounded};
  };
  ListBackwardArgs<T> args{};
  args.problem = plan.problem;
  args.q_tiles = plan.q_tiles;
  args.k_tiles = plan.k_tiles;
  args.q = tensor4<const T>(call.inputs.q);
  args.k = tensor4<const T>(call.k);
  args.v = tensor4<const T>(call.inputs.v);
  args.g = tensor4<const T>(gradients.grad_out);
  args.weight = gradients.weight;
  args.lse = gradients.lse;
  args.delta = gradients.delta;
  args.dq = sums(gradients.dq, gradients.slot_dq);
  args.dk = sums(gradients.dk, gradients.slot_dk);
  args.dv = sums(gradients.dv, gradients.slot_dv);
  args.normalise = gradients.normalise;
  args.dq_products = gradients.dq_products;
  args.weight_scale = std::is_same_v<T, F16> && !args.problem.laplace ? kHalfWeightScale : 1.0f;
  return args;
}

// Launches the kernel for queries or for keys.
template <class T>
void launch_side(const ListBackwardArgs<T>& args, const ListBackwardPlan& plan, bool keys,
                 cudaStream_t stream) {
  if constexpr (sizeof(T) == 2) {
    if (plan.kernel == ListBackwardKernel::stream)
      return launch_list_stream_sm90a(args, plan, keys, stream);
    if (plan.kernel == ListBackwardKernel::wide_tiles)
      return launch_wide_tiles_sm90a(args, keys, stream);
  }
  launch_list_tiles(args, keys, stream);
}

}  // namespace

void lists_forward(const AttentionCall& call, const ListCall& lists, const ListOutputs& outputs,
                   cudaStream_t stream) {
  write_padding(call, lists, outputs, stream);
  if (call.num_items() == 0 || call.N == 0 || call.H == 0) return;
  const ListForwardPlan plan = plan_lists_forward(call, lists, outputs);
  if (plan.tiles.total == 0) return;
  dispatch_element(call.op, call.inputs.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const ListForwardArgs<T> args{plan.problem,
                                  plan.tiles,
                                  tensor4<const T>(call.inputs.q),
                                  tensor4<const T>(call.k),
                                  tensor4<const T>(call.inputs.v),
                                  outputs.out.present() ? tensor4<T>(outputs.out) : Tensor4<T>{},
                                  static_cast<T*>(outputs.slot_rows),
                                  outputs.lse};
    if constexpr (sizeof(T) == 2)
      if (plan.stream) return launch_list_forward_sm90a(args, plan, stream);
    launch_list_forward(args, stream);
  });
}

bool lists_backward(const AttentionCall& call, const ListCall& lists,
                    const ListGradients& gradients, Arena& arena, cudaStream_t stream) {
  const bool recompute = lists.weighting == ListWeighting::softmax && !gradients.delta.data;
  const std::int64_t values =
      gradients.lse.by_slot ? list_query_slots(call, lists) : call.B * call.H * call.N;
  float* delta = arena.take<float>(recompute ? values : 0);
  const FullScratch full = take_full(call, lists, arena);
  if (arena.counting()) return false;
  const ListBackwardPlan plan = plan_lists_backward(call, lists, gradients);
  zero_gradient_padding(call, gradients, stream);
  dispatch_element(call.op, call.inputs.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    ListBackwardArgs<T> args = backward_args<T>(call, plan, gradients);
    if (recompute) {
      args.delta_out = delta;
      args.delta_out_by_slot = gradients.lse.by_slot;
    }
    if constexpr (sizeof(T) == 2) {
      if (plan.kernel == ListBackwardKernel::whole)
        return launch_whole_lists_sm90a(args, plan, gradients.cleared, stream);
      if (plan.kernel == ListBackwardKernel::windows)
        return launch_windows_sm90a(args, plan.windows, stream);
      if (plan.kernel == ListBackwardKernel::full)
        return launch_full_sm90a<T>({args, tensor4<const T>(gradients.out), full}, stream);
    }
    if (plan.queries) launch_side(args, plan, false, stream);
    if (args.delta_out) args.delta = {args.delta_out, args.delta_out_by_slot};
    if (plan.keys) launch_side(args, plan, true, stream);
  });
  return plan.clears;
}

void lists_delta(const AttentionCall& call, const ListCall& lists, const ListGradients& gradients,
                 float* delta, cudaStream_t stream) {
  const ListBackwardPlan plan = plan_lists_backward(call, lists, gradients);
  dispatch_element(call.op, call.inputs.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    ListBackwardArgs<T> args = backward_args<T>(call, plan, gradients);
    args.delta_out = delta;
    args.delta_out_by_slot = true;
    launch_side(args, plan, false, stream);
  });
}

}  // namespace coterie::cuda
