// SPDX-License-Identifier: MIT
// Layer norm whose gradients have the same bits for any number of threads.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/modules/normalization.h>

namespace coterie::torch_api {

// norm(x). On the CPU, torch sums the gradients of gain and bias in an order that depends on the
// number of threads; here they are sums over columns, which do not.
at::Tensor layer_norm(::torch::nn::LayerNorm& norm, const at::Tensor& x);

}  // namespace coterie::torch_api
