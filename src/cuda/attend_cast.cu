// SPDX-License-Identifier: MIT
// CAST: the order of its stages. The attention inside clusters is that of lists (lists.h).
#include <algorithm>

#include "cuda/attention.h"
#include "cuda/cast.h"
#include "cuda/cluster.h"
#include "cuda/device/await.cuh"
#include "cuda/hopper.h"
#include "cuda/launch.h"
#include "cuda/lists.h"
#include "cuda/padding.h"
#include "cuda/refusal.h"
#include "cuda/slot_sum.h"
#include "cuda/tuning.h"

namespace coterie::cuda {

CastShape cast_shape(const CastParams& params, const AttentionCall& call,
                     const std::int32_t* members) {
  const std::int64_t fair = (call.N + params.clusters - 1) / params.clusters;
  const std::int64_t size =
      params.mode == CastMode::single ? std::max(params.size, fair) : params.size;
  CastShape shape{};
  shape.tokens = sequence_spans(call.inputs.q_sequences, call.N);
  shape.items = static_cast<int>(call.num_items());
  shape.B = static_cast<int>(call.B);
  shape.H = static_cast<int>(call.H);
  shape.group = static_cast<int>(call.H / call.value_heads);
  shape.N = static_cast<int>(call.N);
  shape.D = static_cast<int>(call.Dk);
  shape.clusters = static_cast<int>(params.clusters);
  shape.width = static_cast<int>(std::min(size, call.N));
  shape.list_heads = params.share_heads ? 1 : shape.H;
  shape.scale = static_cast<float>(call.scale);
  shape.laplace = params.activation == CastActivation::laplace;
  shape.gate_scale = params.gate_scale;
  shape.gate = static_cast<const float*>(call.inputs.gate.data);
  shape.surrogates = static_cast<const float*>(call.inputs.centroids.data);
  shape.members = members;
  return shape;
}

CastSaved cast_saved(const CastParams& params, const std::vector<TensorView>& saved) {
  const auto data = [&](std::size_t t) { return static_cast<float*>(saved[t].data); };
  CastSaved tensors;
  if (saved.empty()) return tensors;  // counting
  tensors.members = static_cast<std::int32_t*>(saved[0].data);
  if (params.activation == CastActivation::laplace) {
    tensors.summary = data(1);
    return tensors;
  }
  tensors.member_lse = data(1);
  tensors.summary = data(2);
  tensors.summary_lse = data(3);
  tensors.combine_lse = data(4);
  return tensors;
}

namespace {

template <class T>
__global__ void repeat_heads_kernel(Tensor4<const T> from, T* to, int batches, int group) {
  await_previous();
  const int row = static_cast<int>(blockIdx.x), head = static_cast<int>(blockIdx.y);
  for (int batch = blockIdx.z; batch < batches; batch += gridDim.z) {
    const T* source = from.rows(batch, head / group, row).data;
    T* target =
        to + ((static_cast<std::int64_t>(batch) * gridDim.y + head) * gridDim.x + row) * from.width;
    for (int d = threadIdx.x; d < from.width; d += blockDim.x) target[d] = source[d];
  }
}

// A copy with every head `group` times.
TensorView repeat_heads(const AttentionCall& call, const TensorView& from, Arena& arena,
                        cudaStream_t stream) {
  TensorView copy;
  dispatch_element(call.op, from.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    T* to = arena.take<T>(call.B * call.H * call.S * from.size(3));
    copy = TensorView::contiguous(to, from.dtype, {call.B, call.H, call.S, from.size(3)},
                                  Device::cuda);
    if (!to) return;
    launch_early("cast heads", repeat_heads_kernel<T>,
                 dim3(static_cast<unsigned>(call.S), static_cast<unsigned>(call.H),
                      static_cast<unsigned>(std::min(call.B, kMaxBlocks))),
                 64, 0, stream, tensor4<const T>(from), to, static_cast<int>(call.B),
                 static_cast<int>(call.H / from.size(1)));
  });
  return copy;
}

class CastPass : public Pass {
 public:
  CastPass(const CastParams& params, const AttentionCall& call) : Pass(call), params_(params) {}

