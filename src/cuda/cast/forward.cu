// SPDX-License-Identifier: MIT
// CAST: its shape, its plan, and the order of its stages in the forward pass:
//   select: affinities or scores of tokens and clusters, then the members of every cluster.
//   attend: slots of tokens, summaries of clusters, attention inside clusters (lists/lists.h), mix.
#include <algorithm>
#include <cstddef>

#include "cuda/api/pass.h"
#include "cuda/api/refusal.h"
#include "cuda/cast/stages.h"
#include "cuda/cluster/clustering.h"
#include "cuda/launch/launch.h"

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
  shape.dropout = call.dropout;
  return shape;
}

CastPlan::CastPlan(const CastShape& shape, const AttentionCall& call)
    : key_slot_heads(static_cast<int>(shape.list_heads > 1 ? call.H : call.value_heads)),
      member_tiles(1) {
  constexpr int kBlock = 64;  // clusters per block
  const std::int64_t groups = (shape.clusters + kBlock - 1) / kBlock, tokens = max(shape.N, 1);
  parts = key_chunks(call, shape.H, multiprocessors());
  chunks = key_chunks(call, groups * shape.H, 2 * multiprocessors());
  // As many runs as keep the device busy with clusters.
  const std::int64_t blocks = max(shape.items * shape.H * groups, std::int64_t{1});
  const std::int64_t wanted = (2 * multiprocessors() + blocks - 1) / blocks;
  mix_chunk =
      static_cast<int>((max((tokens + wanted - 1) / wanted, std::int64_t{256}) + 127) / 128 * 128);
  mix_runs = static_cast<int>((tokens + mix_chunk - 1) / mix_chunk);
}

namespace {

// Rows that are copied and written 16 bytes at a time, with row pitches in 32-bit bytes.
bool aligned(const TensorView& rows) { return !rows.present() || tensor4<const F16>(rows).aligned; }
bool near(const TensorView& rows) {
  return rows.stride(2) >= 0 && rows.stride(2) < std::int64_t{1} << 30;
}

}  // namespace

void CastPlan::choose_forward(const CastShape& shape, const AttentionCall& call,
                              const TensorView& out) {
  warpgroups = on_hopper() && call.inputs.q.dtype != DType::f32 && !shape.laplace &&
               aligned(call.inputs.q) && aligned(out) && near(call.inputs.q) && near(out) &&
               cast_mix_fits_sm90a(shape);
}

void CastPlan::choose_backward(const CastShape& shape, const AttentionCall& call,
                               const TensorView& grad_out, const AttentionGradients& to) {
  warpgroups = on_hopper() && call.inputs.q.dtype != DType::f32 && !shape.laplace &&
               aligned(call.inputs.q) && aligned(grad_out) && aligned(to.dq);
  // Sums over slots of query heads need one list for all.
  resident = warpgroups && !shape.dropout.on() && shape.width <= kCastResident && shape.D <= 64 &&
             (shape.group == 1 || shape.list_heads == 1) && aligned(call.k) &&
             aligned(call.inputs.v) && aligned(to.dk) && aligned(to.dv) && near(call.inputs.q) &&
             near(call.k) && near(call.inputs.v) && near(grad_out);
  if (!resident) return;
  key_slot_heads = shape.H;
  member_tiles = (shape.width + 63) / 64;
}

namespace {

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
    cast_backward(params_, call_, cast_saved(params_, result.saved), grad_out, gradients, arena,
                  stream_of(workspace));
  }

 private:
  // With an arena that only counts, nothing is launched.
  void attend_into(const AttentionResult& result, Arena& arena, cudaStream_t stream) const {
    CastForward pass{};
    pass.saved = cast_saved(params_, result.saved);
    pass.out = result.out;
    const CastShape shape = cast_shape(params_, call_, pass.saved.members);
    CastPlan plan(shape, call_);
    const std::int64_t table = call_.H * params_.clusters * call_.Dk;
    const std::int64_t each = call_.inputs.q.dtype == DType::f32 ? 4 : 2;
    pass.inner = arena.take<std::byte>(shape.slots() * shape.D * each);
    auto* rounded = arena.take<std::uint16_t>(table * (1 + call_.num_items()));
    if (!arena.counting()) plan.choose_forward(shape, call_, pass.out);
    pass.surrogates = rounded;
    pass.summaries = rounded + table;
    pass.slots = cast_token_slots(shape, call_, arena, stream);
    if (!arena.counting())
      cast_summaries(shape, call_, pass.saved, plan.warpgroups ? rounded : nullptr, stream);
    const CastLists inner = cast_inner_lists(shape, call_, arena, stream);
    if (!arena.counting()) {
      ListOutputs outputs;
      outputs.slot_rows = pass.inner;
      outputs.lse = pass.saved.member_lse;
      lists_forward(inner.call, inner.plan, outputs, stream);
      if (plan.warpgroups) return cast_mix_sm90a(shape, call_, pass, stream);
    }
    const CastLists mix = cast_mix_lists(shape, plan, call_, pass.saved, arena, stream);
    if (!arena.counting()) cast_mix(shape, call_, mix, pass, stream);
  }

  const CastParams& params_;
};

}  // namespace

std::unique_ptr<Pass> make_pass(const CastParams& params, const AttentionCall& call) {
  return std::make_unique<CastPass>(params, call);
}

}  // namespace coterie::cuda
