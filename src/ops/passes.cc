// SPDX-License-Identifier: MIT
// Passes of any mechanism: checks, then the back end.
#include "coterie/passes.h"

#include <limits>

#include "core/check.h"
#include "core/parallel.h"
#include "cpu/mechanisms/attention.h"
#include "cuda/api/entry.h"
#include "ops/call.h"

namespace coterie {

namespace {

// A call with a resolved mechanism and checked inputs.
struct Checked {
  Mechanism mechanism;
  AttentionCall call;
  SavedLayout layout;

  Checked(const Mechanism& asked, const AttentionInputs& inputs)
      : mechanism(resolve(asked, inputs.causal)),
        call(ops::make_call(mechanism, inputs)),
        layout(ops::saved_layout(mechanism, call)) {
    if (call.device == Device::cpu) return;
    const std::string refusal = cuda::refusal(mechanism, call);
    COTERIE_CHECK(refusal.empty(), call.op, "expected tensors on the cpu; got tensors on ",
                  describe(call.device), ", and ", refusal);
  }

  bool on_cuda() const { return call.device == Device::cuda; }
};

std::int64_t bytes_of(const Checked& checked) {
  if (checked.on_cuda()) return cuda::workspace_bytes(checked.mechanism, checked.call);
  return std::visit([&](const auto& params) { return cpu::workspace_bytes(params, checked.call); },
                    checked.mechanism);
}

// Calls on a GPU do not use the CPU's threads.
CallThreads threads_for(const Checked& checked, const Workspace& workspace) {
  if (checked.on_cuda()) return CallThreads();
  return {workspace.bytes, [&] { return bytes_of(checked); },
          ops::most_threads(checked.call, checked.call.S)};
}

// Without queries or keys there is nothing to compute.
bool has_no_pairs(const AttentionCall& call) { return call.B == 0 || call.N == 0 || call.S == 0; }

// Writes the results of such a call on a GPU: outputs and saved values 0, log-sum-exps -inf, counts
// -1. The CPU computes the same.
void attend_to_nothing(const Checked& checked, const AttentionResult& result,
                       const Workspace& workspace) {
  cuda::fill(result.out, 0, workspace);
  for (std::size_t t = checked.layout.selection_count; t < result.saved.size(); ++t) {
    const TensorLayout& layout = checked.layout.tensors[t];
    const bool lse = layout.name.find("lse") != std::string::npos;
    const double value = lse ? -std::numeric_limits<double>::infinity() : 0;
    cuda::fill(result.saved[t], layout.dtype == DType::i32 ? -1 : value, workspace);
  }
}

void check_out(const AttentionCall& call, const TensorView& out) {
  ops::check_rows(call.op, "out", out, 4, call.device);
  ops::check_dtype(call.op, "out", out, call.inputs.q.dtype);
  ops::check_shape(call.op, "out", out, {call.B, call.H, call.N, call.Dv});
}

}  // namespace

SavedLayout attention_saved(const Mechanism& mechanism, const AttentionInputs& inputs) {
  return Checked(mechanism, inputs).layout;
}

std::int64_t attention_workspace_bytes(const Mechanism& mechanism, const AttentionInputs& inputs) {
  const CallThreads threads;
  return bytes_of(Checked(mechanism, inputs));
}

void attention_select(const Mechanism& mechanism, const AttentionInputs& inputs,
                      const std::vector<TensorView>& saved, const Workspace& workspace) {
  const Checked checked(mechanism, inputs);
  const CallThreads threads = threads_for(checked, workspace);
  ops::check_saved(checked.call, checked.layout, saved, checked.layout.selection_count);
  if (checked.on_cuda()) return cuda::select(checked.mechanism, checked.call, saved, workspace);
  std::visit([&](const auto& params) { cpu::select(params, checked.call, saved, workspace); },
             checked.mechanism);
}

void attention_attend(const Mechanism& mechanism, const AttentionInputs& inputs,
                      const AttentionResult& result, const Workspace& workspace) {
  const Checked checked(mechanism, inputs);
  const CallThreads threads = threads_for(checked, workspace);
  check_out(checked.call, result.out);
  ops::check_saved(checked.call, checked.layout, result.saved, checked.layout.tensors.size());
  if (checked.on_cuda() && has_no_pairs(checked.call))
    return attend_to_nothing(checked, result, workspace);
  if (checked.on_cuda()) return cuda::attend(checked.mechanism, checked.call, result, workspace);
  std::visit([&](const auto& params) { cpu::attend(params, checked.call, result, workspace); },
             checked.mechanism);
}

void attention_forward(const Mechanism& mechanism, const AttentionInputs& inputs,
                       const AttentionResult& result, const Workspace& workspace) {
  const Checked checked(mechanism, inputs);
  const CallThreads threads = threads_for(checked, workspace);
  check_out(checked.call, result.out);
  ops::check_saved(checked.call, checked.layout, result.saved, checked.layout.tensors.size());
  if (checked.on_cuda() && has_no_pairs(checked.call)) {
    cuda::select(checked.mechanism, checked.call, result.saved, workspace);
    return attend_to_nothing(checked, result, workspace);
  }
  if (checked.on_cuda()) return cuda::forward(checked.mechanism, checked.call, result, workspace);
  std::visit(
      [&](const auto& params) {
        cpu::select(params, checked.call, result.saved, workspace);
        cpu::attend(params, checked.call, result, workspace);
      },
      checked.mechanism);
}

void attention_backward(const Mechanism& mechanism, const AttentionInputs& inputs,
                        const AttentionResult& result, const TensorView& grad_out,
                        const AttentionGradients& gradients, const Workspace& workspace) {
  const Checked checked(mechanism, inputs);
  const CallThreads threads = threads_for(checked, workspace);
  check_out(checked.call, result.out);
  ops::check_saved(checked.call, checked.layout, result.saved, checked.layout.tensors.size());
  ops::check_gradients(checked.mechanism, checked.call, grad_out, gradients);
  if (checked.on_cuda() && has_no_pairs(checked.call)) {
    for (const TensorView* gradient :
         {&gradients.dq, &gradients.dk, &gradients.dv, &gradients.dcentroids, &gradients.dgate,
          &gradients.dlogit_scale})
      cuda::fill(*gradient, 0, workspace);
    return;
  }
  if (checked.on_cuda())
    return cuda::backward(checked.mechanism, checked.call, result, grad_out, gradients, workspace);
  std::visit(
      [&](const auto& params) {
        cpu::backward(params, checked.call, result, grad_out, gradients, workspace);
      },
      checked.mechanism);
}

}  // namespace coterie
