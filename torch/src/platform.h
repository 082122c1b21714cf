// SPDX-License-Identifier: MIT
// Full attention by cuDNN through torch, where it is faster than the core's and its backward pass
// has equal bits for equal inputs.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>
#include <vector>

#include "coterie/mechanism.h"
#include "coterie/torch/functional.h"
#include "head_group.h"

namespace coterie::torch_api {

// Whether a call is one for cuDNN: full attention over all keys in 16 bit, on Hopper.
bool platform_attends(const Mechanism& mechanism, const HeadRows& rows,
                      const AttentionOptions& options);

struct PlatformPass {
  at::Tensor out;                 // (B, h, N, D), tokens before heads in memory if q's are
  std::vector<at::Tensor> saved;  // for the backward pass
};
PlatformPass platform_forward(const HeadRows& rows, bool causal, double scale);
// dq, dk, dv.
std::tuple<at::Tensor, at::Tensor, at::Tensor> platform_backward(const at::Tensor& grad_out,
                                                                 const HeadRows& rows,
                                                                 const PlatformPass& pass,
                                                                 bool causal, double scale);

}  // namespace coterie::torch_api
