// SPDX-License-Identifier: MIT
// Backward pass of attention of lists over lists (lists.h): kernels of backward.h, by
// mma.sync here, by warpgroup products in backward_sm90a.cu.
#include <type_traits>

#include "cuda/api/padding.h"
#include "cuda/launch/device.h"
#include "cuda/launch/dispatch.h"
#include "cuda/lists/backward.h"
#include "cuda/lists/backward_products.cuh"

namespace coterie::cuda {
namespace {

// Row statistics and factors of gradients are parts of one form.
ListForm backward_form(const ListCall& plan, const ListGradients& gradients) {
  const ListForm form = list_form(plan);
  const bool factors = gradients.weight.data || plan.head_scale;
  return form == ListForm::plain && factors ? ListForm::normalised : form;
}

template <class T>
ListBackwardArgs<T> backward_args(const AttentionCall& call, const ListCall& plan,
                                  const ListGradients& gradients) {
  ListBackwardArgs<T> args{};
  args.problem = list_problem(call, plan);
  args.q_tiles = list_tiles(args.problem.q, kListRowBits);
  args.k_tiles = list_tiles(args.problem.k, kListRowBits);
  args.q = tensor4<const T>(call.inputs.q);
  args.k = tensor4<const T>(call.k);
  args.v = tensor4<const T>(call.inputs.v);
  args.g = tensor4<const T>(gradients.grad_out);
  args.weight = gradients.weight;
  args.lse = gradients.lse;
  args.delta = gradients.delta;
  args.weight_scale = std::is_same_v<T, F16> && !args.problem.laplace ? kHalfWeightScale : 1.0f;
  return args;
}

// Whether warpgroup products serve a call: rows can be copied and written 16 bytes at a time and
// are less than 2 GiB apart; ranks, places and slots are ints there; query heads that share keys
// share lists.
template <class T>
bool takes(const AttentionCall& call, const ListCall& plan, const ListBackwardArgs<T>& args) {
  constexpr std::int64_t kMost = std::int64_t{1} << 30;
  const auto near = [](const Tensor4<const T>& rows) {
    return rows.aligned && rows.row < kMost / 2;
  };
  const auto wanted = [](const Tensor4<T>& rows) { return !rows.data || rows.aligned; };
  const SlotSide& queries = args.problem.q;
  return sizeof(T) == 2 && on_hopper() && plan.ranges.rule != ListRule::wrap && near(args.q) &&
         near(args.k) && near(args.v) && near(args.g) && wanted(args.dq.rows) &&
         wanted(args.dk.rows) && wanted(args.dv.rows) &&
         (!queries.index || queries.heads / queries.index_heads % args.problem.group == 0) &&
         call.N * plan.queries.per_row < kMost / 4 && call.S * plan.keys.per_row < kMost / 4 &&
         list_query_slots(call, plan) < kMost && list_key_slots(call, plan) < kMost &&
         call.H <= 0xffff && call.B <= 0xffff;
}

// Launches a pass's kernels. Warpgroup products serve what is used most; mma.sync the rest, in one
// form for all.
template <class T>
void launch(const ListBackwardArgs<T>& args, ListForm form, bool hopper, const ListKernels& wanted,
            cudaStream_t stream) {
  dispatch_head_dim("lists", args.problem.width, [&](auto width) {
    constexpr int kWidth = decltype(width)::value;
    if constexpr (sizeof(T) == 2)
      if (form != ListForm::general && hopper)
        return launch_lists_sm90a<T, kWidth>(args, form, wanted, stream);
    launch_lists<WarpProducts<T, kWidth>, ListForm::general>(args, wanted, stream);
  });
}

template <class T>
ListSums<T> sums_of(const TensorView& rows, void* slots, bool rounded) {
  ListSums<T> sums{};
  if (rows.present()) sums.rows = tensor4<T>(rows);
  sums.slots = slots;
  sums.rounded = rounded;
  return sums;
}

}  // namespace

bool lists_backward(const AttentionCall& call, const ListCall& plan, const ListGradients& gradients,
                    Arena& arena, cudaStream_t stream) {
  const bool recompute = plan.weighting == ListWeighting::softmax && !gradients.delta.data;
  const std::int64_t values =
      gradients.lse.by_slot ? list_query_slots(call, plan) : call.B * call.H * call.N;
  float* delta = arena.take<float>(recompute ? values : 0);
  if (arena.counting()) return false;
  return dispatch_element(call.op, call.inputs.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    ListBackwardArgs<T> args = backward_args<T>(call, plan, gradients);
    args.dq = sums_of<T>(gradients.dq, gradients.slot_dq, gradients.slots_rounded);
    args.dk = sums_of<T>(gradients.dk, gradients.slot_dk, gradients.slots_rounded);
    args.dv = sums_of<T>(gradients.dv, gradients.slot_dv, gradients.slots_rounded);
    args.normalise = gradients.normalise;
    args.dq_products = gradients.dq_products;
    if (recompute) {
      args.delta_out = delta;
      args.delta_out_by_slot = gradients.lse.by_slot;
    }
    ListKernels wanted;
    wanted.keys = args.dk.wanted() || args.dv.wanted();
    wanted.queries = args.dq.wanted() || (wanted.keys && args.delta_out);
    if (gradients.dq.present())
      zero_padding(gradients.dq, call.inputs.q_sequences, call.num_items(), stream);
    if (gradients.dk.present())
      zero_padding(gradients.dk, call.inputs.k_sequences, call.num_items(), stream);
    if (gradients.dv.present())
      zero_padding(gradients.dv, call.inputs.k_sequences, call.num_items(), stream);
    const ListForm form = backward_form(plan, gradients);
    const bool hopper = takes(call, plan, args);
    if constexpr (sizeof(T) == 2) {
      if (hopper && form != ListForm::general && wanted.queries && takes_whole_lists(args)) {
        return launch_whole_lists_sm90a(args, gradients.cleared, stream);
      }
      if (hopper && form == ListForm::plain && wanted.keys && takes_windows(args)) {
        launch_windows_sm90a(args, stream);
        return false;
      }
    }
    launch(args, form, hopper, {wanted.queries, false}, stream);
    if (args.delta_out) args.delta = {args.delta_out, args.delta_out_by_slot};
    launch(args, form, hopper, {false, wanted.keys}, stream);
    return false;
  });
}

void lists_delta(const AttentionCall& call, const ListCall& plan, const ListGradients& gradients,
                 float* delta, cudaStream_t stream) {
  dispatch_element(call.op, call.inputs.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    ListBackwardArgs<T> args = backward_args<T>(call, plan, gradients);
    args.delta_out = delta;
    args.delta_out_by_slot = true;
    launch(args, backward_form(plan, gradients), takes(call, plan, args), {true, false}, stream);
  });
}

}  // namespace coterie::cuda
