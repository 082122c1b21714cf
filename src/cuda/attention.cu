// SPDX-License-Identifier: MIT
// Which mechanisms have CUDA kernels.
#include "core/check.h"
#include "cuda/entry.h"

namespace coterie::cuda {

namespace {

[[noreturn]] void refuse(const AttentionCall& call) {
  fail(call.op, "expected tensors on the cpu; got tensors on cuda, for which there are no kernels");
}

}  // namespace

std::string refusal(const Mechanism&, const AttentionCall&) {
  return "this mechanism has no CUDA kernels yet";
}

std::int64_t workspace_bytes(const Mechanism&, const AttentionCall& call) { refuse(call); }

void select(const Mechanism&, const AttentionCall& call, const std::vector<TensorView>&,
            const Workspace&) {
  refuse(call);
}

void attend(const Mechanism&, const AttentionCall& call, const AttentionResult&, const Workspace&) {
  refuse(call);
}

void backward(const Mechanism&, const AttentionCall& call, const AttentionResult&,
              const TensorView&, const AttentionGradients&, const Workspace&) {
  refuse(call);
}

}  // namespace coterie::cuda
