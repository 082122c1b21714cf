// SPDX-License-Identifier: MIT
// Full attention by cuDNN through torch, which is faster than the core's. Its forward pass has
// equal bits for equal inputs; its backward pass has not, and runs only if coterie/torch/fast.h
// allows it.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

#include "coterie/mechanism.h"
#include "coterie/torch/functional.h"
#include "head_group.h"

namespace coterie::torch_api {

// Whether a call is one for cuDNN: full attention over all keys in 16 bit, on Hopper. Not with
// dropout, which would be another than the core's.
bool platform_attends(const Mechanism& mechanism, const HeadRows& rows,
                      const AttentionOptions& options);

struct PlatformPass {
  at::Tensor out;                         // (B, h, N, D), tokens before heads in memory if q's are
  at::Tensor lse;                         // (B, h, N) f32, as the core saves it
  at::Tensor philox_seed, philox_offset;  // of dropout, which is not used; the backward pass asks
};
PlatformPass platform_forward(const HeadRows& rows, bool causal, double scale);
// dq, dk, dv.
std::tuple<at::Tensor, at::Tensor, at::Tensor> platform_backward(const at::Tensor& grad_out,
                                                                 const HeadRows& rows,
                                                                 const PlatformPass& pass,
                                                                 bool causal, double scale);

}  // namespace coterie::torch_api
