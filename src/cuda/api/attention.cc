// SPDX-License-Identifier: MIT
// Forwards the library's entry points to the Pass of a mechanism.
#include "cuda/api/pass.h"

#include <algorithm>

#include "cuda/api/entry.h"
#include "cuda/api/refusal.h"
#include "cuda/launch/guard.h"

namespace coterie::cuda {

namespace {

std::string refuse_shape(const AttentionCall& call) {
  const std::string type = refuse_type(call.inputs.q.dtype);
  if (!type.empty()) return type;
  if (call.Dk != call.Dv)
    return "the CUDA kernels need keys and values of one width; got " + std::to_string(call.Dk) +
           " and " + std::to_string(call.Dv);
  const std::string width = refuse_width(call.Dk);
  if (!width.empty()) return width;
  for (const std::string& reason :
       {refuse_more_than(kMaxBlocks, "heads", call.H),
        refuse_more_than(kMaxLists, "sequences times heads", call.num_items() * call.H)})
    if (!reason.empty()) return reason;
  return refuse_more_than(kMaxRows, "rows of a batch entry", std::max(call.N, call.S));
}

std::unique_ptr<Pass> pass_of(const Mechanism& mechanism, const AttentionCall& call) {
  return std::visit([&](const auto& params) { return make_pass(params, call); }, mechanism);
}

}  // namespace

std::string refusal(const Mechanism& mechanism, const AttentionCall& call) {
  const std::string reason = pass_of(mechanism, call)->refusal();
  return reason.empty() ? refuse_shape(call) : reason;
}

std::int64_t workspace_bytes(const Mechanism& mechanism, const AttentionCall& call) {
  const DeviceGuard guard(call.op, call.device);
  return pass_of(mechanism, call)->workspace_bytes();
}

void select(const Mechanism& mechanism, const AttentionCall& call,
            const std::vector<TensorView>& saved, const Workspace& workspace) {
  const DeviceGuard guard(call.op, call.device);
  pass_of(mechanism, call)->select(saved, workspace);
}

void attend(const Mechanism& mechanism, const AttentionCall& call, const AttentionResult& result,
            const Workspace& workspace) {
  const DeviceGuard guard(call.op, call.device);
  pass_of(mechanism, call)->attend(result, workspace);
}

void forward(const Mechanism& mechanism, const AttentionCall& call, const AttentionResult& result,
             const Workspace& workspace) {
  const DeviceGuard guard(call.op, call.device);
  pass_of(mechanism, call)->forward(result, workspace);
}

void backward(const Mechanism& mechanism, const AttentionCall& call, const AttentionResult& result,
              const TensorView& grad_out, const AttentionGradients& gradients,
              const Workspace& workspace) {
  const DeviceGuard guard(call.op, call.device);
  pass_of(mechanism, call)->backward(result, grad_out, gradients, workspace);
}

}  // namespace coterie::cuda
