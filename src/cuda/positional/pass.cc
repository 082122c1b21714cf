// SPDX-License-Identifier: MIT
// Full, local and strided attention: which keys a query sees follows from positions.
#include <algorithm>

#include "cuda/api/pass.h"
#include "cuda/api/refusal.h"
#include "cuda/launch/launch.h"
#include "cuda/lists/lists.h"

namespace coterie::cuda {

namespace {

// No two positions are further apart than N + S, so larger values change nothing.
std::int64_t longest(const AttentionCall& call) { return call.N + call.S; }

ListCall list_call(const FullParams&, const AttentionCall& call) {
  ListCall lists;
  lists.ranges.rule = call.causal ? ListRule::causal : ListRule::all;
  return lists;
}

ListCall list_call(const LocalParams& params, const AttentionCall& call) {
  ListCall lists;
  const bool sliding = params.kind == LocalKind::sliding;
  lists.ranges.rule = sliding ? ListRule::sliding : ListRule::blocked;
  lists.ranges.causal = call.causal;
  // A window that is not causal extends half its size to either side.
  lists.ranges.window = std::min(params.window, 2 * longest(call));
  lists.ranges.before = lists.ranges.after = std::min(params.flange, longest(call));
  return lists;
}

ListCall list_call(const StridedParams& params, const AttentionCall& call) {
  ListCall lists;
  lists.lists = std::min(params.stride, longest(call));
  lists.ranges.rule = call.causal ? ListRule::causal : ListRule::all;
  return lists;
}

class PositionalPass : public Pass {
 public:
  PositionalPass(const ListCall& lists, const AttentionCall& call) : Pass(call), lists_(lists) {
    lists_.scale = static_cast<float>(call.scale);
    lists_.filters.mask = call.inputs.mask;
  }

  std::string refusal() const override {
    // Tiles of 64 rows; at most two tiles per list are partial.
    const std::int64_t full = call_.B * (std::max(call_.N, call_.S) / 64 + 1);
    return refuse_lists((2 * call_.num_items() * lists_.lists + full) * call_.H);
  }

  std::int64_t workspace_bytes() const override {
    Arena attending, going_back;
    if (takes_one_query(call_, lists_)) attend_one_query(call_, lists_, {}, attending, nullptr);
    lists_backward(call_, lists_, {}, going_back, nullptr);
    return std::max(attending.used(), going_back.used());
  }

  void select(const std::vector<TensorView>&, const Workspace&) const override {}

  void attend(const AttentionResult& result, const Workspace& workspace) const override {
    ListOutputs outputs;
    outputs.out = result.out;
    outputs.lse = static_cast<float*>(result.saved[0].data);
    if (takes_one_query(call_, lists_)) {
      Arena arena = take_workspace(workspace);
      return attend_one_query(call_, lists_, outputs, arena, stream_of(workspace));
    }
    lists_forward(call_, lists_, outputs, stream_of(workspace));
  }

  void backward(const AttentionResult& result, const TensorView& grad_out,
                const AttentionGradients& gradients, const Workspace& workspace) const override {
    Arena arena = take_workspace(workspace);
    ListGradients wanted;
    wanted.grad_out = grad_out;
    wanted.lse.data = static_cast<const float*>(result.saved[0].data);
    wanted.dq = gradients.dq;
    wanted.dk = gradients.dk;
    wanted.dv = gradients.dv;
    if (call_.inputs.delta_from_output) wanted.out = result.out;
    lists_backward(call_, lists_, wanted, arena, stream_of(workspace));
  }

 private:
  ListCall lists_;
};

}  // namespace

std::unique_ptr<Pass> make_pass(const FullParams& params, const AttentionCall& call) {
  return std::make_unique<PositionalPass>(list_call(params, call), call);
}
std::unique_ptr<Pass> make_pass(const LocalParams& params, const AttentionCall& call) {
  return std::make_unique<PositionalPass>(list_call(params, call), call);
}
std::unique_ptr<Pass> make_pass(const StridedParams& params, const AttentionCall& call) {
  return std::make_unique<PositionalPass>(list_call(params, call), call);
}

}  // namespace coterie::cuda
