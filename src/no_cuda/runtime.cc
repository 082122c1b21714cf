// SPDX-License-Identifier: MIT
// The CUDA entry points of a library built without CUDA: there is no device and no kernel.
#include "core/check.h"
#include "cuda/entry.h"

namespace coterie::cuda {

namespace {

[[noreturn]] void refuse(const AttentionCall& call) {
  fail(call.op,
       "expected tensors on the cpu; got tensors on cuda, and this library was built without CUDA");
}

}  // namespace

bool available() { return false; }

std::vector<CudaDevice> devices() { return {}; }

const char* toolkit() { return "none"; }

std::string refusal(const Mechanism&, const AttentionCall&) {
  return "this library was built without CUDA";
}

std::int64_t workspace_bytes(const Mechanism&, const AttentionCall& call) { refuse(call); }

void select(const Mechanism&, const AttentionCall& call, const std::vector<TensorView>&,
            const Workspace&) {
  refuse(call);
}

void attend(const Mechanism&, const AttentionCall& call, const AttentionResult&, const Workspace&) {
  refuse(call);
}

void forward(const Mechanism&, const AttentionCall& call, const AttentionResult&,
             const Workspace&) {
  refuse(call);
}

void backward(const Mechanism&, const AttentionCall& call, const AttentionResult&,
              const TensorView&, const AttentionGradients&, const Workspace&) {
  refuse(call);
}

}  // namespace coterie::cuda
