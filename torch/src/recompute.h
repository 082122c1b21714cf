// SPDX-License-Identifier: MIT
// Activation checkpointing: a part of a model runs without a graph in the forward pass, and again
// with one in the backward pass. Only its input is kept.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

#include "coterie/torch/attention.h"

namespace coterie::torch_api {

struct RecomputedPart {
  std::function<PassOutput(const at::Tensor& x)> first;  // run in forward
  std::function<PassOutput(const at::Tensor& x)> again;  // must compute the same; run in backward
  std::vector<at::Tensor> parameters;                    // of the part, if they need gradients
  std::vector<at::Tensor> state;  // parameters and buffers it reads, which others may write
  bool random = false;  // whether it draws from torch's default generator, which is then rewound
};
// The backward pass throws if the state was written to after the first run.
PassOutput recompute(const RecomputedPart& part, const at::Tensor& x);

}  // namespace coterie::torch_api