  std::string refusal() const override {
    if (call_.N != call_.S)
      return "the CUDA kernels need as many keys as queries; got " + std::to_string(call_.S) +
             " and " + std::to_string(call_.N);
    const std::string clusters = refuse_more_than(kMaxClusters, "clusters", params_.clusters);
    if (!clusters.empty()) return clusters;
    const std::string lists = refuse_lists(call_.num_items() * call_.H * params_.clusters);
    if (!lists.empty()) return lists;
    const CastShape shape = cast_shape(params_, call_, nullptr);
    return refuse_slots(static_cast<std::int64_t>(shape.clusters) * shape.width);
  }

  std::int64_t workspace_bytes() const override {
    Arena select, attend, backward;
    cast_select(params_, call_, nullptr, select, nullptr);
    attend_into({}, attend, nullptr);
    backward_into({}, {}, {}, backward, nullptr);
    return std::max({select.used(), attend.used(), backward.used()});
  }

  void select(const std::vector<TensorView>& saved, const Workspace& workspace) const override {
    Arena arena = take_workspace(workspace);
    cast_select(params_, call_, static_cast<std::int32_t*>(saved[0].data), arena,
                stream_of(workspace));
  }

  void attend(const AttentionResult& result, const Workspace& workspace) const override {
    Arena arena = take_workspace(workspace);
    attend_into(result, arena, stream_of(workspace));
  }

  void backward(const AttentionResult& result, const TensorView& grad_out,
                const AttentionGradients& gradients, const Workspace& workspace) const override {
    Arena arena = take_workspace(workspace);
    backward_into(result, grad_out, gradients, arena, stream_of(workspace));
  }

 private:
  // The attention inside clusters as one of lists. Where query heads of one key head have lists of
  // their own, keys and values are copied for each.
  struct Inner {
    AttentionCall call;
    ListPlan plan;
  };
  Inner inner_lists(const CastShape& shape, Arena& arena, cudaStream_t stream) const {
    Inner inner{call_, {}};
    inner.call.inputs.k_sequences = call_.inputs.q_sequences;
    if (shape.list_heads > 1 && shape.group > 1) {
      inner.call.k = inner.call.inputs.k = repeat_heads(call_, call_.k, arena, stream);
      inner.call.inputs.v = repeat_heads(call_, call_.inputs.v, arena, stream);
      inner.call.key_heads = inner.call.value_heads = call_.H;
    }
    ListSide side;
    side.layout = ListLayout::members;
    side.index = shape.members;
    side.index_heads = shape.list_heads;
    side.width = shape.width;
    inner.plan.lists = shape.clusters;
    inner.plan.queries = inner.plan.keys = side;
    inner.plan.weighting = shape.laplace ? ListWeighting::laplace : ListWeighting::softmax;
    inner.plan.scale = shape.scale;
    return inner;
  }

  TokenSlots token_slots(const CastShape& shape, Arena& arena, cudaStream_t stream) const {
    const TokenSlots slots = make_token_slots(
        arena, call_.inputs.q_sequences, call_.B, call_.N, shape.list_heads, shape.members,
        static_cast<std::int64_t>(shape.clusters) * shape.width, 0, shape.clusters);
    find_token_slots(slots, call_.B, arena, stream);
    return slots;
  }
  // Inner outputs, of the inputs' type.
  void* take_inner(const CastShape& shape, Arena& arena) const {
    const std::int64_t count = shape.slots() * shape.D;
    if (call_.inputs.q.dtype == DType::f32) return arena.take<float>(count);
    return arena.take<std::uint16_t>(count);
  }

