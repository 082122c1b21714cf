// SPDX-License-Identifier: MIT
// Activation checkpointing: a part of a model is run without a graph, and again with one when
// gradients are wanted, so that only its input is kept.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

#include "coterie/torch/attention.h"

namespace coterie::torch_api {

struct RecomputedPart {
  std::function<PassOutput(const at::Tensor& x)> first;  // run at once
  std::function<PassOutput(const at::Tensor& x)> again;  // must compute the same; run in backward
  std::vector<at::Tensor> parameters;                    // of the part, those with gradients
  std::vector<at::Tensor> state;  // what it reads and others may write: parameters, buffers
  bool random = false;  // whether it draws from torch's default generator, which is then rewound
};
// The backward pass refuses to run when the state was written to since the first run.
PassOutput recompute(const RecomputedPart& part, const at::Tensor& x);

}  // namespace coterie::torch_api
