// SPDX-License-Identifier: MIT
// Full attention by cuDNN through torch, which is faster than the core's: torch/src/platform.h for
// torch's stable ABI. Its forward pass has equal bits for equal inputs; its backward pass has not,
// and runs only if set_fast allows it.
#pragma once

#include <vector>

#include "bridge.h"
#include "coterie/mechanism.h"

namespace coterie::stable_api {

// Allows kernels whose bits differ from run to run, in the whole process; at first not.
void set_fast(bool allowed);
bool fast();

// Whether a call is one for cuDNN: full attention over all keys in 16 bit, on Hopper. cuDNN
// prepares a plan for every shape, so only lengths that are multiples of 64 are its.
bool platform_attends(const Mechanism& mechanism, const AttentionInputs& inputs);

struct PlatformCall {
  const Tensor &q, &k, &v;
  bool causal;
  double scale;  // 0: the default
};

struct PlatformPass {
  Tensor out;  // as empty_rows
  Tensor lse;  // (B, H, N) f32, as the core saves it
};
PlatformPass platform_forward(const PlatformCall& call);
// dq, dk, dv.
std::vector<Tensor> platform_backward(const PlatformCall& call, const PlatformPass& pass,
                                      const Tensor& grad_out);

}  // namespace coterie::stable_api
