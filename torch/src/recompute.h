// SPDX-License-Identifier: MIT
// Activation checkpointing: a part of a model runs without a graph in the forward pass, and again
// with one in the backward pass. Only its inputs are kept.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace coterie::torch_api {

struct RecomputedPart {
  using Tensors = std::vector<at::Tensor>;
  std::function<Tensors(const Tensors& inputs)> first;  // run in forward
  std::function<Tensors(const Tensors& inputs)> again;  // must compute the same; run in backward
  Tensors parameters;                                   // of the part, if they need gradients
  Tensors state;        // parameters and buffers it reads, which others may write
  bool random = false;  // whether it draws from torch's default generator, which is then rewound
};
// Its outputs for defined inputs. The backward pass throws if the state was written to after the
// first run.
std::vector<at::Tensor> recompute(const RecomputedPart& part,
                                  const std::vector<at::Tensor>& inputs);

}  // namespace coterie::torch_api
