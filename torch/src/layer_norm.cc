// SPDX-License-Identifier: MIT
#include "layer_norm.h"

#include <ATen/ops/native_layer_norm.h>
#include <ATen/ops/native_layer_norm_backward.h>
#include <torch/csrc/autograd/custom_function.h>

#include <tuple>

namespace coterie::torch_api {
namespace {

using ::torch::autograd::AutogradContext;
using ::torch::autograd::variable_list;

struct OrderedLayerNorm : ::torch::autograd::Function<OrderedLayerNorm> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& gain,
                            const at::Tensor& bias, double eps) {
    const auto [out, mean, scale] = at::native_layer_norm(x, gain.sizes(), gain, bias, eps);
    context->save_for_backward({x, gain, bias, mean, scale});
    return out;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &x = saved[0], &gain = saved[1], &mean = saved[3], &scale = saved[4];
    const at::Tensor gradient = gradients[0].contiguous();
    const at::Tensor dx = std::get<0>(at::native_layer_norm_backward(
        gradient, x, gain.sizes(), mean, scale, gain, saved[2], {true, false, false}));
    const at::Tensor rows = gradient.flatten(0, -2);
    const at::Tensor normal = ((x - mean) * scale).flatten(0, -2);
    return {dx, (rows * normal).sum(0), rows.sum(0), at::Tensor()};
  }
};

}  // namespace

at::Tensor layer_norm(::torch::nn::LayerNorm& norm, const at::Tensor& x) {
  const bool own = x.is_cpu() && x.scalar_type() == norm->weight.scalar_type();
  if (!own) return norm(x);
  return OrderedLayerNorm::apply(x, norm->weight, norm->bias, norm->options.eps());
}

}  // namespace coterie::torch_api
