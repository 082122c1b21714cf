// SPDX-License-Identifier: MIT
// The steps of a transformer block between its matrix products as differentiable functions
// (coterie/block.h), for passes with autocast: the residual stream is f32, the products are 16 bit.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/modules/normalization.h>

#include <optional>

namespace coterie::torch_api {

// The type of matrix products if a pass over x (..., E) runs these functions: on a GPU with
// autocast, for f32 rows of a width that they support.
std::optional<at::ScalarType> fused_type(const at::Tensor& x);
// Whether x is the output of such functions: 16 bit, on a GPU.
bool is_fused_type(const at::Tensor& x);
// Also on the CPU, where torch's operations are faster: for tests.
void fuse_on_cpu(bool wanted);

// The residual stream: x + branch + branch_bias, a sum that the next norm computes. Branch and bias
// may be undefined.
struct Residual {
  at::Tensor x, branch, branch_bias;
};
struct NormedSum {
  at::Tensor sum;     // of the residual stream
  at::Tensor normed;  // norm(sum), in `type`
};
NormedSum add_norm(const ::torch::nn::LayerNorm& norm, const Residual& stream, at::ScalarType type);

// gelu(x + bias); the bias (f32) may be undefined.
at::Tensor bias_gelu(const at::Tensor& x, const at::Tensor& bias);

}  // namespace coterie::torch_api
