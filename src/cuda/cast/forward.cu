// SPDX-License-Identifier: MIT
// CAST: the order of its stages in the forward pass. The attention inside clusters is that of lists
// (lists/lists.h).
#include <algorithm>

#include "cuda/api/pass.h"
#include "cuda/api/refusal.h"
#include "cuda/cast/pass.h"
#include "cuda/cluster/clustering.h"
#include "cuda/launch/dispatch.h"
#include "cuda/launch/launch.h"
#include "cuda/prim/dependent.cuh"

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
  if (saved.empty()) return tensors;  // the arena only counts
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
    if (arena.counting() || copy.count() == 0) return;
    launch_early("cast heads", repeat_heads_kernel<T>,
                 dim3(static_cast<unsigned>(call.S), static_cast<unsigned>(call.H),
                      static_cast<unsigned>(std::min(call.B, kMaxBlocks))),
                 64, 0, stream, tensor4<const T>(from), to, static_cast<int>(call.B),
                 static_cast<int>(call.H / from.size(1)));
  });
  return copy;
}

}  // namespace

CastInner cast_inner_lists(const CastShape& shape, const AttentionCall& call, Arena& arena,
                           cudaStream_t stream) {
  CastInner inner{call, {}};
  inner.call.inputs.k_sequences = call.inputs.q_sequences;
  if (shape.list_heads > 1 && shape.group > 1) {
    inner.call.k = inner.call.inputs.k = repeat_heads(call, call.k, arena, stream);
    inner.call.inputs.v = repeat_heads(call, call.inputs.v, arena, stream);
    inner.call.key_heads = inner.call.value_heads = call.H;
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

TokenSlots cast_token_slots(const CastShape& shape, const AttentionCall& call, Arena& arena,
                            cudaStream_t stream) {
  const TokenSlots slots = make_token_slots(
      arena, call.inputs.q_sequences, call.B, call.N, shape.list_heads, shape.members,
      static_cast<std::int64_t>(shape.clusters) * shape.width, 0, shape.clusters);
  find_token_slots(slots, arena, stream);
  return slots;
}

namespace {

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
    cast_backward(params_, call_, {}, {}, {}, backward, nullptr);
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
    cast_backward(params_, call_, result, grad_out, gradients, arena, stream_of(workspace));
  }

 private:
  // Inner outputs, of the inputs' type.
  void* take_inner(const CastShape& shape, Arena& arena) const {
    const std::int64_t count = shape.slots() * shape.D;
    if (call_.inputs.q.dtype == DType::f32) return arena.take<float>(count);
    return arena.take<std::uint16_t>(count);
  }

  // An arena that only counts launches nothing.
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
    pass.slots = cast_token_slots(shape, call_, arena, stream);
    if (!arena.counting()) cast_summaries(shape, call_, pass.saved, rounded, stream);
    pass.surrogates = shape.surrogates;
    pass.summaries = pass.saved.summary;
    if (rounded) {
      pass.surrogates = rounded;
      pass.summaries = rounded + table;
    }
    pass.inner = inner_out;
    const CastInner inner = cast_inner_lists(shape, call_, arena, stream);
    if (arena.counting()) return;
    ListOutputs outputs;
    outputs.slot_rows = inner_out;
    outputs.lse = pass.saved.member_lse;
    lists_forward(inner.call, inner.plan, outputs, stream);
    cast_mix(shape, call_, pass, stream);
  }

  const CastParams& params_;
};

}  // namespace

std::unique_ptr<Pass> make_pass(const CastParams& params, const AttentionCall& call) {
  return std::make_unique<CastPass>(params, call);
}

}  // namespace coterie::cuda