  // Here and below an arena that only counts launches nothing.
  void attend_into(const AttentionResult& result, Arena& arena, cudaStream_t stream) const {
    CastForward pass{};
    pass.saved = cast_saved(params_, result.saved);
    pass.out = result.out;
    const CastShape shape = cast_shape(params_, call_, pass.saved.members);
    void* inner_out = take_inner(shape, arena);
    const std::int64_t table = call_.H * params_.clusters * call_.Dk;
    std::uint16_t* rounded = nullptr;
    if (call_.inputs.q.dtype != DType::f32)
      rounded = arena.take<std::uint16_t>(table * (1 + call_.num_items()));
    const bool empty = call_.N == 0;
    if (!empty) pass.slots = token_slots(shape, arena, stream);
    if (inner_out) cast_summaries(shape, call_, pass.saved, rounded, empty, stream);
    if (empty) return;
    pass.surrogates = shape.surrogates;
    pass.summaries = pass.saved.summary;
    if (rounded) {
      pass.surrogates = rounded;
      pass.summaries = rounded + table;
    }
    pass.inner = inner_out;
    const Inner inner = inner_lists(shape, arena, stream);
    if (!inner_out) return;
    ListOutputs outputs;
    outputs.slot_rows = inner_out;
    outputs.lse = pass.saved.member_lse;
    lists_forward(inner.call, inner.plan, outputs, stream);
    cast_mix(shape, call_, pass, stream);
  }

  CastBackward take_backward(const CastShape& shape, Arena& arena) const {
    const std::int64_t slots = shape.slots(), rows = call_.B * call_.H * call_.N;
    const std::int64_t clusters = call_.num_items() * call_.H * params_.clusters;
    CastBackward pass{};
    for (float** scalars :
         {&pass.dots, &pass.excess, &pass.weights, &pass.weighted, &pass.query_factors,
          &pass.key_factors, &pass.summary_weights, &pass.dgate_slots, &pass.shifts})
      *scalars = arena.take<float>(slots);
    pass.key_slot_heads = static_cast<int>(shape.list_heads > 1 ? call_.H : call_.value_heads);
    // Rows of 16 bits are by query head.
    const std::int64_t key_slots = std::max<std::int64_t>(pass.key_slot_heads, (call_.H + 1) / 2);
    pass.dq_slots = arena.take<float>(slots * call_.Dk);
    pass.dk_slots = arena.take<float>(slots / call_.H * key_slots * call_.Dk);
    pass.dv_slots = arena.take<float>(slots / call_.H * key_slots * call_.Dv);
    pass.facts = arena.take<float4>(rows);
    cast_cut_tokens(shape, call_, pass);
    pass.delta = arena.take<float>(rows);
    pass.dgate_rows = arena.take<float>(rows);
    pass.partials =
        arena.take<float>(pass.chunks.slots * call_.H * params_.clusters * 2 * call_.Dk);
    pass.member_tiles = (shape.width + 63) / 64;
    pass.member_parts = arena.take<float>(clusters * pass.member_tiles * 2 * call_.Dk);
    pass.key_parts = arena.take<float>(clusters * pass.member_tiles * call_.Dk);
    pass.dsummary = arena.take<float>(clusters * call_.Dv);
    pass.summary_dots = arena.take<float>(clusters);
    return pass;
  }

  // Whether the gradients of the mix, or also of the attention inside clusters, take warpgroups'
  // kernels.
  void choose_kernels(const CastShape& shape, CastBackward& pass) const {
    const auto aligned = [](const TensorView& rows) {
      return !rows.present() || tensor4<const F16>(rows).aligned;
    };
    if (call_.inputs.q.dtype == DType::f32 || shape.laplace) return;
    if (!pass.grad_out.present() || !on_hopper()) return;
    const AttentionGradients& to = pass.gradients;
    pass.hopper = aligned(call_.inputs.q) && aligned(pass.grad_out) && aligned(to.dq);
    pass.resident = pass.hopper && shape.width <= kCastResident && shape.D <= 64 &&
                    aligned(call_.k) && aligned(call_.inputs.v) && aligned(to.dk) && aligned(to.dv);
    // Their loaders count bytes of rows in 32 bits.
    const auto near = [](const TensorView& rows) { return rows.stride(2) < std::int64_t{1} << 30; };
    pass.resident = pass.resident && near(call_.inputs.q) && near(call_.k) &&
                    near(call_.inputs.v) && near(pass.grad_out);
    // Sums over slots of query heads with one list for all.
    pass.resident = pass.resident && (shape.group == 1 || shape.list_heads == 1);
    if (pass.resident) pass.key_slot_heads = shape.H;
  }

