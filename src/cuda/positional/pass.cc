// SPDX-License-Identifier: MIT
// Full, local and strided attention: which keys a query sees follows from positions.
#include <algorithm>

#include "cuda/api/pass.h"
#include "cuda/api/refusal.h"
#include "cuda/launch/launch.h"
#include "cuda/lists/lists.h"

namespace coterie::cuda {

namespace {

// Beyond N + S no two positions are that far apart, so larger numbers change nothing.
std::int64_t longest(const AttentionCall& call) { return call.N + call.S; }

ListPlan make_plan(const FullParams&, const AttentionCall& call) {
  ListPlan plan;
  plan.ranges.rule = call.causal ? ListRule::causal : ListRule::all;
  return plan;
}

ListPlan make_plan(const LocalParams& params, const AttentionCall& call) {
  ListPlan plan;
  const bool sliding = params.kind == LocalKind::sliding;
  plan.ranges.rule = sliding ? ListRule::sliding : ListRule::blocked;
  plan.ranges.causal = call.causal;
  // A window that is not causal reaches half of it to either side.
  plan.ranges.window = std::min(params.window, 2 * longest(call));
  plan.ranges.before = plan.ranges.after = std::min(params.flange, longest(call));
  return plan;
}

ListPlan make_plan(const StridedParams& params, const AttentionCall& call) {
  ListPlan plan;
  plan.lists = std::min(params.stride, longest(call));
  plan.ranges.rule = call.causal ? ListRule::causal : ListRule::all;
  return plan;
}

template <class Params>
class PositionalPass : public Pass {
 public:
  PositionalPass(const Params& params, const AttentionCall& call)
      : Pass(call), plan_(make_plan(params, call)) {
    plan_.scale = static_cast<float>(call.scale);
    plan_.filters.mask = call.inputs.mask;
  }

  std::string refusal() const override {
    // Tiles of 64 rows, at most two of a list that are not full.
    const std::int64_t full = call_.B * (std::max(call_.N, call_.S) / 64 + 1);
    return refuse_lists((2 * call_.num_items() * plan_.lists + full) * call_.H);
  }

  std::int64_t workspace_bytes() const override {
    Arena arena;
    lists_backward(call_, plan_, {}, arena, nullptr);
    return arena.used();
  }

  void select(const std::vector<TensorView>&, const Workspace&) const override {}

  void attend(const AttentionResult& result, const Workspace& workspace) const override {
    ListOutputs outputs;
    outputs.out = result.out;
    outputs.lse = static_cast<float*>(result.saved[0].data);
    lists_forward(call_, plan_, outputs, stream_of(workspace));
  }

  void backward(const AttentionResult& result, const TensorView& grad_out,
                const AttentionGradients& gradients, const Workspace& workspace) const override {
    Arena arena = take_workspace(workspace);
    ListGradients lists;
    lists.grad_out = grad_out;
    lists.lse.data = static_cast<const float*>(result.saved[0].data);
    lists.dq = gradients.dq;
    lists.dk = gradients.dk;
    lists.dv = gradients.dv;
    lists_backward(call_, plan_, lists, arena, stream_of(workspace));
  }

 private:
  ListPlan plan_;
};

}  // namespace

std::unique_ptr<Pass> make_pass(const FullParams& params, const AttentionCall& call) {
  return std::make_unique<PositionalPass<FullParams>>(params, call);
}
std::unique_ptr<Pass> make_pass(const LocalParams& params, const AttentionCall& call) {
  return std::make_unique<PositionalPass<LocalParams>>(params, call);
}
std::unique_ptr<Pass> make_pass(const StridedParams& params, const AttentionCall& call) {
  return std::make_unique<PositionalPass<StridedParams>>(params, call);
}

}  // namespace coterie::cuda
