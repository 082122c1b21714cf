// SPDX-License-Identifier: MIT
#include "positions.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/custom_function.h>

#include "bridge.h"
#include "coterie/positions.h"

namespace coterie::torch_api {
namespace {

using ::torch::autograd::AutogradContext;
using ::torch::autograd::variable_list;

at::Tensor rotate(const at::Tensor& x, const Rotation& rotation) {
  const c10::DeviceGuard guard(x.device());
  const at::Tensor rows = with_contiguous_rows(x), out = empty_rows(rows, x.size(3));
  rotate_rows(view(rows), rotation, view(out), Scratch(0, x).workspace());
  return out;
}

struct RotateFunction : ::torch::autograd::Function<RotateFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, std::int64_t first,
                            double base, bool inverse) {
    ctx->saved_data["first"] = first;
    ctx->saved_data["base"] = base;
    ctx->saved_data["inverse"] = inverse;
    return rotate(x, {first, base, inverse});
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grad_outputs) {
    return {apply(grad_outputs[0], ctx->saved_data["first"].toInt(),
                  ctx->saved_data["base"].toDouble(), !ctx->saved_data["inverse"].toBool()),
            {},
            {},
            {}};
  }
};

}  // namespace

at::Tensor rotated(const at::Tensor& x_BHND, const PositionOptions& options) {
  if (!at::GradMode::is_enabled()) return rotate(x_BHND, {options.first, options.base, false});
  return RotateFunction::apply(x_BHND, options.first, options.base, false);
}

at::Tensor waves(std::int64_t N, std::int64_t width, const PositionOptions& options,
                 const at::Tensor& like) {
  const at::Tensor rows = at::zeros({1, 1, N, width}, like.options());
  rows.narrow(3, 0, width / 2).fill_(1);
  return rotated(rows, options);
}

at::Tensor widened_queries(const at::Tensor& q_BHND, const RelativePositions& relative,
                           const PositionOptions& options) {
  const at::Tensor term =
      (at::linear(q_BHND, relative.weight) + relative.bias.unsqueeze(1)).to(q_BHND.scalar_type());
  const auto halves = term.chunk(2, 3);
  return at::cat({q_BHND, rotated(at::cat({halves[1], -halves[0]}, 3), options)}, 3);
}

at::Tensor widened_keys(const at::Tensor& k_BHND, std::int64_t width,
                        const PositionOptions& options) {
  const auto sizes = k_BHND.sizes();
  const at::Tensor features = waves(sizes[2], width, options, k_BHND);
  return at::cat({k_BHND, features.expand({sizes[0], sizes[1], sizes[2], width})}, 3);
}

}  // namespace coterie::torch_api