  void backward_into(const AttentionResult& result, const TensorView& grad_out,
                     const AttentionGradients& gradients, Arena& arena, cudaStream_t stream) const {
    const CastSaved saved = cast_saved(params_, result.saved);
    const CastShape shape = cast_shape(params_, call_, saved.members);
    CastBackward pass = take_backward(shape, arena);
    pass.saved = saved;
    pass.grad_out = grad_out;
    pass.gradients = gradients;
    choose_kernels(shape, pass);
    if (call_.N == 0) {
      if (gradients.dcentroids.present())
        COTERIE_CUDA(cudaMemsetAsync(
            gradients.dcentroids.data, 0,
            static_cast<std::size_t>(gradients.dcentroids.count()) * sizeof(float), stream));
      return;
    }
    cast_prepare(shape, call_, pass, arena, stream);
    pass.slots = token_slots(shape, arena, stream);
    if (pass.resident) {
      cast_inner_queries(shape, call_, pass, stream);
      backward_mix(shape, pass, stream);
      cast_inner_keys(shape, call_, pass, stream);
    } else {
      backward_lists(shape, pass, arena, stream);
    }
    if (!pass.dots) return;
    const bool folds = cast_fold_heads(shape, call_, pass, stream);
    if (pass.resident) return sum_slots(call_, slot_sums(pass), folds, stream);
    cast_fold(shape, call_, pass, stream);
    for (const TensorView* rows : {&gradients.dk, &gradients.dv})
      if (rows->present()) zero_padding(*rows, call_.inputs.q_sequences, call_.num_items(), stream);
  }
  // Of complete slots.
  std::vector<SlotSum> slot_sums(const CastBackward& pass) const {
    std::vector<SlotSum> sums;
    const auto add = [&](const void* slots, const TensorView& to, bool added) {
      if (to.present()) sums.push_back({pass.slots, slots, call_.H, to, added});
    };
    add(pass.dq_slots, pass.gradients.dq, true);
    add(pass.dk_slots, pass.gradients.dk, false);
    add(pass.dv_slots, pass.gradients.dv, false);
    return sums;
  }

  void backward_mix(const CastShape& shape, const CastBackward& pass, cudaStream_t stream) const {
    cast_facts(shape, pass, stream);
    cast_tokens_backward(shape, call_, pass, stream);
    cast_clusters_backward(shape, call_, pass, stream);
    cast_totals(shape, pass, stream);
  }

  // The attention inside clusters as one of lists.
  void backward_lists(const CastShape& shape, CastBackward& pass, Arena& arena,
                      cudaStream_t stream) const {
    const Inner inner = inner_lists(shape, arena, stream);
    ListGradients lists;
    lists.grad_out = pass.grad_out;
    lists.lse = {pass.saved.member_lse, true};
    pass.member_tiles = 1;
    if (pass.dots) {
      lists_delta(inner.call, inner.plan, lists, pass.dots, stream);
      cast_members_backward(shape, call_, pass, stream);
      backward_mix(shape, pass, stream);
      cast_summaries_backward(shape, call_, pass, stream);
    }
    lists.weight = {pass.weights, true};
    lists.delta = {pass.weighted, true};
    lists.slot_dq = static_cast<float*>(pass.dq_slots);
    lists.slot_dk = static_cast<float*>(pass.dk_slots);
    lists.slot_dv = static_cast<float*>(pass.dv_slots);
    lists_backward(inner.call, inner.plan, lists, arena, stream);
  }

  const CastParams& params_;
};

}  // namespace

std::unique_ptr<Pass> make_pass(const CastParams& params, const AttentionCall& call) {
  return std::make_unique<CastPass>(params, call);
}

}  // namespace coterie::cuda
